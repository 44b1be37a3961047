# mypy: disable-error-code="import-not-found,import-untyped"
"""SwiGLU's backward pass and the cast of its result to fp8 in one Triton kernel. Imported on a GPU alone: a torch without CUDA comes without triton.

For `gate`, `up` and the gradient `dy` of SiLU(gate) up, with s = sigmoid(gate),

    d_gate = dy up s (1 + gate (1 - s))          d_up = dy gate s

and both GEMMs behind it, for the gradient of fc1's input and of its weight, want the two side by side in fp8: the one row-wise, the other transposed. Apart,
one kernel writes them in bf16 and a second one reads that to cast and transpose it. Here nothing is written but fp8: of the 18 bytes per element of `dy`
that both kernels move, 10 are left, and there is no moment at which the bf16 tensor needs memory.

Everything is in fp32 and is rounded once, to fp8; the two kernels round to bf16 between. The scale is delayed scaling's, known beforehand; the largest
absolute value, which it is made of next time, is noted on the way, of the values before they are scaled.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm_fp8.triton_fp8 import CASTS, CONSTRAINTS, to_fp8

TOKENS_TOGETHER = 4
"""Values of so many tokens in one column are put into one word: what is transposed are words."""
BLOCK_TOKENS, BLOCK_COLUMNS, NUM_WARPS = 64, 64, 4
"""Of a program. Larger blocks hold too much in registers, narrower ones write less than a cache line's 32 bytes side by side."""


@triton.jit
def _columns_to_fp8(first: tl.tensor, second: tl.tensor, third: tl.tensor, fourth: tl.tensor, CAST: tl.constexpr) -> tl.tensor:
    """Four tensors [n, m] to words [m, n]."""
    words = tl.inline_asm_elementwise(CAST, CONSTRAINTS, [first, second, third, fourth], dtype=tl.int32, is_pure=True, pack=1)
    return tl.trans(words)


@triton.jit
def _gradients(
    tokens: tl.tensor,
    columns: tl.tensor,
    gradient_pointer: tl.tensor,
    gate_and_up_pointer: tl.tensor,
    rowwise_pointer: tl.tensor,
    num_tokens: tl.tensor,
    scale: tl.tensor,
    amax: tl.tensor,
    WIDTH: tl.constexpr,
    CAST: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The scaled gradients [tokens, columns] of gate and up, which are also written row-wise, and `amax` or the largest absolute value before scaling."""
    inside = (tokens < num_tokens)[:, None] & (columns < WIDTH)[None, :]
    rows = tokens.to(tl.int64)[:, None]
    dy = tl.load(gradient_pointer + rows * WIDTH + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    places = rows * (2 * WIDTH) + columns[None, :]
    gate = tl.load(gate_and_up_pointer + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up_pointer + places + WIDTH, mask=inside, other=0.0).to(tl.float32)

    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    gate_gradient = dy * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    up_gradient = dy * gate * sigmoid
    amax = tl.maximum(amax, tl.maximum(tl.abs(gate_gradient), tl.abs(up_gradient)))
    gate_gradient, up_gradient = gate_gradient * scale, up_gradient * scale
    tl.store(rowwise_pointer + places, to_fp8(gate_gradient, CAST), mask=inside)
    tl.store(rowwise_pointer + places + WIDTH, to_fp8(up_gradient, CAST), mask=inside)
    return gate_gradient, up_gradient, amax


@triton.jit(do_not_specialize=["scale_pointer", "scale_inverse_pointer", "amax_pointer"])
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
    BLOCK_WORDS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    # Neighbours take the same columns of other tokens: together they fill rows of the transposed result.
    num_words = num_tokens // 4
    blocks_of_tokens = tl.cdiv(num_words, BLOCK_WORDS)
    program = tl.program_id(0)
    words = (program % blocks_of_tokens) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    columns = (program // blocks_of_tokens) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    scale = tl.load(scale_pointer)
    if program == 0:
        tl.store(scale_inverse_pointer, tl.math.div_rn(1.0, scale))

    token = words * 4
    amax = tl.zeros([BLOCK_WORDS, BLOCK_COLUMNS], tl.float32)
    gate0, up0, amax = _gradients(
        token, columns, gradient_pointer, gate_and_up_pointer, rowwise_pointer, num_tokens, scale, amax, WIDTH, CAST
    )
    gate1, up1, amax = _gradients(
        token + 1, columns, gradient_pointer, gate_and_up_pointer, rowwise_pointer, num_tokens, scale, amax, WIDTH, CAST
    )
    gate2, up2, amax = _gradients(
        token + 2, columns, gradient_pointer, gate_and_up_pointer, rowwise_pointer, num_tokens, scale, amax, WIDTH, CAST
    )
    gate3, up3, amax = _gradients(
        token + 3, columns, gradient_pointer, gate_and_up_pointer, rowwise_pointer, num_tokens, scale, amax, WIDTH, CAST
    )
    inside = (columns < WIDTH)[:, None] & (words < num_words)[None, :]
    places = columns.to(tl.int64)[:, None] * num_words + words[None, :]
    tl.store(transposed_pointer + places, _columns_to_fp8(gate0, gate1, gate2, gate3, CAST), mask=inside)
    behind = places + num_words.to(tl.int64) * WIDTH
    tl.store(transposed_pointer + behind, _columns_to_fp8(up0, up1, up2, up3, CAST), mask=inside)
    # Positive floats are ordered as the integers of their bits, which is how this is one atomic instruction.
    tl.atomic_max(amax_pointer, tl.max(tl.max(amax, axis=1), axis=0), sem="relaxed")


def dswiglu_cast(
    gradient: Tensor, gate_and_up: Tensor, scale: Tensor, amax: Tensor, fp8_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient with respect to `gate_and_up`, times `scale`, in fp8.

    Args:
        gradient: bf16, fp16 or fp32 [T, f], contiguous, on a GPU, T a multiple of 4: with respect to SwiGLU's output.
        gate_and_up: of the same dtype [T, 2 f], contiguous: SwiGLU's input, the gate first.
        scale: fp32 [1].
        amax: fp32 [1], at least 0; becomes the largest absolute value of the unscaled gradient where that is larger.
        fp8_dtype: `torch.float8_e5m2` or `torch.float8_e4m3fn`.

    Returns:
        The gradient of `fp8_dtype` [T, 2 f], the same transposed [2 f, T], contiguous, and 1 / `scale`, fp32 [1].

    Raises:
        ValueError: on shapes that do not fit, or another number of tokens.
    """
    num_tokens, width = gradient.shape
    if gate_and_up.shape != (num_tokens, 2 * width) or not (gradient.is_contiguous() and gate_and_up.is_contiguous()):
        raise ValueError(
            f"a contiguous gradient {tuple(gradient.shape)} needs a contiguous input {(num_tokens, 2 * width)}; it is {tuple(gate_and_up.shape)}"
        )
    if num_tokens % TOKENS_TOGETHER:
        raise ValueError(f"{num_tokens} tokens are no multiple of {TOKENS_TOGETHER}")
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
            transposed.view(torch.int32),
            scale,
            scale_inverse,
            amax,
            num_tokens,
            WIDTH=width,
            CAST=CASTS[fp8_dtype],
            BLOCK_WORDS=BLOCK_TOKENS // TOKENS_TOGETHER,
            BLOCK_COLUMNS=BLOCK_COLUMNS,
            num_warps=NUM_WARPS,
        )
    return rowwise, transposed, scale_inverse
