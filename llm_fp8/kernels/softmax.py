"""The elementwise part of cross entropy: losses from logits, and the gradient with respect to the logits.

A GPU with Transformer Engine runs its two Triton kernels; elsewhere torch computes the same in blocks of rows.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

IGNORE_INDEX = -100  # label of a position that takes no part in the loss
_ROWS_PER_BLOCK = 1024  # the torch implementation makes an fp32 copy of so many (0.5 GiB for V = 128,256)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which softmax, loss and sums are computed: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def use_triton(logits: Tensor) -> bool:
    """Return True if Transformer Engine's kernels take these: contiguous bf16 or fp32 logits on a GPU."""
    on_gpu = logits.is_cuda and logits.dtype in (torch.bfloat16, torch.float32) and logits.numel() > 0
    return on_gpu and importlib.util.find_spec("transformer_engine") is not None


def losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [T] of `logits [T, V]` (0 for ignored labels), and statistics [T, 2]: maximum m, sum of exp(logit - m)."""
    if not use_triton(logits):
        return torch_losses(logits, labels)
    from transformer_engine.pytorch.triton.cross_entropy import cross_entropy_forward

    losses, _, statistics, *_ = cross_entropy_forward(
        logits.unsqueeze(0),
        labels.unsqueeze(0),
        label_smoothing=0.0,
        reduce_loss=False,
        dist_process_group=None,
        ignore_idx=IGNORE_INDEX,
        overwrite_input=True,  # makes no copy; the forward kernel writes nothing into the logits
    )
    return losses.squeeze(0), statistics


def to_gradient_(logits: Tensor, statistics: Tensor, labels: Tensor, grad_output: Tensor) -> None:
    """Overwrite `logits [T, V]` by the 0-dim grad_output times (softmax - one_hot(label)), or by 0 in ignored rows."""
    if not use_triton(logits):
        return torch_to_gradient_(logits, statistics, labels, grad_output)
    from transformer_engine.pytorch.triton.cross_entropy import cross_entropy_backward

    cross_entropy_backward(
        logits.unsqueeze(0),
        statistics,
        labels.contiguous(),
        n_non_ignore=None,
        grad_output=grad_output.expand(logits.shape[0]),  # the kernel reads one value per row
        label_smoothing=0.0,
        reduce_loss=False,
        rank=0,
        world_size=1,
        ignore_idx=IGNORE_INDEX,
    )
    # Autograd does not see what a Triton kernel writes. This makes a second backward pass an error.
    torch.autograd.graph.increment_version(logits)


def cap_(logits: Tensor, cap: float | None) -> Tensor:
    """Overwrite `logits` by cap tanh(logits / cap); None leaves them."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def slope_of_cap(logits: Tensor, cap: float | None) -> Tensor | None:
    """The derivative of `cap_` from its results."""
    return None if cap is None else (logits / cap).square_().neg_().add_(1)


def torch_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    losses, statistics = [], []
    for rows, row_labels in zip(logits.split(_ROWS_PER_BLOCK), labels.split(_ROWS_PER_BLOCK), strict=True):
        ignored = row_labels == IGNORE_INDEX
        x = rows.to(accumulation_dtype(logits.dtype))
        maximum = x.amax(dim=-1, keepdim=True)
        exp_sum = (x - maximum).exp_().sum(dim=-1, keepdim=True)
        label_logit = x.gather(-1, row_labels.masked_fill(ignored, 0)[:, None])
        losses.append((exp_sum.log() - (label_logit - maximum)).squeeze(-1).masked_fill_(ignored, 0.0))
        statistics.append(torch.cat([maximum, exp_sum], dim=-1))
    return torch.cat(losses), torch.cat(statistics)


def torch_to_gradient_(logits: Tensor, statistics: Tensor, labels: Tensor, grad_output: Tensor) -> None:
    blocks = (tensor.split(_ROWS_PER_BLOCK) for tensor in (logits, statistics, labels))
    for rows, row_statistics, row_labels in zip(*blocks, strict=True):
        ignored = (row_labels == IGNORE_INDEX)[:, None]
        maximum, exp_sum = row_statistics.unbind(dim=-1)
        gradient = (rows.to(statistics.dtype) - maximum[:, None]).exp_().div_(exp_sum[:, None])
        label_column = row_labels[:, None].masked_fill(ignored, 0)
        gradient.scatter_add_(-1, label_column, torch.full_like(label_column, -1, dtype=gradient.dtype))
        rows.copy_(gradient.mul_(grad_output).masked_fill_(ignored, 0.0))
