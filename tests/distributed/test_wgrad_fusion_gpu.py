"""Weight gradients that GEMMs add up, against autograd's sums and against sums that were never rounded to bf16."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

import te_llama
from llm_fp8.config.options import OptimConfig, ParallelConfig, PrecisionConfig
from llm_fp8.data.collate import Batch
from llm_fp8.distributed.activation_checkpoint import enable_gradient_checkpointing
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.models.build import decoder_layers
from llm_fp8.models.loss_model import TrainingModel
from llm_fp8.models.parity import relative_difference
from llm_fp8.observability.kernel_trace import gemm_kernels, kernel_times, record_kernels
from llm_fp8.optim.optimizers import build_optimizer
from llm_fp8.precision.context import Precision
from llm_fp8.precision.modules import linear_weights
from llm_fp8.precision.plan import resolve_precision
from llm_fp8.tools.diagnose.gemm_operands import te_gemm_owners
from tests.support.batches import S, packed_batch
from tests.support.families import family_config
from tests.support.gpu_steps import BF16, SCENARIOS, build, fp8
from tests.support.small import forget_accelerator

pytestmark = pytest.mark.gpu

ARMS = [("te", scenario) for scenario in [*SCENARIOS, None]] + [("swap", scenario) for scenario in SCENARIOS]
"""Without fp8 nothing is swapped, so there is no such arm."""
NUM_MICRO_BATCHES = 4
ADDITION = "CUDAFunctor_add"
"""In the name of the kernel with which autograd adds a gradient to another."""
LOSS_SCALE = 1024.0
"""Keeps gradients inside fp16's range; nothing else feels a power of two."""
ALLOCATORS_BLOCK = 2**20
"""Bytes by which what the allocator hands out may be larger than what was asked for; the gradients have several
times as many.
"""
BF16_ROUNDING = 2.0**-9
"""The largest relative error of rounding to bf16."""


def options_of(scenario: str | None) -> PrecisionConfig:
    return BF16 if scenario is None else fp8(fp8_scenario=scenario)


def micro_batches(number: int, device) -> list[Batch]:
    """So many batches of other tokens in the same places."""
    first = packed_batch(device)

    def other(ids: Tensor, by: int) -> Tensor:
        return torch.where(ids >= 3, 3 + (ids - 3 + 101 * by) % 1021, ids)

    return [
        dataclasses.replace(first, input_ids=other(first.input_ids, by), labels=other(first.labels, by))
        for by in range(number)
    ]


def prepared(model: nn.Module, summed_by: str):
    """An engine and an optimizer; gradients are summed by 'gemms' or by 'autograd'."""
    forget_accelerator()
    engine = DistributedStrategy("single", Accelerator(mixed_precision="no"), ParallelConfig())
    kind = "adamw_fp32" if next(model.parameters()).dtype == torch.float32 else "adamw_master"
    optimizer = build_optimizer(OptimConfig(), kind, model.named_parameters())
    model, optimizer = engine.prepare(model.train(), optimizer)
    if summed_by == "autograd":
        engine.wgrad_accumulation = None
    return engine, model, optimizer


def backward(
    engine: DistributedStrategy,
    model: nn.Module,
    precision: Precision,
    batches: list[Batch],
    watched: WatchedSums | None = None,
) -> int:
    """A step's gradients, as the loop computes them; returns how many weights the GEMMs of the last micro-batch
    added to.
    """
    adding = 0
    for number, batch in enumerate(batches, start=1):
        if watched is not None:
            watched.begin_micro_batch()
        with engine.micro_batch(model, last=number == len(batches)):
            with precision.context(first_microbatch=number == 1 if len(batches) > 1 else None):
                loss = LOSS_SCALE * model(batch)[0] / batch.num_supervised_tokens
            engine.backward(loss)
            adding = sum(hasattr(parameter, "main_grad") for parameter in model.parameters())
    return adding


def te_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights whose gradients Transformer Engine's modules compute, by name."""
    ours = {id(w) for m in model.modules() if hasattr(m, "fuse_wgrad_accumulation") for w in linear_weights(m)}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in ours}


