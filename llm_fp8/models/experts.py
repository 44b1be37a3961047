"""Mixtures of experts: detect them by their parameters' shapes, and compute them with one grouped GEMM per weight.

In transformers 5 the experts of a layer are one module, whose parameters have three dimensions [experts, ...]. The
router is another module with the same parent. Shared experts are ordinary linear layers.

The backward pass of torch's gather sorts the index and adds row by row (`index_put_` with accumulation). On an H100,
this took longer than all GEMMs of a layer of Qwen3-30B-A3B. With a permutation, the backward pass can be a gather too.

Experts compute in bf16 even in an fp8 run. On an H100 (gate, up and down of Qwen3-30B-A3B, forward and backward, 8,192
tokens) `torch._grouped_mm` reached 413 TFLOP/s in bf16, the best grouped GEMM in fp8 236, TE's GroupedLinear 55.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from llm_fp8.models.source import text_config
from llm_fp8.utils.hf_internals import gated, grouped_linear, runs_grouped_gemms
from llm_fp8.utils.torch_internals import wrap_forward

CONFIG_ENTRIES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


class Routed(NamedTuple):
    """Properties of a module of routed experts, or of a router that is a linear layer."""

    share: float  # fraction of the weight that a token uses: experts per token / experts
    reason: str  # reason why an fp8 run does not convert the module


def expert_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the expert weights [experts, ...] of the module itself, without submodules; [] if it has none."""
    if hasattr(module, "kernel_size"):  # a convolution
        return []
    return [parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3]


def routed_modules(model: nn.Module) -> dict[nn.Module, Routed]:
    """Return the properties of each module with expert weights and each router that is an `nn.Linear`."""
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
    """Return the number of experts per token, or None if the config is None or has no such entry."""
    decoder = None if hf_config is None else text_config(hf_config)
    entries = (getattr(decoder, entry, None) for entry in CONFIG_ENTRIES)
    return next((value for value in entries if isinstance(value, int)), None)


def compute_experts(model: nn.Module, autocast_dtype: torch.dtype | None) -> None:
    """Let `grouped_experts` run experts that use grouped GEMMs. In autocast, all cast to `autocast_dtype`, if set."""
    for module in filter(expert_weights, model.modules()):
        if runs_grouped_gemms(module):
            module.forward = MethodType(grouped_experts, module)  # of a partial, torch.compile checks the identity
        if autocast_dtype is not None:
            wrap_forward(module, functools.partial(torch.compiler.disable(_on_casts), module, autocast_dtype))


def _on_casts(experts: nn.Module, dtype: torch.dtype, forward: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call `forward` with input and weights cast to `dtype`, as torch.autocast (2.13) does not for grouped GEMMs."""
    if not torch.is_autocast_enabled(hidden.device.type):
        return forward(hidden, *args, **kwargs)
    casts = {name: weight.to(dtype) for name, weight in experts.named_parameters(recurse=False)}
    # An attribute in the instance's __dict__ hides the parameter with the same name.
    vars(experts).update(casts)
    try:
        return forward(hidden.to(dtype), *args, **kwargs)
    finally:
        for name in casts:
            del vars(experts)[name]


class _Permuted(torch.autograd.Function):
    """Return `values[order // per_token]` [S, h] for `values` [S / per_token, h] and a permutation `order` [S]."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.per_token = per_token
        return values[order if per_token == 1 else order // per_token]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        rows = gradient[ctx.saved_tensors[0]]
        if ctx.per_token > 1:
            rows = rows.view(-1, ctx.per_token, rows.shape[-1]).sum(dim=1)  # in fp32, rounded once
        return rows, None, None, None


def grouped_experts(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the experts' output [tokens, h] for `hidden` [tokens, h]. This function replaces `forward`.

    `top_k_index` and `top_k_weights` [tokens, experts per token] are the router's output. A batched GEMM multiplies
    outputs by `top_k_weights` and sums them in fp32, so it rounds once. transformers rounds each product to bf16.
    """
    tokens, per_token = top_k_index.shape
    by_expert, order = top_k_index.reshape(-1).sort()  # [S], S = tokens * experts per token, sorted by expert
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    bounds = torch.arange(1, experts.num_experts + 1, device=order.device)
    offsets = torch.searchsorted(by_expert, bounds).to(torch.int32)  # end of each expert's rows

    rows = _Permuted.apply(hidden, order, inverse, per_token)
    activations = gated(experts, grouped_linear(rows, experts.gate_up_proj, offsets, experts.is_transposed))
    output = grouped_linear(activations, experts.down_proj, offsets, experts.is_transposed)
    output = _Permuted.apply(output, inverse, order, 1).view(tokens, per_token, -1)
    return torch.matmul(top_k_weights.to(output.dtype).unsqueeze(1), output).squeeze(1).to(hidden.dtype)
