"""Weight gradients that GEMMs accumulate, compared with autograd's sums."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from llm_fp8.config.options import OptimConfig, ParallelConfig, PrecisionConfig
from llm_fp8.data.collate import Batch
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.models.model import decoder_layers
from llm_fp8.models.parity import relative_difference
from llm_fp8.observability.kernel_trace import gemm_kernels, kernel_times, record_kernels
from llm_fp8.optim.optimizers import OPTIMIZERS
from llm_fp8.precision.context import Precision
from llm_fp8.precision.coverage import linear_weights
from llm_fp8.step.activation_checkpoint import enable_gradient_checkpointing
from llm_fp8.step.wgrad_fusion import FusedWgradAccumulation
from tests.support.batches import packed_batch
from tests.support.gpu_steps import BF16, SCENARIOS, build, fp8
from tests.support.small import reset_accelerator

pytestmark = pytest.mark.gpu

VARIANTS = [("te", scenario) for scenario in [*SCENARIOS, None]] + [("swap", scenario) for scenario in SCENARIOS]
"""Decoder and fp8 scenario. There is no bf16 variant for "swap", because only fp8 swaps modules."""
NUM_MICRO_BATCHES = 4
ADDITION = "CUDAFunctor_add"
"""Part of the name of the kernel with which autograd adds two gradients."""


def options_of(scenario: str | None) -> PrecisionConfig:
    return BF16 if scenario is None else fp8(fp8_scenario=scenario)


def micro_batches(number: int, device) -> list[Batch]:
    """Return `number` packed batches with documents of the same lengths but different tokens."""
    first = packed_batch(device)

    def shifted(ids: Tensor, by: int) -> Tensor:
        return torch.where(ids >= 3, 3 + (ids - 3 + 101 * by) % 1021, ids)

    return [
        dataclasses.replace(first, input_ids=shifted(first.input_ids, by), labels=shifted(first.labels, by))
        for by in range(number)
    ]


def prepare(model: nn.Module, summed_by: str):
    """Return strategy, prepared model and optimizer. `summed_by` says what sums gradients: "gemms" or "autograd"."""
    reset_accelerator()
    strategy = DistributedStrategy("single", Accelerator(mixed_precision="no"), ParallelConfig())
    kind = "adamw_fp32" if next(model.parameters()).dtype == torch.float32 else "adamw_master"
    optimizer = OPTIMIZERS[kind].build(model.named_parameters(), OptimConfig(), False)
    model, optimizer = strategy.prepare(model.train(), optimizer)
    if summed_by == "autograd":
        strategy.main_grads = lambda model: None
    return strategy, model, optimizer


def backward(strategy: DistributedStrategy, model: nn.Module, precision: Precision, batches: list[Batch]) -> int:
    """Compute the gradients of a step on `batches`. Return how many weights had `main_grad` in the last micro-batch."""
    num_fused = 0
    for number, batch in enumerate(batches, start=1):
        last = number == len(batches)
        with strategy.micro_batch(model, last), FusedWgradAccumulation(model, strategy).micro_batch(last):
            with precision.context(first_microbatch=number == 1 if len(batches) > 1 else None):
                loss = model(batch)[0] / batch.num_supervised_tokens
            strategy.backward(loss)
            num_fused = sum(hasattr(parameter, "main_grad") for parameter in model.parameters())
    return num_fused


def te_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of Transformer Engine's linear modules by name."""
    ours = {id(w) for m in model.modules() if hasattr(m, "fuse_wgrad_accumulation") for w in linear_weights(m)}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in ours}


def warm_up(strategy: DistributedStrategy, model: nn.Module, precision: Precision, batches: list[Batch]) -> None:
    """Run `batches` twice, after which the scales of delayed scaling are constant, and drop the gradients."""
    for _ in range(2):
        backward(strategy, model, precision, batches)
        model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("num_micro_batches", [1, 2, NUM_MICRO_BATCHES])
@pytest.mark.parametrize(("kind", "scenario"), VARIANTS)
def test_parameters_get_each_micro_batch_gradient_once(kind, scenario, num_micro_batches, recomputed, device):
    batches = micro_batches(num_micro_batches, device)
    results = {}
    for summed_by in ("autograd", "gemms"):
        model, precision, _ = build(options_of(scenario), device, use_te=kind == "te")
        if recomputed:
            enable_gradient_checkpointing(decoder_layers(model.model), 1, uses_te=True)
        strategy, model, _ = prepare(model, summed_by)
        warm_up(strategy, model, precision, batches)
        num_fused = backward(strategy, model, precision, batches)
        assert num_fused == (len(te_weights(model)) if summed_by == "gemms" and num_micro_batches > 1 else 0)
        results[summed_by] = {name: parameter.grad for name, parameter in model.named_parameters()}
    # A missing or repeated micro-batch would change a gradient by a quarter or more.
    for name, gradient in results["gemms"].items():
        assert relative_difference(gradient, results["autograd"][name]) < (0.05 if scenario is None else 0.15), name


@pytest.mark.parametrize(("kind", "scenario"), VARIANTS)
def test_fused_wgrad_removes_additions_and_adds_no_gemm(kind, scenario, device, record_property):
    batches = micro_batches(NUM_MICRO_BATCHES, device)
    additions, gemms = {}, {}
    for summed_by in ("autograd", "gemms"):
        model, precision, _ = build(options_of(scenario), device, use_te=kind == "te")
        strategy, model, _ = prepare(model, summed_by)
        warm_up(strategy, model, precision, batches)
        with record_kernels() as recorded:
            backward(strategy, model, precision, batches)
        times = kernel_times(recorded)
        gemms[summed_by] = {name: kernels.count for name, kernels in gemm_kernels(times).items()}
        additions[summed_by] = sum(count for name, (count, _) in times.items() if ADDITION in name)
        num_weights = len(te_weights(model))
    record_property("gemm_kernels", gemms)
    record_property("additions", additions)
    assert gemms["gemms"] == gemms["autograd"]
    assert additions["autograd"] - additions["gemms"] == num_weights * (NUM_MICRO_BATCHES - 1)