class WatchedSums:
    """Beside every weight gradient's GEMM: the sum of the products in fp32, and the sum as autograd rounds it.

    Both are made of the operands of the GEMM that is watched, because another backward pass would not have the same:
    attention's is not the same twice, and a maximum that moves by a bit moves every value of a tensor in fp8.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, compute_dtype: torch.dtype, gradient_dtype: torch.dtype
    ) -> None:
        self._compute_dtype, self._gradient_dtype = compute_dtype, gradient_dtype
        self._call = 0
        self.exact: list[Tensor] = []
        self.by_autograd: list[Tensor] = []
        self.targets: list[int] = []
        """Where the last micro-batch's GEMMs wrote to; 0 for memory of their own."""
        for owner in te_gemm_owners():
            monkeypatch.setattr(owner, "general_gemm", functools.partial(self._watch, owner.general_gemm))

    def begin_micro_batch(self) -> None:
        """The GEMMs of a backward pass come in the same order each time."""
        self._call, self.targets = 0, []

    def _watch(self, real: Any, A: Any, B: Any, *arguments: Any, **options: Any) -> Any:
        if options.get("layout") == "NT":
            alone = {"out": None, "accumulate": False, "out_dtype": torch.float32, "bias": None}
            self._add(real(A, B, *arguments, **{**options, **alone})[0])
            out = options["out"]
            self.targets.append(0 if out is None else out.data_ptr())
        return real(A, B, *arguments, **options)

    def _add(self, product: Tensor) -> None:
        rounded = product.to(self._compute_dtype).to(self._gradient_dtype)
        if self._call == len(self.exact):
            self.exact.append(product.double())
            self.by_autograd.append(rounded)
        else:
            self.exact[self._call] += product
            self.by_autograd[self._call] += rounded
        self._call += 1

    def errors(self, weights: dict[str, nn.Parameter]) -> tuple[list[float], list[float]]:
        """Relative errors of the weights' gradients, and of those that autograd would have summed."""
        written = {weight.grad.data_ptr(): weight.grad for weight in weights.values()}
        assert sorted(written) == sorted(self.targets), (
            "every GEMM writes to the gradient of a weight, and to each once"
        )
        ours = [
            relative_difference(written[target], exact) for target, exact in zip(self.targets, self.exact, strict=True)
        ]
        return ours, [
            relative_difference(rounded, exact) for rounded, exact in zip(self.by_autograd, self.exact, strict=True)
        ]


def warm_up(engine: DistributedStrategy, model: nn.Module, precision: Precision, batches: list[Batch]) -> None:
    """Passes after which delayed scaling's scales stay what they are."""
    for _ in range(2):
        backward(engine, model, precision, batches)
        model.zero_grad(set_to_none=True)


def root_mean_square(differences: list[float]) -> float:
    return math.sqrt(sum(difference**2 for difference in differences) / len(differences))


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("num_micro_batches", [2, NUM_MICRO_BATCHES])
@pytest.mark.parametrize(("kind", "scenario"), ARMS)
def test_sums_are_as_exact_as_autograds(
    kind, scenario, num_micro_batches, recomputed, device, monkeypatch, record_property
):
    model, precision, _ = build(options_of(scenario), device, use_te=kind == "te")
    layers = decoder_layers(model.model)
    if recomputed:
        enable_gradient_checkpointing(layers, 1, uses_te=True)
    engine, model, _ = prepared(model, "gemms")
    batches = micro_batches(num_micro_batches, device)
    warm_up(engine, model, precision, batches)
    watched = WatchedSums(monkeypatch, torch.bfloat16, torch.bfloat16)
    adding = backward(engine, model, precision, batches, watched)
    weights = te_weights(model)
    assert adding == len(weights) == len(layers) * (4 if kind == "te" else 7)
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())
    ours, autograds = watched.errors(weights)
    record_property("relative_error", {"gemm": root_mean_square(ours), "autograd": root_mean_square(autograds)})
    assert max(ours) < num_micro_batches * BF16_ROUNDING
    # Equal where the GEMM rounds its product before it adds, less where it does not.
    assert root_mean_square(ours) <= root_mean_square(autograds) * (1 + 1e-9)


@pytest.mark.parametrize("recomputed", [False, True], ids=["", "recomputed"])
@pytest.mark.parametrize("num_micro_batches", [1, 2, NUM_MICRO_BATCHES])
@pytest.mark.parametrize(("kind", "scenario"), ARMS)
def test_all_gradients_are_there(kind, scenario, num_micro_batches, recomputed, device):
    """Of every parameter and micro-batch, and no more than that."""
    batches = micro_batches(num_micro_batches, device)
    found = {}
    for summed_by in ("autograd", "gemms"):
        model, precision, _ = build(options_of(scenario), device, use_te=kind == "te")
        if recomputed:
            enable_gradient_checkpointing(decoder_layers(model.model), 1, uses_te=True)
        engine, model, _ = prepared(model, summed_by)
        warm_up(engine, model, precision, batches)
        adding = backward(engine, model, precision, batches)
        assert adding == (len(te_weights(model)) if summed_by == "gemms" and num_micro_batches > 1 else 0)
        found[summed_by] = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same_but_for_noise(found, scenario)


