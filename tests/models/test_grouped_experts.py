"""Experts between gathers: output and gradients are those of transformers' own forward pass."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from llm_fp8.models.grouped_experts import use_grouped_experts
from llm_fp8.utils.hf_internals import runs_grouped_gemms
from tests.support.hub_families import hub_config


@pytest.mark.parametrize("family", ["Qwen3-MoE", "OLMoE", "Mixtral", "DeepSeek-V3"])
def test_output_and_gradients_are_those_of_transformers(family):
    model = AutoModelForCausalLM.from_config(hub_config(family), dtype=torch.float32)
    experts = next(module for module in model.modules() if hasattr(module, "gate_up_proj"))
    assert runs_grouped_gemms(experts)
    hidden_size, num_experts = model.config.hidden_size, experts.num_experts
    torch.manual_seed(0)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    hidden = torch.randn(37, hidden_size, requires_grad=True)
    probabilities = torch.randn(37, num_experts - 1).softmax(-1)  # the last expert has no token
    weights, index = probabilities.topk(2)
    weights = weights.detach().requires_grad_()
    wanted = [weights, hidden, *experts.parameters()]
    found = {}
    for name in ("transformers", "own"):
        if name == "own":
            use_grouped_experts(model)
            assert "forward" in vars(experts)
        output = experts(hidden, index, weights)
        found[name] = [output, *torch.autograd.grad((output * torch.arange(hidden_size)).sum(), wanted)]
    for own, reference in zip(found["own"], found["transformers"], strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-5, atol=1e-4)


def test_experts_with_biases_are_left_to_transformers():
    model = AutoModelForCausalLM.from_config(hub_config("gpt-oss"), dtype=torch.float32)
    use_grouped_experts(model)
    assert not any("forward" in vars(module) for module in model.modules())
