"""SwiGLU's backward pass and the cast of its result to fp8 in one Triton kernel. Imported on a GPU alone.

For `gate`, `up` and the gradient `dy` of SiLU(gate) up, with s = sigmoid(gate),

    d_gate = dy up s (1 + gate (1 - s))          d_up = dy gate s

The dgrad and wgrad GEMMs of fc1 take both side by side in fp8: row-wise and transposed. Two kernels (bf16 gradient,
then cast and transpose) move 18 bytes per element of `dy`, this one 10, and the bf16 tensor needs no memory.

Everything is fp32 and rounded once, to fp8; the two kernels round to bf16 between. The scale is delayed scaling's,
known beforehand; the amax for its next update is recorded on the way, before scaling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm_fp8.kernels.fp8_cast_triton import CASTS, to_fp8

BLOCK_TOKENS, BLOCK_COLUMNS, NUM_WARPS = 64, 64, 4
"""Of a program. Larger blocks spill registers, narrower ones write less than 32 contiguous bytes."""


@triton.jit
def _amax(values: tl.tensor) -> tl.tensor:
    return tl.max(tl.max(tl.abs(values), axis=1), axis=0)


@triton.jit(do_not_specialize=["scale_pointer", "amax_pointer"])
def _dswiglu_cast_kernel(
    gradient_pointer: tl.tensor,
    gate_and_up_pointer: tl.tensor,
    rowwise_pointer: tl.tensor,
    transposed_pointer: tl.tensor,
    scale_pointer: tl.tensor,
    scale_inverse_pointer: tl.tensor,
    amax_pointer: tl.tensor,
    num_tokens: tl.tensor,
    WIDTH: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    # Neighbouring programs take the same columns of other tokens: together they fill rows of the transposed result.
    blocks_of_tokens = tl.cdiv(num_tokens, BLOCK_TOKENS)
    program = tl.program_id(0)
    tokens = (program % blocks_of_tokens) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    columns = (program // blocks_of_tokens) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (tokens < num_tokens)[:, None] & (columns < WIDTH)[None, :]
    rows = tokens.to(tl.int64)[:, None]

    scale = tl.load(scale_pointer)
    if program == 0:
        tl.store(scale_inverse_pointer, tl.math.div_rn(1.0, scale))
    dy = tl.load(gradient_pointer + rows * WIDTH + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    gate_places = rows * (2 * WIDTH) + columns[None, :]
    gate = tl.load(gate_and_up_pointer + gate_places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up_pointer + gate_places + WIDTH, mask=inside, other=0.0).to(tl.float32)

    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    gate_gradient = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    up_gradient = dy * gate * sigmoid
    gate_cast, up_cast = to_fp8(gate_gradient * scale, CAST), to_fp8(up_gradient * scale, CAST)
    tl.store(rowwise_pointer + gate_places, gate_cast, mask=inside)
    tl.store(rowwise_pointer + gate_places + WIDTH, up_cast, mask=inside)
    places = columns.to(tl.int64)[:, None] * num_tokens + tokens[None, :]
    inside_transposed = (columns < WIDTH)[:, None] & (tokens < num_tokens)[None, :]
    tl.store(transposed_pointer + places, tl.trans(gate_cast), mask=inside_transposed)
    behind = places + num_tokens.to(tl.int64) * WIDTH
    tl.store(transposed_pointer + behind, tl.trans(up_cast), mask=inside_transposed)
    # Positive floats are ordered as the integers of their bits: one atomic instruction.
    tl.atomic_max(amax_pointer, tl.maximum(_amax(gate_gradient), _amax(up_gradient)), sem="relaxed")


def dswiglu_cast(
    gradient: Tensor, gate_and_up: Tensor, scale: Tensor, amax: Tensor, fp8_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient with respect to `gate_and_up`, times `scale`, in fp8.

    Args:
        gradient: bf16, fp16 or fp32 [T, f], contiguous, on a GPU: with respect to SwiGLU's output.
        gate_and_up: of the same dtype [T, 2 f], contiguous: SwiGLU's input, the gate first.
        scale: fp32 [1].
        amax: fp32 [1], at least 0; raised to the amax of the unscaled gradient.
        fp8_dtype: `torch.float8_e5m2` or `torch.float8_e4m3fn`.

    Returns:
        The gradient of `fp8_dtype` [T, 2 f], the same transposed [2 f, T], contiguous, and 1 / `scale`, fp32 [1].

    Raises:
        ValueError: on shapes that do not fit.
    """
    num_tokens, width = gradient.shape
    if gate_and_up.shape != (num_tokens, 2 * width) or not (gradient.is_contiguous() and gate_and_up.is_contiguous()):
        raise ValueError(
            f"a contiguous gradient {tuple(gradient.shape)} needs a contiguous input {(num_tokens, 2 * width)}; it is "
            f"{tuple(gate_and_up.shape)}"
        )
    rowwise = torch.empty(num_tokens, 2 * width, dtype=fp8_dtype, device=gradient.device)
    transposed = torch.empty(2 * width, num_tokens, dtype=fp8_dtype, device=gradient.device)
    scale_inverse = torch.empty_like(scale)
    if num_tokens == 0:
        return rowwise, transposed, scale_inverse
    programs = triton.cdiv(num_tokens, BLOCK_TOKENS) * triton.cdiv(width, BLOCK_COLUMNS)
    with torch.cuda.device_of(gradient):
        _dswiglu_cast_kernel[(programs,)](
            gradient,
            gate_and_up,
            rowwise.view(torch.uint8),
            transposed.view(torch.uint8),
            scale,
            scale_inverse,
            amax,
            num_tokens,
            WIDTH=width,
            CAST=CASTS[fp8_dtype],
            BLOCK_TOKENS=BLOCK_TOKENS,
            BLOCK_COLUMNS=BLOCK_COLUMNS,
            num_warps=NUM_WARPS,
        )
    return rowwise, transposed, scale_inverse
