"""Mixtures of experts, told by the shape of their modules: which weights a router chooses among, and how many of them
compute a token.

transformers 5 keeps the experts of a layer in one module with parameters of three dimensions [experts, ...], which one
grouped GEMM computes. The router is their neighbour. Shared experts are ordinary linear layers.

Experts stay in bf16 also in an fp8 run. On an H100 (gate, up and down of Qwen3-30B-A3B, forward and backward, 8,192
tokens) `torch._grouped_mm` reached 413 TFLOP/s in bf16; in fp8 torchao's reached 236 and TE's GroupedLinear 55.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from llm_fp8.data.collate import Batch
from llm_fp8.kernels.softmax import IGNORE_INDEX
from llm_fp8.models.source import text_config

CONFIG_ENTRIES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


class Routed(NamedTuple):
    """A module that computes by the router's choice, or the router's own linear layer."""

    share: float
    """The share of the weight that computes a token: experts per token over experts."""
    reason: str
    """Why an fp8 run leaves it alone."""


def expert_weights(module: nn.Module) -> list[nn.Parameter]:
    """The weights [experts, ...] that this module itself holds; empty for all but experts."""
    if hasattr(module, "kernel_size"):  # a convolution
        return []
    return [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]


def routed_modules(model: nn.Module) -> dict[nn.Module, Routed]:
    """Every module with weights of experts, and every router that is an `nn.Linear`; empty in a dense model."""
    found: dict[nn.Module, Routed] = {}
    config: Any = getattr(model, "config", None)
    for name, module in model.named_modules():
        if not (weights := expert_weights(module)):
            continue
        num_experts = len(weights[0])
        named = None if config is None else experts_per_token(config)
        per_token = min(named or num_experts, num_experts)
        reason = f"{per_token} of {num_experts} experts per token, grouped GEMM"
        found[module] = Routed(per_token / num_experts, reason)
        beside = model.get_submodule(name.rpartition(".")[0]).named_modules()
        linears = [one for own, one in beside if isinstance(one, nn.Linear) and "expert" not in own]
        routers = [linear for linear in linears if linear.out_features == num_experts]
        found |= dict.fromkeys(routers, Routed(1.0, "router"))
    return found


def experts_per_token(hf_config: PretrainedConfig) -> int | None:
    """Read it from the config; None where that names no experts."""
    decoder = text_config(hf_config)
    named = (getattr(decoder, entry, None) for entry in CONFIG_ENTRIES)
    return next((value for value in named if isinstance(value, int)), None)


@dataclass(frozen=True)
class RouterLoss:
    """transformers' load balancing loss of each document alone, as in DeepSeek-V3 (arXiv 2412.19437, equation 17).

    It multiplies each expert's share of the choices by its mean probability: the loss of a whole micro-batch would
    depend on how the batch is cut.
    """

    coefficient: float
    per_token: int

    def __call__(self, router_logits: Iterable[Tensor], batch: Batch) -> Tensor:
        """Coefficient times loss times supervised tokens, summed over documents (fp32 scalar); `router_logits`:
        [tokens, experts] of each layer.
        """
        document = (batch.position_ids.flatten() == 0).cumsum(0) - 1
        sums: Any = 0.0  # over a document's tokens and the layers: choices and probabilities [2, tokens, experts]
        for logits in router_logits:
            scores = logits.softmax(-1).float()
            chosen = torch.zeros_like(scores).scatter(-1, scores.topk(self.per_token).indices, 1.0)
            sums = sums + scores.new_zeros(2, *scores.shape).index_add(1, document, torch.stack((chosen, scores)))
        num_rows = (sums[0].sum(-1) / self.per_token).clamp_min(1)  # tokens times layers
        losses = sums.shape[-1] * sums.prod(0).sum(-1) / num_rows**2
        return self.coefficient * (losses[document] * (batch.labels.flatten() != IGNORE_INDEX)).sum()


def router_loss(model: PreTrainedModel) -> tuple[RouterLoss | None, str | None]:
    """The auxiliary loss that the model's config asks for, and a sentence on what it says of one; None for neither.

    As in transformers and TRL `output_router_logits` asks for it.
    """
    decoder = text_config(model.config)
    coefficient = getattr(decoder, "router_aux_loss_coef", None) or 0.0
    function = vars(sys.modules[type(model).__module__]).get("load_balancing_loss_func")
    arguments = list(inspect.signature(function).parameters) if function else []
    if not getattr(decoder, "output_router_logits", False):
        what = f"router_aux_loss_coef {coefficient:g} takes no effect, as in transformers"
        return None, f"{what}: the model's config has not output_router_logits" if coefficient else None
    per_token = experts_per_token(model.config)
    if not coefficient or per_token is None or "top_k" not in arguments[2:3]:  # Doge's differs
        return None, "WARNING: output_router_logits takes no effect: transformers has no loss for the model's routers"
    what = f"auxiliary loss of routers: {coefficient:g} times transformers' load balancing loss of each document"
    return RouterLoss(coefficient, per_token), what
