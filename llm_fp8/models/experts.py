"""Mixtures of experts, known by the shape of their modules; `grouped_experts` computes them.

transformers 5 keeps the experts of a layer in one module with parameters of three dimensions [experts, ...], which one
grouped GEMM computes. The router is their neighbour. Shared experts are ordinary linear layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from transformers import PretrainedConfig

from llm_fp8.models.source import text_config

CONFIG_ENTRIES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


class Routed(NamedTuple):
    """A module that computes by the router's choice, or the router's own linear layer."""

    share: float  # of the weight that computes a token: experts per token over experts
    reason: str  # why an fp8 run leaves it alone


def expert_weights(module: nn.Module) -> list[nn.Parameter]:
    """The weights [experts, ...] that this module itself holds; empty for all but experts."""
    if hasattr(module, "kernel_size"):  # a convolution
        return []
    return [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]


def routed_modules(model: nn.Module) -> dict[nn.Module, Routed]:
    """Every module with weights of experts, and every router that is an `nn.Linear`; empty in a dense model."""
    routed: dict[nn.Module, Routed] = {}
    config: Any = getattr(model, "config", None)
    for name, module in model.named_modules():
        if not (weights := expert_weights(module)):
            continue
        num_experts = len(weights[0])
        per_token = min(experts_per_token(config) or num_experts, num_experts)
        reason = f"{per_token} of {num_experts} experts per token, grouped GEMM"
        routed[module] = Routed(per_token / num_experts, reason)
        for neighbour, linear in model.get_submodule(name.rpartition(".")[0]).named_modules():
            if isinstance(linear, nn.Linear) and "expert" not in neighbour and linear.out_features == num_experts:
                routed[linear] = Routed(1.0, "router")
    return routed


def experts_per_token(hf_config: PretrainedConfig | None) -> int | None:
    """Read it from the config; None where that names no experts, or is None."""
    decoder = None if hf_config is None else text_config(hf_config)
    entries = (getattr(decoder, entry, None) for entry in CONFIG_ENTRIES)
    return next((value for value in entries if isinstance(value, int)), None)
