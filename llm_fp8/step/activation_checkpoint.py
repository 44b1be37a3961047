"""Activation checkpointing: decoder layers whose activations are recomputed in the backward pass instead of kept.

The checkpoint encloses a layer's forward function (`wrap_forward`), inside whatever wraps the layer:
FSDP gathers a layer's weights once for the backward pass, recomputation included. TE's checkpoint restores the fp8
context and the scales of the forward pass; torch's would recompute in bf16.

With delayed scaling TE (2.20) reduces amax over the ranks when the outermost autocast ends. Its checkpoint opens one
for each recomputed layer; here it runs inside another, so that ranks don't wait for each other after every layer. The
reentrant kind needs these ends.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch.utils.checkpoint
from torch import nn

from llm_fp8.utils.te_internals import require_te
from llm_fp8.utils.torch_internals import wrap_forward

Amount: TypeAlias = float | Literal["auto"]  # a value of --gradient_checkpointing


def recomputed_layers(amount: Amount, num_layers: int) -> range:
    """The numbers of the decoder layers that are recomputed; of auto, until memory has settled it, the most that may
    be. Of a share they are the first: they are recomputed after the others are freed.
    """
    if amount == "auto":
        return range(num_layers)
    if amount > 1:
        return range(0, num_layers, int(amount))
    return range(max(round(amount * num_layers), 1 if amount else 0))


def enable_gradient_checkpointing(
    layers: nn.ModuleList, amount: Amount, uses_te: bool, reentrant: bool = False, in_graphs: bool = False
) -> list[nn.Module]:
    """Recompute this `amount` of the decoder's `layers` in the backward pass; returns them. `reentrant`: each has a
    backward pass of its own. `in_graphs`: a graph may hold the passes, which reads no random state on the host.
    """
    checkpoint: Callable[..., Any] = torch.utils.checkpoint.checkpoint
    options: dict[str, Any] = {"use_reentrant": reentrant}
    if uses_te:
        te = require_te("--gradient_checkpointing")
        checkpoint = te.checkpoint
        if in_graphs:  # Transformer Engine then takes random states as generators
            tracker = te.distributed.CudaRNGStatesTracker()
            tracker.add("recomputation", 0)
            options["get_rng_state_tracker"] = lambda: tracker
        if not reentrant:
            options["context_fn"] = functools.partial(_te_contexts, te)

    def recompute(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if layer.training and torch.is_grad_enabled():
            return checkpoint(forward, *args, **options, **kwargs)
        return forward(*args, **kwargs)

    recomputed = [layers[number] for number in recomputed_layers(amount, len(layers))]
    for layer in recomputed:
        wrap_forward(layer, functools.partial(recompute, layer))
    return recomputed


def _te_contexts(te: Any) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """Nothing around the forward pass; around the recomputation's autocast, another that is off."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    if not FP8GlobalStateManager.is_fp8_enabled():
        return contextlib.nullcontext(), contextlib.nullcontext()
    return contextlib.nullcontext(), te.autocast(enabled=False, recipe=FP8GlobalStateManager.get_fp8_recipe())
