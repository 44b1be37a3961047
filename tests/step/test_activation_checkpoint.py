"""Gradient checkpointing on Hugging Face's layers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from llm_fp8.models.model import decoder_layers
from llm_fp8.step.activation_checkpoint import enable_gradient_checkpointing
from tests.support.small import tiny_config


@pytest.mark.slow
@pytest.mark.parametrize(("every", "expected"), [(0, 3), (1, 6), (2, 5), (3, 4), (0.6667, 5), (0.3333, 4)])
def test_checkpointed_layers_run_twice_with_equal_gradients(every, expected):
    gradients, calls = [], []
    for interval in (0, every):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(num_hidden_layers=3)).train()
        layers = decoder_layers(model)
        if interval:
            enable_gradient_checkpointing(layers, interval, uses_te=False)
        count = []
        for layer in layers:
            layer.mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        model(torch.arange(3, 35)[None]).logits.sum().backward()
        calls.append(len(count))
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert calls == [3, expected]
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
