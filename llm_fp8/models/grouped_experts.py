"""The forward pass of routed experts: transformers' grouped GEMMs between gathers whose backward pass is a gather too.

Autograd does not know that the rows it takes by an index are a permutation. It sorts the index anew and adds row by row
(`index_put_` with accumulation), which on an H100 took longer than all GEMMs of a layer of Qwen3-30B-A3B's shape. Here
the index and its inverse are worked out once per pass:

    S = tokens x experts per token    choices of the router, by token
    order [S]                         the same choices by expert; order // experts per token: their tokens
    inverse [S]                       inverse[order] = 0, 1, ... S - 1

The routing weights are applied in a batched GEMM that also adds up a token's experts, in fp32, and rounds once.
transformers' own pass rounds each weighted output to bf16 before it adds them up.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from llm_fp8.models.layer_forward import wrap_forward
from llm_fp8.utils.hf_internals import grouped_linear, runs_grouped_gemms


class _Taken(torch.autograd.Function):
    """`values[order // per_token]` of `values` [S / per_token, h], for a permutation `order` [S]."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.per_token = per_token
        return values[order if per_token == 1 else order // per_token]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        taken = gradient[ctx.saved_tensors[0]]
        if ctx.per_token > 1:
            taken = taken.view(-1, ctx.per_token, taken.shape[-1]).sum(dim=1)  # in fp32, rounded once
        return taken, None, None, None


def use_grouped_experts(model: nn.Module) -> None:
    """Let the experts of `model` whose grouped GEMMs transformers would run be computed by `grouped_experts`."""
    for module in model.modules():
        if runs_grouped_gemms(module):
            wrap_forward(module, functools.partial(grouped_experts, module))


def grouped_experts(experts: Any, forward: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' output [tokens, h] for `hidden` [tokens, h]; a wrapper as in `wrap_forward`.

    `top_k_index`, `top_k_weights` [tokens, experts per token]: the router's choice. `forward` is not called.
    """
    tokens, per_token = top_k_index.shape
    by_expert, order = top_k_index.reshape(-1).sort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    bounds = torch.arange(1, experts.num_experts + 1, device=order.device)
    offsets = torch.searchsorted(by_expert, bounds).to(torch.int32)  # where each expert's rows end

    taken = _Taken.apply(hidden, order, inverse, per_token)
    gated = experts._apply_gate(grouped_linear(taken, experts.gate_up_proj, offsets, experts.is_transposed))
    output = grouped_linear(gated, experts.down_proj, offsets, experts.is_transposed)
    output = _Taken.apply(output, inverse, order, 1).view(tokens, per_token, -1)
    weights = top_k_weights.to(output.dtype)
    return torch.matmul(weights.unsqueeze(1), output).squeeze(1).to(hidden.dtype)
