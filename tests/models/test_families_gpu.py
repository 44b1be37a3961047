"""Packing with the attention implementations and kernels of a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from llm_fp8.config.parser import parse_config
from llm_fp8.settle.probe import probe
from tests.support.families import HAS_VARLEN
from tests.support.hub_families import CPU, hub_config

pytestmark = pytest.mark.gpu
HAS_KERNELS = all(importlib.util.find_spec(name) for name in ("causal_conv1d", "fla"))


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("name", ["Llama 3", "Mistral", "Gemma 3", "Mixtral", "Gemma 2", "OLMo 2"])
def test_packing_is_allowed_on_the_gpu_as_on_the_cpu(name, attention, device):
    if (name, attention) == ("Gemma 2", "sdpa"):
        pytest.skip("transformers 5.23 has no sdpa for Gemma 2")
    options = parse_config(["--packing", f"--attn_implementation={attention}"])
    assert probe(options, hub_config(name), CPU, torch.float32) == "rows"
    fastest = "varlen" if HAS_VARLEN and attention == "auto" and name != "Gemma 2" else "rows"
    assert probe(options, hub_config(name), device, torch.bfloat16) == fastest


@pytest.mark.skipif(not HAS_KERNELS, reason="needs causal-conv1d and flash-linear-attention")
@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3-Next"])
def test_linear_attention_is_packed_with_its_kernels(name, device, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: None)  # some GPUs refuse it
    assert probe(parse_config(["--packing"]), hub_config(name), device, torch.bfloat16) == "line"
