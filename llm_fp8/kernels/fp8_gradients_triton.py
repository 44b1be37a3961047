"""Triton kernels that write a gradient straight in fp8.

Everything is fp32 and rounded once, to fp8, where two kernels (gradient, then cast) also round to bf16 between.

    softmax_gradient_cast   of the logits: 3 bytes of traffic per logit instead of 7
    dswiglu_cast            of SwiGLU's input: 10 bytes per element of its output instead of 18, and no bf16 tensor

The casts are PTX instructions: Triton's own conversion (3.6, CUDA 13.0) gave a wrong fourth byte after a transposition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm_fp8.kernels.softmax import IGNORE_INDEX

_CAST = """{{
.reg .b16 low, high;
cvt.rn.satfinite.{kind}.f32 low, $2, $1;
cvt.rn.satfinite.{kind}.f32 high, $4, $3;
mov.b32 $0, {{low, high}};
}}"""
CASTS = {torch.float8_e5m2: _CAST.format(kind="e5m2x2"), torch.float8_e4m3fn: _CAST.format(kind="e4m3x2")}
"""fp8 type -> PTX for four fp32 values to a word, the first in its lowest byte; rounds to nearest even. NaN stays NaN,
what is out of range becomes the range's end."""
CONSTRAINTS = tl.constexpr("=r,f,f,f,f")

SOFTMAX_COLUMNS, SOFTMAX_WARPS = 4096, 8
"""Of a program, which takes one row: 16 columns for each of 256 threads."""
_IGNORE_INDEX = tl.constexpr(IGNORE_INDEX)

SWIGLU_TOKENS, SWIGLU_COLUMNS, SWIGLU_WARPS = 64, 64, 4
"""Of a program. Larger blocks spill registers, narrower ones write less than 32 contiguous bytes."""


@triton.jit
def to_fp8(values: tl.tensor, CAST: tl.constexpr) -> tl.tensor:
    """fp32 values to bytes of the same shape; CAST is an entry of `CASTS`."""
    return tl.inline_asm_elementwise(CAST, CONSTRAINTS, [values], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit(
    do_not_specialize=["statistics_pointer", "labels_pointer", "grad_output_pointer", "scale_pointer", "num_tokens"]
)
def _softmax_gradient_cast_kernel(
    logits_pointer: tl.tensor,
    statistics_pointer: tl.tensor,
    labels_pointer: tl.tensor,
    grad_output_pointer: tl.tensor,
    scale_pointer: tl.tensor,
    gradient_pointer: tl.tensor,
    num_tokens: tl.tensor,
    VOCABULARY: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
) -> None:
    BLOCKS: tl.constexpr = (VOCABULARY + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    first = (program % BLOCKS) * BLOCK_COLUMNS
    columns = first + tl.arange(0, BLOCK_COLUMNS)
    inside = columns < VOCABULARY
    # A row beyond the last token counts as one whose label is ignored: nothing is read, and the factor makes zeros.
    label = tl.load(labels_pointer + row, mask=row < num_tokens, other=_IGNORE_INDEX)
    counts = label != _IGNORE_INDEX
    maximum = tl.load(statistics_pointer + 2 * row, mask=counts, other=0.0)
    exp_sum = tl.load(statistics_pointer + 2 * row + 1, mask=counts, other=1.0)
    factor = tl.where(counts, tl.load(grad_output_pointer).to(tl.float32) * tl.load(scale_pointer), 0.0)

    places = row * VOCABULARY + columns
    logits = tl.load(logits_pointer + places, mask=inside & counts, other=0.0).to(tl.float32)
    gradient = tl.exp(logits - maximum) * (factor / exp_sum)
    if (label >= first) & (label < first + BLOCK_COLUMNS):  # of a row's many programs one looks for the label
        gradient -= tl.where(columns == label, factor, 0.0)
    tl.store(gradient_pointer + places, to_fp8(gradient, CAST), mask=inside)


def softmax_gradient_cast(
    logits: Tensor,
    statistics: Tensor,
    labels: Tensor,
    grad_output: Tensor,
    scale: Tensor,
    num_rows: int,
    fp8_dtype: torch.dtype,
) -> Tensor:
    """`grad_output * (softmax - one_hot(label)) * scale` as `fp8_dtype` (e5m2 or e4m3fn) [num_rows, V], contiguous and
    clipped to the format's range, NaN kept: zeros where the label is ignored and in the rows beyond T, which fp8 GEMMs
    need. ValueError on shapes that do not fit, or fewer rows than T.

    Args:
        logits: bf16 or fp32 [T, V], contiguous; unchanged.
        statistics: fp32 [T, 2], contiguous, of `llm_fp8.kernels.softmax.losses`.
        labels: int64 [T].
        grad_output, scale: 0-dim, and fp32 [1].
    """
    num_tokens, vocabulary = logits.shape
    fit = statistics.shape == (num_tokens, 2) and labels.shape == (num_tokens,) and num_rows >= num_tokens
    if not (fit and logits.is_contiguous() and statistics.is_contiguous()):
        raise ValueError(
            f"contiguous logits {(num_tokens, vocabulary)} need contiguous statistics [T, 2], labels [T] and at least "
            f"{num_tokens} rows; they have {tuple(statistics.shape)}, {tuple(labels.shape)} and {num_rows}"
        )
    gradient = torch.empty(num_rows, vocabulary, dtype=fp8_dtype, device=logits.device)
    if gradient.numel() == 0:
        return gradient
    with torch.cuda.device_of(logits):
        _softmax_gradient_cast_kernel[(num_rows * triton.cdiv(vocabulary, SOFTMAX_COLUMNS),)](
            logits,
            statistics,
            labels.contiguous(),
            grad_output,
            scale,
            gradient.view(torch.uint8),
            num_tokens,
            VOCABULARY=vocabulary,
            CAST=CASTS[fp8_dtype],
            BLOCK_COLUMNS=SOFTMAX_COLUMNS,
            num_warps=SOFTMAX_WARPS,
        )
    return gradient


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
    """The gradient of SiLU(gate) up with respect to its input, times `scale`. With s = sigmoid(gate)

        d_gate = dy up s (1 + gate (1 - s))          d_up = dy gate s

    Returned as `fp8_dtype` (e5m2 or e4m3fn) [T, 2 f] and transposed [2 f, T], both contiguous, as the dgrad and wgrad
    GEMMs of fc1 take them, with 1 / `scale`, fp32 [1]. ValueError on shapes that do not fit.

    Args:
        gradient: bf16, fp16 or fp32 [T, f], contiguous: dy, with respect to SwiGLU's output.
        gate_and_up: of the same dtype [T, 2 f], contiguous: SwiGLU's input, the gate first.
        scale: fp32 [1], of delayed scaling.
        amax: fp32 [1], at least 0; raised to the amax of the unscaled gradient, for the scale's next update.
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
    programs = triton.cdiv(num_tokens, SWIGLU_TOKENS) * triton.cdiv(width, SWIGLU_COLUMNS)
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
            BLOCK_TOKENS=SWIGLU_TOKENS,
            BLOCK_COLUMNS=SWIGLU_COLUMNS,
            num_warps=SWIGLU_WARPS,
        )
    return rowwise, transposed, scale_inverse
