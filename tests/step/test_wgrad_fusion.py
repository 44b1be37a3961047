"""Gradients that GEMMs accumulate over micro-batches equal autograd's, and no reference to them stays.

Modules that keep Transformer Engine's rules for `main_grad` stand in for it.
"""

from __future__ import annotations

import weakref
from collections import Counter

import peft  # noqa: F401  it looks for Transformer Engine when it is imported, which must be before it is stood in for
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

WEIGHTS_OF_LAYER = 4


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    stand_in_te.install_stand_in(monkeypatch)


@pytest.fixture
def fused(monkeypatch):
    """Counts the backward passes in which a module wrote to `main_grad`, by the shape of the weight."""
    counts: Counter[tuple[int, ...]] = Counter()
    backward = stand_in_te._FusedWgrad.backward

    def counted(ctx, gradient):
        counts[tuple(ctx.weight.shape)] += 1
        return backward(ctx, gradient)

    monkeypatch.setattr(stand_in_te._FusedWgrad, "backward", staticmethod(counted))
    return counts


def small_model(dtype=torch.float32, lora: LoraConfig | None = None, **changes):
    lora = lora or LoraConfig()
    model = te_llama.build_te_model(tiny_config(**changes), dtype, "cpu", unfused_mlp=needs_unfused_mlp(lora))
    fill_weights(Model(model))
    if lora.lora_rank:
        add_adapters(Model(model), lora, dtype)
        initialize_adapters_(model, 0)
    return model.train()


def prepared(model: nn.Module, summed_by: str = "gemms"):
    """An engine around the model whose gradients are summed by GEMMs or by autograd, and an optimizer."""
    reset_accelerator()
    engine = DistributedStrategy("single", Accelerator(cpu=True), ParallelConfig())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = engine.prepare(model, optimizer)
    if summed_by == "autograd":
        engine.main_grads = lambda model: None
    return engine, model, optimizer


def tokens(number: int) -> torch.Tensor:
    return torch.randint(3, 1024, (2, 24), generator=torch.Generator().manual_seed(number))


def backward(engine: DistributedStrategy, model: nn.Module, num_micro_batches: int) -> None:
    """Forward and backward of a step's micro-batches; the modules know which is the first, as in the loop."""
    for number in range(num_micro_batches):
        last = number == num_micro_batches - 1
        with engine.micro_batch(model, last), FusedWgradAccumulation(model, engine).micro_batch(last):
            for module in model.modules():
                if hasattr(module, "is_first_microbatch"):
                    module.is_first_microbatch = number == 0 if num_micro_batches > 1 else None
            ids = tokens(number)
            engine.backward(model(input_ids=ids, labels=ids).loss)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def is_te_weight(name: str) -> bool:
    return "layers" in name and name.endswith("weight") and "norm" not in name


def clean(model: nn.Module) -> bool:
    """Whether no module is left adding and no parameter left with a second hold on its gradient."""
    fusing = [module for module in model.modules() if getattr(module, "fuse_wgrad_accumulation", False)]
    return not fusing and not any(hasattr(parameter, "main_grad") for parameter in model.parameters())


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_gradients_equal_autograds(num_micro_batches, dtype, recomputed, tied, fused):
    found = {}
    for summed_by in ("autograd", "gemms"):
        model = small_model(dtype, tie_word_embeddings=tied)
        if recomputed:
            enable_gradient_checkpointing(decoder_layers(model), 1, uses_te=True)
        engine, model, _ = prepared(model, summed_by)
        backward(engine, model, num_micro_batches)
        assert clean(model)
        found[summed_by] = gradients(model)
        if summed_by == "autograd":
            assert not fused
    layers = tiny_config().num_hidden_layers
    assert sum(fused.values()) == WEIGHTS_OF_LAYER * layers * (num_micro_batches - 1)
    assert found["gemms"].keys() == found["autograd"].keys() and len(found["gemms"]) > WEIGHTS_OF_LAYER * layers
    for name, expected in found["autograd"].items():
        gradient = found["gemms"][name]
        assert gradient.dtype == expected.dtype == dtype
        if num_micro_batches == 1 or not is_te_weight(name):
            assert torch.equal(gradient, expected), name
        difference = relative_difference(gradient, expected)
        assert difference < (1e-6 if dtype == torch.float32 else 8e-3), name  # two roundings of 2^-9 for each addition


def test_dropped_gradients_are_freed():
    """Otherwise a step would hold the gradients of the step before beside its own."""
    engine, model, optimizer = prepared(small_model())
    for _ in range(2):
        backward(engine, model, 3)
        held = [weakref.ref(gradient) for gradient in gradients(model).values()]
        engine.step(optimizer, list(model.parameters()), max_norm=1.0)
        assert clean(model) and not gradients(model)
        assert not any(reference() is not None for reference in held)


def test_frozen_weights_are_left_alone(fused):
    """All of them under LoRA, and one of a module's two."""
    engine, model, _ = prepared(small_model(lora=LoraConfig(lora_rank=2)))
    backward(engine, model, 3)
    assert not fused and all("adapters" in name for name in gradients(model))
    found = []
    for summed_by in ("autograd", "gemms"):
        model = small_model()
        for layer in decoder_layers(model):
            layer.mlp.fc1_weight.requires_grad_(False)
        engine, model, _ = prepared(model, summed_by)
        backward(engine, model, 3)
        found.append(gradients(model))
    layers = tiny_config().num_hidden_layers
    assert sum(fused.values()) == (WEIGHTS_OF_LAYER - 1) * layers * 2
    assert found[0].keys() == found[1].keys() and not any("fc1" in name for name in found[0])
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-7)
