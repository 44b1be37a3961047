"""A Triton kernel that computes the gradient of SwiGLU's input in fp8, rounded once from fp32.

It reads and writes 10 bytes per element of SwiGLU's output instead of 18, and allocates no bf16 tensor. The casts are
PTX instructions, since Triton's own conversion (3.6, CUDA 13.0) gave a wrong fourth byte after a transposition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# PTX that casts four fp32 values to one 32-bit word, the first to its lowest byte. NaN stays NaN; others saturate.
_CAST = """{{
.reg .b16 low, high;
cvt.rn.satfinite.{kind}.f32 low, $2, $1;
cvt.rn.satfinite.{kind}.f32 high, $4, $3;
mov.b32 $0, {{low, high}};
}}"""
CASTS = {torch.float8_e5m2: _CAST.format(kind="e5m2x2"), torch.float8_e4m3fn: _CAST.format(kind="e4m3x2")}
CONSTRAINTS = tl.constexpr("=r,f,f,f,f")

# The block of a program. A larger block would spill registers; a narrower one would write under 32 contiguous bytes.
TOKENS, COLUMNS, NUM_WARPS = 64, 64, 4


@triton.jit
def to_fp8(values: tl.tensor, CAST: tl.constexpr) -> tl.tensor:
    """Cast fp32 values to fp8 bytes of the same shape; CAST is an entry of `CASTS`."""
    return tl.inline_asm_elementwise(CAST, CONSTRAINTS, [values], dtype=tl.uint8, is_pure=True, pack=4)


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
    # Programs with consecutive ids write to the same rows of the transposed result.
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
    up_places = places + num_tokens.to(tl.int64) * WIDTH
    tl.store(transposed_pointer + up_places, tl.trans(up_cast), mask=inside_transposed)
    # Positive floats sort like their bits as integers, so this compiles to one atomic instruction.
    tl.atomic_max(amax_pointer, tl.maximum(_amax(gate_gradient), _amax(up_gradient)), sem="relaxed")


def dswiglu_cast(
    gradient: Tensor, gate_and_up: Tensor, scale: Tensor, amax: Tensor, fp8_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradient of SiLU(gate) * up with respect to gate and up, times `scale`. With s = sigmoid(gate):

        d_gate = dy up s (1 + gate (1 - s))          d_up = dy gate s

    Return the scaled gradient as contiguous `fp8_dtype` (e5m2 or e4m3fn) [T, 2 f], its transpose [2 f, T], and
    1 / `scale`, fp32 [1]. Raise ValueError if the shapes do not match or a tensor is not contiguous.

    Args:
        gradient: contiguous bf16, fp16 or fp32 [T, f]: dy, the gradient with respect to SwiGLU's output.
        gate_and_up: contiguous [T, 2 f] of the same dtype: SwiGLU's input, the gate first.
        scale: fp32 [1], from delayed scaling.
        amax: fp32 [1], at least 0. It becomes the maximum of itself and the unscaled gradient's amax.
    """
    num_tokens, width = gradient.shape
    if gate_and_up.shape != (num_tokens, 2 * width) or not (gradient.is_contiguous() and gate_and_up.is_contiguous()):
        raise ValueError(f"gradient {tuple(gradient.shape)} and gate_and_up {tuple(gate_and_up.shape)} do not match")
    rowwise = torch.empty(num_tokens, 2 * width, dtype=fp8_dtype, device=gradient.device)
    transposed = torch.empty(2 * width, num_tokens, dtype=fp8_dtype, device=gradient.device)
    scale_inverse = torch.empty_like(scale)
    programs = triton.cdiv(num_tokens, TOKENS) * triton.cdiv(width, COLUMNS)
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
            BLOCK_TOKENS=TOKENS,
            BLOCK_COLUMNS=COLUMNS,
            num_warps=NUM_WARPS,
        )
    return rowwise, transposed, scale_inverse
