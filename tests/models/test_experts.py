"""Mixtures of experts: what a router chooses among is found by shape, and counted by what computes a token."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from llm_fp8.models.build import decoder_size, model_on_meta
from llm_fp8.models.experts import routed_modules
from llm_fp8.precision.coverage import measure_coverage

QWEN3_30B = dict(vocab_size=151936, num_hidden_layers=48, num_key_value_heads=4, num_experts=128, hidden_size=2048)
QWEN3_30B |= dict(num_attention_heads=32, head_dim=128, moe_intermediate_size=768, num_experts_per_tok=8)
GPT_OSS_20B = dict(num_hidden_layers=24, num_local_experts=32)
TINY = dict(vocab_size=96, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=4)
TINY |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)


@pytest.mark.parametrize(
    ("kind", "sizes", "share"),
    [("qwen3_moe", QWEN3_30B, 0.299), ("gpt_oss", GPT_OSS_20B, 0.177), ("mixtral", {}, 0.105)],
)
def test_the_share_of_linear_flops_in_fp8_counts_the_experts_that_compute_a_token(kind, sizes, share):
    config = AutoConfig.for_model(kind, **sizes)
    model = model_on_meta(config)
    linears = [module for module in model.modules() if type(module) is nn.Linear and module is not model.lm_head]
    coverage = measure_coverage(model, linears, "bf16", {})
    assert coverage.fp8_linear_flop_share == pytest.approx(share, abs=5e-4)
    (experts,) = (reason for name, reason in coverage.skipped.items() if name.endswith(".experts"))
    assert f"{config.num_experts_per_tok} of" in experts and "bf16" in experts
    routers = sum(module.weight.numel() for module in model.modules() if type(module).__name__.endswith("Router"))
    assert decoder_size(config).num_linear_parameters == coverage.linear_flops_per_token / 6 + routers


def test_dense_layers_and_shared_experts_count_in_full():
    config = AutoConfig.for_model(
        "deepseek_v3", **TINY, n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1,
        topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
    )  # fmt: skip
    model, size = model_on_meta(config), decoder_size(config)
    linears = sum(module.weight.numel() for module in model.modules() if type(module) is nn.Linear)
    experts = 3 * 3 * 24 * 32 * 2  # layers x matrices x elements x experts per token
    assert size.num_linear_parameters == linears + experts + 3 * 8 * 32
    assert (size.num_layers, size.attention_width) == (4, 4 * (16 + 12) // 2)


def test_a_hybrid_attends_in_its_attention_layers_alone():
    layer_types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    config = AutoConfig.for_model("qwen3_next", **TINY, layer_types=layer_types, num_experts=4, num_experts_per_tok=2)
    assert decoder_size(config).num_layers == 1


class Block(nn.Module):
    """The layout of other libraries: a list of experts, and a router that is a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 32, bias=False) for _ in range(4))
        self.shared_expert = nn.Linear(16, 4, bias=False)
        self.conv = nn.Conv1d(16, 16, 4)


def test_a_list_of_experts_is_counted_alike_and_its_router_is_no_fp8_layer():
    block = Block()
    routed = routed_modules(block)
    assert {module: found.share for module, found in routed.items()} == {
        block.gate: 1.0,
        **dict.fromkeys(block.experts, 0.5),
    }
    assert measure_coverage(block, [], "bf16", {}).linear_flops_per_token == 6 * (2 * 64 + 2 * 512)
    assert routed_modules(nn.Linear(4, 4)) == {} and torch.is_tensor(block.conv.weight)
