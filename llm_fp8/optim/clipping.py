"""Global gradient norm and clipping without a host synchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The global L2 norm of all gradients, an fp32 scalar on their device.

    Accumulated in fp32: torch's `clip_grad_norm_` keeps it in the gradients' dtype, and bf16 is off by up to 0.4 %.
    """
    norms = torch._foreach_norm(_gradients(parameters), 2.0, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm  # of shards: summed over ranks


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor, at most 1, that makes a global norm `norm` at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_gradients_(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients to a global L2 norm of at most `max_norm` (0: leave them); the norm before, fp32."""
    norm = gradient_norm(parameters)
    if max_norm > 0:
        torch._foreach_mul_(_gradients(parameters), clip_factor(norm, max_norm))
    return norm


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]
