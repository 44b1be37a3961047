"""Gradient checkpointing: decoder layers whose activations are computed again in the backward pass instead of kept.

The recomputation encloses a layer's forward function, inside whatever wraps the layer: FSDP gathers a layer's weights once for the backward
pass and the recomputation uses them. TE's checkpoint restores the fp8 context and the scales of the forward pass; torch's would recompute
in bf16.

Delayed scaling takes its scales from the maxima of past passes, and a layer that is computed again is no further pass. TE's checkpoint opens
an autocast for each such layer, whose end TE takes for the end of a forward pass: it moves the histories of all modules on by one and exchanges
their maxima with the other ranks, once for every layer (`FP8GlobalStateManager.autocast_exit`, seen in 2.20). Here it finds itself inside another
autocast, so that only the model's own counts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch.utils.checkpoint
from torch import Tensor, nn

from llm_fp8.precision import require_te

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
"""Of the forward pass, and of its recomputation."""


def enable_gradient_checkpointing(
    layers: nn.ModuleList, every: int, uses_te: bool, reentrant: bool = False
) -> Sequence[nn.Module]:
    """Recompute layers in the backward pass; returns these.

    Args:
        layers: the decoder's.
        every: one layer in so many is recomputed, the first among them; 1 for all.
        uses_te: whether they hold Transformer Engine modules.
        reentrant: the recomputation has a backward pass of its own, within the backward pass of the model.
    """
    recomputed = list(layers[::every])
    checkpoint: Callable[..., Any] = torch.utils.checkpoint.checkpoint
    if uses_te:
        te = require_te("--gradient_checkpointing")
        checkpoint = functools.partial(te.checkpoint, context_fn=functools.partial(_te_contexts, te))
    for layer in recomputed:
        forward = functools.partial(_that_updates_nothing, layer.forward) if uses_te and reentrant else layer.forward
        layer.forward = functools.partial(_recomputed, layer, functools.partial(checkpoint, use_reentrant=reentrant), forward)
    if uses_te and reentrant:
        recomputed[0].register_forward_pre_hook(_update_behind_backward)
    return recomputed


def _recomputed(layer: nn.Module, checkpoint: Callable[..., Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward` of a layer, under `checkpoint` while it trains."""
    if not layer.training or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, **kwargs)


def _te_contexts(te: Any) -> Contexts:
    """Nothing around the forward pass, and around the recomputation an autocast, whose end moves nothing on because it is off.

    The checkpoint opens its own inside, with the recipe of the forward pass.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    if not FP8GlobalStateManager.is_fp8_enabled():
        return contextlib.nullcontext(), contextlib.nullcontext()
    return contextlib.nullcontext(), te.autocast(enabled=False, recipe=FP8GlobalStateManager.get_fp8_recipe())


# Maxima of gradients count when the backward pass of that module is over which ran first in the forward pass and is marked for it. The reentrant kind
# builds each layer's graph in the recomputation, whose modules would all be marked.


def _that_updates_nothing(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward` without the mark."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.is_first_fp8_module()  # asking takes it away
    return forward(*args, **kwargs)


def _update_behind_backward(layer: nn.Module, args: tuple[Any, ...]) -> None:
    """Before the first layer's forward pass: the maxima of gradients count when the gradient of its input is there."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    hidden: Tensor = args[0]
    if hidden.requires_grad and FP8GlobalStateManager.is_fp8_enabled():
        hidden.register_hook(lambda _: FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False))
