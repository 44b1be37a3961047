"""Gradients that GEMMs accumulate over micro-batches equal autograd's, and are freed after the step.

The stand-in for Transformer Engine writes weight gradients to `main_grad` as Transformer Engine's GEMMs do.
"""

from __future__ import annotations

import weakref
from collections import Counter

import peft  # noqa: F401  imported before the stand-in is installed, because it checks for Transformer Engine
import pytest
import torch
from accelerate import Accelerator
from torch import nn

import te_llama
from llm_fp8.config.options import LoraConfig, ParallelConfig
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.models.build import fill_weights
from llm_fp8.models.lora import add_adapters, initialize_adapters_, needs_unfused_mlp
from llm_fp8.models.model import Model, decoder_layers
from llm_fp8.models.parity import relative_difference
from llm_fp8.step.activation_checkpoint import enable_gradient_checkpointing
from llm_fp8.step.wgrad_fusion import FusedWgradAccumulation
from tests.support import stand_in_te
from tests.support.small import reset_accelerator, tiny_config

pytestmark = pytest.mark.slow

WEIGHTS_PER_LAYER = 4


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    stand_in_te.install_stand_in(monkeypatch)


@pytest.fixture
def fused_passes(monkeypatch):
    """Return a counter: weight shape -> number of backward passes in which GEMMs wrote to `main_grad`."""
    counts: Counter[tuple[int, ...]] = Counter()
    backward = stand_in_te._FusedWgrad.backward

    def counted_backward(ctx, gradient):
        counts[tuple(ctx.weight.shape)] += 1
        return backward(ctx, gradient)

    monkeypatch.setattr(stand_in_te._FusedWgrad, "backward", staticmethod(counted_backward))
    return counts


def small_model(dtype=torch.float32, lora: LoraConfig | None = None, **changes):
    lora = lora or LoraConfig()
    model = te_llama.build_te_model(tiny_config(**changes), dtype, "cpu", unfused_mlp=needs_unfused_mlp(lora))
    fill_weights(Model(model))
    if lora.lora_rank:
        add_adapters(Model(model), lora, dtype)
        initialize_adapters_(model, 0)
    return model.train()


def prepare(model: nn.Module, summed_by: str = "gemms"):
    """Return strategy, prepared model and optimizer. `summed_by` says what sums gradients: "gemms" or "autograd"."""
    reset_accelerator()
    strategy = DistributedStrategy("single", Accelerator(cpu=True), ParallelConfig())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = strategy.prepare(model, optimizer)
    if summed_by == "autograd":
        strategy.main_grads = lambda model: None
    return strategy, model, optimizer


def tokens(number: int) -> torch.Tensor:
    return torch.randint(3, 1024, (2, 24), generator=torch.Generator().manual_seed(number))


def backward(strategy: DistributedStrategy, model: nn.Module, num_micro_batches: int) -> None:
    """Run a step's forward and backward passes. As in training, each module is told which micro-batch is the first."""
    for number in range(num_micro_batches):
        last = number == num_micro_batches - 1
        with strategy.micro_batch(model, last), FusedWgradAccumulation(model, strategy).micro_batch(last):
            for module in model.modules():
                if hasattr(module, "is_first_microbatch"):
                    module.is_first_microbatch = number == 0 if num_micro_batches > 1 else None
            ids = tokens(number)
            strategy.backward(model(input_ids=ids, labels=ids).loss)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def is_te_weight(name: str) -> bool:
    return "layers" in name and name.endswith("weight") and "norm" not in name


def is_clean(model: nn.Module) -> bool:
    """Return whether no module fuses the weight gradient and no parameter has the attribute `main_grad`."""
    fusing = [module for module in model.modules() if getattr(module, "fuse_wgrad_accumulation", False)]
    return not fusing and not any(hasattr(parameter, "main_grad") for parameter in model.parameters())


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_gradients_equal_those_of_autograd(num_micro_batches, dtype, recomputed, tied, fused_passes):
    results = {}
    for summed_by in ("autograd", "gemms"):
        model = small_model(dtype, tie_word_embeddings=tied)
        if recomputed:
            enable_gradient_checkpointing(decoder_layers(model), 1, uses_te=True)
        strategy, model, _ = prepare(model, summed_by)
        backward(strategy, model, num_micro_batches)
        assert is_clean(model)
        results[summed_by] = gradients(model)
        if summed_by == "autograd":
            assert not fused_passes
    layers = tiny_config().num_hidden_layers
    assert sum(fused_passes.values()) == WEIGHTS_PER_LAYER * layers * (num_micro_batches - 1)
    assert results["gemms"].keys() == results["autograd"].keys()
    assert len(results["gemms"]) > WEIGHTS_PER_LAYER * layers
    for name, expected in results["autograd"].items():
        gradient = results["gemms"][name]
        assert gradient.dtype == expected.dtype == dtype
        if num_micro_batches == 1 or not is_te_weight(name):
            assert torch.equal(gradient, expected), name
        difference = relative_difference(gradient, expected)
        assert difference < (1e-6 if dtype == torch.float32 else 8e-3), name  # two roundings of 2^-9 for each addition


def test_dropped_gradients_are_freed():
    """If the model still referred to the gradients, they would stay in memory during the next step."""
    strategy, model, optimizer = prepare(small_model())
    for _ in range(2):
        backward(strategy, model, 3)
        references = [weakref.ref(gradient) for gradient in gradients(model).values()]
        strategy.step(optimizer, list(model.parameters()), max_norm=1.0)
        assert is_clean(model) and not gradients(model)
        assert not any(reference() is not None for reference in references)


def test_frozen_weights_get_no_gradient(fused_passes):
    """The first model has LoRA adapters, so all its weights are frozen. In the second, one weight per MLP is frozen."""
    strategy, model, _ = prepare(small_model(lora=LoraConfig(lora_rank=2)))
    backward(strategy, model, 3)
    assert not fused_passes and all("adapters" in name for name in gradients(model))
    results = []
    for summed_by in ("autograd", "gemms"):
        model = small_model()
        for layer in decoder_layers(model):
            layer.mlp.fc1_weight.requires_grad_(False)
        strategy, model, _ = prepare(model, summed_by)
        backward(strategy, model, 3)
        results.append(gradients(model))
    layers = tiny_config().num_hidden_layers
    assert sum(fused_passes.values()) == (WEIGHTS_PER_LAYER - 1) * layers * 2
    assert results[0].keys() == results[1].keys() and not any("fc1" in name for name in results[0])
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=1e-4, atol=1e-7)
