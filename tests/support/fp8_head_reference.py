"""What tests of the output head in fp8 share, on the CPU and on GPUs: one pass with a head and the exact gradients
beside it.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_fp8.kernels.cross_entropy import linear_cross_entropy_sum
from llm_fp8.kernels.fp8_lm_head import Fp8Head
from llm_fp8.kernels.softmax import IGNORE_INDEX

Mode = Literal["gradients", "all"]

NUM_PRODUCTS: dict[Mode, int] = {"gradients": 2, "all": 3}
"""Of a trained head's three products in a micro-batch, those in fp8."""
MODES = tuple(NUM_PRODUCTS)
SOFTMAX_GRADIENT_KERNEL = "_softmax_gradient_cast_kernel"
"""Name of the kernel from logits to their gradient in fp8."""

GRADIENT_ERROR = 0.07
"""Rounding to nearest errs by at most 2**-4 of a value in E4M3 and 2**-3 in E5M2, and by 2.6% and 5.2% in the root mean
square over a binade; two operands together by 5.8%. The benchmark measures 2.7% to 5.9%."""


def head_of(weight: Tensor, mode: Mode) -> Fp8Head:
    """A head for `weight` [V, h], which it knows by its sizes alone."""
    return Fp8Head(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"), mode)


def run(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    head: Fp8Head | None = None,
    factor: float | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss, and the gradients of `factor` times it (default: of its mean over tokens) by hidden states
    and weight.
    """
    hidden.grad = weight.grad = None
    loss = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens, fp8_head=head)
    (loss * (1 / hidden.shape[0] if factor is None else factor)).backward()
    return loss.detach(), hidden.grad, weight.grad  # type: ignore[return-value]


def exact(
    hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """What `run` computes by default, by torch in a wide `dtype`."""
    hidden, weight = (value.detach().to(dtype).requires_grad_() for value in (hidden, weight))
    loss = F.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss / hidden.shape[0], (hidden, weight))
