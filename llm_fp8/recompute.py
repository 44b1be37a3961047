"""Gradient checkpointing: decoder layers whose activations are computed again in the backward pass instead of kept.

The recomputation encloses a layer's forward function, inside whatever wraps the layer: FSDP gathers a layer's weights once for the backward
pass and the recomputation uses them. TE's checkpoint restores the fp8 context and the scales of the forward pass; torch's would recompute
in bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.utils.checkpoint
from torch import nn

from llm_fp8.precision import require_te


def enable_gradient_checkpointing(
    layers: nn.ModuleList, every: int, uses_te: bool, reentrant: bool = False
) -> Sequence[nn.Module]:
    """Recompute layers in the backward pass; returns these.

    Args:
        layers: the decoder's.
        every: one layer in so many is recomputed; 1 for all.
        uses_te: whether they hold Transformer Engine modules.
        reentrant: the recomputation has a backward pass of its own, within the backward pass of the model.
    """
    checkpoint: Callable[..., Any] = (
        require_te("--gradient_checkpointing").checkpoint if uses_te else torch.utils.checkpoint.checkpoint
    )
    recomputed = list(layers[::every])
    for layer in recomputed:
        layer.forward = functools.partial(
            _recomputed, layer, functools.partial(checkpoint, use_reentrant=reentrant), layer.forward
        )
    return recomputed


def _recomputed(layer: nn.Module, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward` of a layer, under `checkpoint` while it trains."""
    if not layer.training or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, **kwargs)
