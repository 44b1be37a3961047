"""Fused accumulation of weight gradients on two gloo ranks: the losses equal those without fusion. The tests also count
the GEMMs that add to the gradient themselves, and FSDP2's all-gathers of weights.

Stand-ins for Transformer Engine's modules follow its rules for `main_grad`, the buffer to which GEMMs add weight
gradients. DDP, FSDP2 and the optimizer are real.
"""

from __future__ import annotations

import functools
from typing import Any

import peft  # noqa: F401  its import looks for Transformer Engine and must come before the stand-in is installed
import pytest
import torch
from accelerate import Accelerator

import te_llama
from llm_fp8.config.options import ParallelConfig
from llm_fp8.distributed.fsdp import FsdpStrategy
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.models.build import fill_weights
from llm_fp8.models.model import Model, decoder_layers
from llm_fp8.models.parity import relative_difference
from llm_fp8.step.wgrad_fusion import FusedWgradAccumulation
from tests.support import stand_in_te
from tests.support.ranks import CountedAllGather, run_on_ranks
from tests.support.small import tiny_config

pytestmark = pytest.mark.slow

RANKS, STEPS, MICRO_BATCHES = 2, 3, 4
LEARNING_RATE = 0.5
WEIGHTS_PER_LAYER = 4


def tokens(step: int, micro_batch: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randint(3, 1024, (1, 24), generator=generator)


def strategy_of(mode: str, options: ParallelConfig) -> DistributedStrategy:
    accelerator = Accelerator(cpu=True)
    if mode == "ddp":
        return DistributedStrategy(mode, accelerator, options)
    if mode == "plain copies":
        return DistributedStrategy("ddp", accelerator, options, plain=True)
    return FsdpStrategy(mode, accelerator, options, torch.float32, RANKS)


def train(rank: int, mode: str, in_gemms: bool, sync_every_micro_batch: bool) -> dict[str, Any]:
    """Train with SGD under the sharding `mode`. If `in_gemms`, GEMMs add weight gradients to `main_grad`; otherwise
    autograd adds weight gradients up. Return losses, gradients of the first step, and the counts that the tests check.
    """
    fused = []
    with pytest.MonkeyPatch.context() as patch:
        stand_in_te.install_stand_in(patch)
        backward = stand_in_te._FusedWgrad.backward

        def counting_backward(ctx: Any, gradient: torch.Tensor) -> Any:
            fused.append(ctx.weight)
            return backward(ctx, gradient)

        patch.setattr(stand_in_te._FusedWgrad, "backward", staticmethod(counting_backward))
        model = te_llama.build_te_model(tiny_config(), torch.float32, "cpu").train()
        fill_weights(Model(model))
        strategy = strategy_of(mode, ParallelConfig(sync_every_micro_batch=sync_every_micro_batch))
        strategy.shard(model, decoder_layers(model))
        model, optimizer = strategy.prepare(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
        if not in_gemms:
            strategy.main_grads = lambda model: None
        gathers = CountedAllGather(model)
        losses, gradients = [], {}
        for step in range(STEPS):
            for number in range(MICRO_BATCHES):
                last = number == MICRO_BATCHES - 1
                with strategy.micro_batch(model, last), FusedWgradAccumulation(model, strategy).micro_batch(last):
                    ids = tokens(step, number, rank)
                    loss = model(input_ids=ids, labels=ids).loss
                    strategy.backward(loss / RANKS / MICRO_BATCHES)
                losses.append(float(loss))
            if step == 0:
                named = [(name.removeprefix("module."), p) for name, p in model.named_parameters()]
                gradients = {name: strategy.full_tensor(p.grad).clone() for name, p in named}
            strategy.step(optimizer, list(model.parameters()), max_norm=0.0)
        leftover = [name for name, p in model.named_parameters() if p.grad is not None or hasattr(p, "main_grad")]
        return {
            "losses": losses,
            "gradients": gradients,
            "num_fused": len(fused),
            "gathers": len(gathers.sent_bytes),
            "leftover_gradients": leftover,
        }


MODES = ("ddp", "fsdp_grad", "fsdp_full")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def run(mode: str, in_gemms: bool = True, sync_every_micro_batch: bool = False) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("runs") / "ranks"
        return run_on_ranks(RANKS, folder, train, mode, in_gemms, sync_every_micro_batch)

    return run


@pytest.mark.parametrize("mode", [*MODES, "plain copies"])
def test_losses_and_gradients_equal_those_without_sharding_and_fusion(runs, mode):
    for expected, result in zip(runs("ddp", in_gemms=False), runs(mode), strict=True):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert result["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            assert relative_difference(result["gradients"][name], gradient) < 1e-5, name
        assert not result["leftover_gradients"]
        changes = [abs(a - b) for a, b in zip(expected["losses"], expected["losses"][MICRO_BATCHES:], strict=False)]
        assert max(changes) > 0.01, "weights must change, or stale ones would not show"


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_are_fused_except_the_first_and_ddps_last(runs, mode):
    """The first micro-batch of a step has no gradient to add to. In the last one, DDP needs autograd's gradient."""
    num_fused_passes = MICRO_BATCHES - (2 if mode == "ddp" else 1)
    expected = WEIGHTS_PER_LAYER * tiny_config().num_hidden_layers * num_fused_passes * STEPS
    assert [result["num_fused"] for result in runs(mode)] == [expected] * RANKS
    assert [result["num_fused"] for result in runs(mode, in_gemms=False)] == [0] * RANKS
    if mode != "ddp":
        synchronised = runs(mode, sync_every_micro_batch=True)
        assert [result["num_fused"] for result in synchronised] == [0] * RANKS
        assert synchronised[0]["losses"] == pytest.approx(runs(mode)[0]["losses"], rel=1e-5)


def test_unsharded_copies_without_ddp_fuse_every_micro_batch_but_the_first(runs):
    num_fused = WEIGHTS_PER_LAYER * tiny_config().num_hidden_layers * (MICRO_BATCHES - 1) * STEPS
    assert [result["num_fused"] for result in runs("plain copies")] == [num_fused] * RANKS


def test_fsdp_grad_gathers_once_a_step_and_fsdp_full_twice_a_micro_batch(runs):
    layers = tiny_config().num_hidden_layers
    for sync_every_micro_batch in (False, True):
        results = runs("fsdp_grad", sync_every_micro_batch=sync_every_micro_batch)
        assert [result["gathers"] for result in results] == [STEPS * (layers + 1)] * RANKS
    assert [result["gathers"] for result in runs("fsdp_full")] == [STEPS * MICRO_BATCHES * (2 * layers + 1)] * RANKS