def assert_same_but_for_noise(found: dict[str, dict[str, Tensor]], scenario: str | None) -> None:
    """A micro-batch too few or too many would be off by a quarter or more."""
    for name, gradient in found["gemms"].items():
        assert relative_difference(gradient, found["autograd"][name]) < (0.05 if scenario is None else 0.15), name


@pytest.mark.parametrize("scenario", ["default", "current", "block", None])
@pytest.mark.parametrize("family", ["llama_biases", "qwen2_qkv_bias_tied"])
def test_biases_norms_and_tied_embeddings_are_autograds(family, scenario, device):
    """In bf16 a bias's gradient comes out of the GEMM that adds the weight's."""
    batches = micro_batches(3, device)
    found = {}
    for summed_by in ("autograd", "gemms"):
        model, precision, _ = build(options_of(scenario), device, family=family)
        engine, model, _ = prepared(model, summed_by)
        warm_up(engine, model, precision, batches)
        assert bool(backward(engine, model, precision, batches)) == (summed_by == "gemms")
        found[summed_by] = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert any(name.endswith("bias") for name in found["gemms"])
    assert_same_but_for_noise(found, scenario)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
def test_parameters_in_fp32_have_gradients_in_fp32(name, device, monkeypatch, record_property):
    """As with --optimizer adamw_fp32: only the first micro-batch's products are rounded to the compute dtype."""
    options = PrecisionConfig(mixed_precision=name)
    plan = resolve_precision(options, device)
    model = te_llama.build_te_model(family_config("llama3_rope_gqa"), torch.float32, device)
    te_llama.initialize_weights_(model, torch.Generator(device=device).manual_seed(0))
    precision = Precision(plan, options, device, torch.float32)
    precision.attach(model, decoder_layers(model))
    engine, model, _ = prepared(TrainingModel(model, S, plan.compute_dtype), "gemms")
    batches = micro_batches(NUM_MICRO_BATCHES, device)
    warm_up(engine, model, precision, batches)
    watched = WatchedSums(monkeypatch, plan.compute_dtype, torch.float32)
    backward(engine, model, precision, batches, watched)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    ours, autograds = watched.errors(te_weights(model))
    record_property("relative_error", {"gemm": root_mean_square(ours), "autograd": root_mean_square(autograds)})
    assert max(ours) < BF16_ROUNDING
    assert root_mean_square(ours) < root_mean_square(autograds)


@pytest.mark.parametrize(("kind", "scenario"), ARMS)
def test_additions_are_gone_and_no_gemm_is_added(kind, scenario, device, record_property):
    batches = micro_batches(NUM_MICRO_BATCHES, device)
    additions, gemms = {}, {}
    for summed_by in ("autograd", "gemms"):
        model, precision, _ = build(options_of(scenario), device, use_te=kind == "te")
        engine, model, _ = prepared(model, summed_by)
        warm_up(engine, model, precision, batches)
        with record_kernels() as recorded:
            backward(engine, model, precision, batches)
        times = kernel_times(recorded)
        gemms[summed_by] = {name: kernels.count for name, kernels in gemm_kernels(times).items()}
        additions[summed_by] = sum(count for name, (count, _) in times.items() if ADDITION in name)
        num_weights = len(te_weights(model))
    record_property("gemm_kernels", gemms)
    record_property("additions", additions)
    assert gemms["gemms"] == gemms["autograd"]
    assert additions["autograd"] - additions["gemms"] == num_weights * (NUM_MICRO_BATCHES - 1)


@pytest.mark.parametrize("scenario", ["default", None])
def test_a_step_needs_no_more_memory_and_keeps_none(scenario, device, record_property):
    batches = micro_batches(3, device)
    peaks = {}
    for summed_by in ("autograd", "gemms"):
        model, precision, _ = build(options_of(scenario), device)
        engine, model, optimizer = prepared(model, summed_by)
        gc.collect()  # the model before
        parameters = list(model.parameters())
        for _ in range(4):  # the last one counts
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            backward(engine, model, precision, batches)
            engine.step(optimizer, parameters, max_norm=1.0)
        peaks[summed_by] = torch.cuda.max_memory_allocated(device) - before
        assert torch.cuda.memory_allocated(device) == before
        assert not any(hasattr(parameter, "main_grad") for parameter in parameters)
    record_property("peak_bytes", peaks)
    assert 0 < peaks["gemms"] <= 1.01 * peaks["autograd"] + ALLOCATORS_BLOCK
