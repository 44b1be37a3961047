"""The gradient with respect to logits, in fp8, in one Triton kernel. Imported on a GPU alone.

For logits `x`, the maximum m and the sum d of exp(x - m) of their row, and a scale,

    grad_output (exp(x - m) / d - one_hot(label)) scale

is computed in fp32 and rounded once, to fp8. Two kernels, one for the gradient and one for its cast, move 7 bytes per
logit, this one 3. The rows that fp8 GEMMs need beyond the last token are written as zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm_fp8.kernels.fp8_cast_triton import CASTS, to_fp8
from llm_fp8.kernels.softmax import IGNORE_INDEX

BLOCK_COLUMNS, NUM_WARPS = 4096, 8
"""Of a program, which has one row: 16 columns for each of 256 threads."""
_IGNORE_INDEX = tl.constexpr(IGNORE_INDEX)


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
    """`grad_output * (softmax - one_hot(label)) * scale` in fp8; zeros where the label is ignored and beyond T.

    Args:
        logits: bf16 or fp32 [T, V], contiguous, on a GPU; unchanged.
        statistics: fp32 [T, 2], contiguous, of `llm_fp8.kernels.softmax.losses`.
        labels: int64 [T].
        grad_output: 0-dim.
        scale: fp32 [1].
        num_rows: of the result, at least T.
        fp8_dtype: `torch.float8_e5m2` or `torch.float8_e4m3fn`.

    Returns:
        `fp8_dtype` [num_rows, V], contiguous; clipped to the format's range. NaN stays NaN.

    Raises:
        ValueError: on shapes that do not fit this.
    """
    num_tokens, vocabulary = logits.shape
    fit = statistics.shape == (num_tokens, 2) and labels.shape == (num_tokens,) and num_rows >= num_tokens
    if not (fit and logits.is_contiguous() and statistics.is_contiguous()):
        raise ValueError(
            f"contiguous logits {(num_tokens, vocabulary)} need contiguous statistics {(num_tokens, 2)}, labels "
            f"{(num_tokens,)} and at least {num_tokens} rows for the result; they have {tuple(statistics.shape)}, "
            f"{tuple(labels.shape)} and {num_rows}"
        )
    gradient = torch.empty(num_rows, vocabulary, dtype=fp8_dtype, device=logits.device)
    if gradient.numel() == 0:
        return gradient
    with torch.cuda.device_of(logits):
        _softmax_gradient_cast_kernel[(num_rows * triton.cdiv(vocabulary, BLOCK_COLUMNS),)](
            logits,
            statistics,
            labels.contiguous(),
            grad_output,
            scale,
            gradient.view(torch.uint8),
            num_tokens,
            VOCABULARY=vocabulary,
            CAST=CASTS[fp8_dtype],
            BLOCK_COLUMNS=BLOCK_COLUMNS,
            num_warps=NUM_WARPS,
        )
    return gradient
