"""The private names of Transformer Engine that this project uses; no other file knows them. Read in version 2.20.

name                                                   noticed by
module._is_fsdp2                                       tests/distributed/test_wgrad_fusion_gpu.py
layernorm_mlp._get_act_func_supported_list             tests/kernels/test_swiglu_gpu.py
dot_product_attention._attention_backends              tests/tools/verify
FP8GlobalStateManager.reduce_and_update_fp8_tensors    tests/distributed/test_micro_batch_graphs_gpu.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def keep_weight_casts(model: nn.Module, keep: bool) -> None:
    """Let modules keep fp8 casts of their weights for later passes, or cast anew, as they do for those FSDP2 shards."""
    for module in model.modules():
        if hasattr(type(module), "is_fsdp2"):
            module._is_fsdp2 = not keep  # type: ignore[assignment]  # they look for FSDP2 once


def would_lose_main_grad(module: Any) -> bool:
    """Whether it would raise instead of adding to a main gradient: a LayerNormLinear that drops its fp8 casts."""
    casts_anew = getattr(module, "is_fsdp2", False) and getattr(module, "fp8", False)
    return type(module).__name__ == "LayerNormLinear" and casts_anew and not module.primary_weights_in_fp8


def add_activation(name: str, backward_and_cast: Callable[..., Any]) -> None:
    """Add to LayerNormMLP's activations one like "swiglu", whose backward pass also casts."""
    from transformer_engine.pytorch.module import layernorm_mlp

    # A function of the recipe: name -> (forward, backward, backward with bias gradient and cast, or None).
    table = layernorm_mlp._get_act_func_supported_list
    if name in table(None):
        return

    def with_activation(recipe: Any = None) -> dict[str, tuple[Any, ...]]:
        functions = table(recipe)
        forward, backward, _ = functions["swiglu"]
        return {**functions, name: (forward, backward, None if recipe is None else backward_and_cast)}

    layernorm_mlp._get_act_func_supported_list = with_activation


@contextlib.contextmanager
def put_off_scale_updates() -> Iterator[None]:
    """Passes inside note the amax of their tensors and update no scale of delayed scaling: `update_scales` does."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    update = vars(FP8GlobalStateManager)["reduce_and_update_fp8_tensors"]
    FP8GlobalStateManager.reduce_and_update_fp8_tensors = staticmethod(lambda forward=True: None)
    try:
        yield
    finally:
        FP8GlobalStateManager.reduce_and_update_fp8_tensors = update


def update_scales() -> None:
    """Take the largest amax over the ranks and update scales and histories, of the forward and backward passes."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    for forward in (True, False):
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=forward)


def attention_backends() -> dict[str, Any]:
    """What Transformer Engine chose for the attention that it ran last: use_fused_attention, ... -> whether."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    return dict(_attention_backends)
