"""Activation checkpointing: recompute decoder layers' activations in the backward pass instead of storing them.

The checkpoint wraps a layer's forward function (`wrap_forward`). FSDP acts around it, so it gathers a layer's weights
once for recomputation and backward pass. TE's restores fp8 context and scales; torch's would recompute in bf16.

With delayed scaling, TE (2.20) reduces amax over the ranks at the end of the outermost autocast. TE's checkpoint enters
an autocast for each recomputed layer. Here that autocast is nested in another one, so that ranks don't wait for each
other after every layer. Reentrant checkpoints are not nested, since they need the end of each autocast.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint
from torch import nn

from llm_fp8.models.memory import Amount, recomputed_layers
from llm_fp8.utils.te_internals import require_te
from llm_fp8.utils.torch_internals import wrap_forward


def enable_gradient_checkpointing(
    layers: nn.ModuleList, amount: Amount, uses_te: bool, reentrant: bool = False, in_graphs: bool = False
) -> list[nn.Module]:
    """Make the layers that `amount` selects (see `recomputed_layers`) recompute in the backward pass. Return these
    layers. `reentrant` selects torch's reentrant checkpoints, with a nested backward pass per layer. Set `in_graphs` if
    graphs may capture the passes: then TE's checkpoints (`uses_te`) do not save random states on the host.
    """
    checkpoint: Callable[..., Any] = torch.utils.checkpoint.checkpoint
    options: dict[str, Any] = {"use_reentrant": reentrant}
    if uses_te:
        te = require_te("--gradient_checkpointing")
        checkpoint = te.checkpoint
        if in_graphs:  # with a tracker, Transformer Engine uses generators instead of random states on the host
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
    """Return an empty context for the forward pass, and for recomputation a disabled autocast around TE's own."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    if not FP8GlobalStateManager.is_fp8_enabled():
        return contextlib.nullcontext(), contextlib.nullcontext()
    return contextlib.nullcontext(), te.autocast(enabled=False, recipe=FP8GlobalStateManager.get_fp8_recipe())
