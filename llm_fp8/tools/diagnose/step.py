"""A few measured steps of a run, built by the run's own functions: fp8 coverage, certificate, time by class of kernels,
and memory by kind.

Recording slows the host but not the kernels, so the GPU's idle time is the time of an unrecorded step minus the
kernels' time.

Memory is divided at the last forward pass of a step. "kept_casts" was allocated before it, beside weights, optimizer
state and gradients: fp8 casts of weights, which later micro-batches reuse. "activations" is what the pass allocated.
"backward_pass" is the rest of the peak; with one micro-batch it holds the gradients.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn

from llm_fp8.config.options import Config, RunConfig
from llm_fp8.data.collate import Batch, count_tokens
from llm_fp8.data.loader import TrainLoader
from llm_fp8.distributed.process_group import start_process_group
from llm_fp8.models.build import decoder_size
from llm_fp8.models.source import check_model, load_tokenizer
from llm_fp8.observability.kernel_trace import KernelTime, gemm_kernels, profiled, time_by_class
from llm_fp8.observability.metrics import GIB, device_peak_tflops, speed_metrics
from llm_fp8.optim.optimizers import unwrap
from llm_fp8.precision.certificate import ExpectedKernels, certify
from llm_fp8.run.plan import RunPlan, announce, plan_run
from llm_fp8.run.run import load_data
from llm_fp8.run.setup import TrainingSetup, build_setup, build_stepper
from llm_fp8.step.stepper import Stepper
from llm_fp8.utils.ranks import LaunchRanks
from llm_fp8.utils.script import quiet_libraries
from llm_fp8.utils.te_internals import attention_backend

NUM_WARMUP_STEPS = 4
NUM_TIMED_STEPS = 7


def plan_without_output(config: Config) -> RunPlan:
    """Plan the run of `config`, which was checked, without output folder and trackers."""
    ranks = LaunchRanks.from_environment(os.environ)
    start_process_group(ranks)
    quiet_libraries()
    plan = plan_run(dataclasses.replace(config, run=RunConfig(output_dir=os.devnull)), ranks)
    announce(plan)
    return plan


def diagnose(config: Config, trace: Path | None = None) -> dict[str, Any]:
    """Return the findings on the run of `config`, as in the JSON file: times in seconds, memory in GiB. The recorded
    step also goes to the file `trace`, in Chrome's format. Raises `UserError` as the run itself would.
    """
    plan = plan_without_output(config)
    set_seed(plan.config.optim.seed)
    tokenizer, _ = load_tokenizer(plan.config.model, plan.source)
    check_model(plan.config, plan.hf_config, tokenizer)
    data = load_data(plan, tokenizer)
    plan.say(data.description)
    setup = build_setup(plan)
    num_steps = NUM_WARMUP_STEPS + NUM_TIMED_STEPS + 2  # and one for the memory, one for the kernels
    findings = measure(setup, build_stepper(setup, data.train, num_steps), data.train, trace)
    return findings | {"problems": problems(findings)}


def measure(setup: TrainingSetup, stepper: Stepper, loader: TrainLoader, trace: Path | None) -> dict[str, Any]:
    """Take steps: first to warm up, then for the time, the memory and the kernels."""
    plan, steps = setup.plan, iter(loader)
    stepper.model.train()

    def take(num_steps: int = 1) -> tuple[float, list[Batch]]:
        """Take steps; return the mean seconds of a step and the last one's micro-batches."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(num_steps):
            batches = next(steps)
            stepper.take_step(batches)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / num_steps, batches

    take(NUM_WARMUP_STEPS)
    step_s, batches = take(NUM_TIMED_STEPS)
    memory = memory_by_kind(stepper, take)
    with profiled(trace) as profile:
        take()
    kernels = profile.kernels
    busy_s = profile.work_s + profile.exposed_communication_s
    certificate = certify(
        ExpectedKernels.of_model(setup.precision, setup.coverage, setup.recomputed),
        kernels,
        setup.precision.module_state(),
        num_micro_batches=len(batches),
        attention=attention_backend() if plan.config.model.use_te else setup.attention,
    )
    size = decoder_size(plan.hf_config, setup.num_adapter_parameters)
    peak = device_peak_tflops(plan.device)
    classes = _figures(time_by_class(kernels))
    classes["gpu_idle"] = {"count": 0, "time_s": max(0.0, step_s - busy_s)}
    return {
        "precision": plan.precision.to_dict(),
        "coverage": setup.coverage.to_dict(),
        "certificate": certificate.to_dict(),
        "attention": certificate.attention,
        "step": speed_metrics(count_tokens(batches), step_s, size, 1, peak, plan.precision.has_fp8_peak),
        "classes": classes,
        "gemms": _figures(gemm_kernels(kernels)),
        "memory_gib": memory,
    }


def _figures(by_name: Mapping[Any, KernelTime]) -> dict[str, dict[str, float]]:
    return {name: {"count": kernels.count, "time_s": kernels.time_s} for name, kernels in by_name.items()}


def held_gib(tensors: Iterable[Any]) -> float:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor) and tensor.is_cuda) / GIB


def memory_by_kind(stepper: Stepper, take: Callable[[], object]) -> dict[str, float]:
    """Measure the memory of a step's peak in GiB by kind (see the module's docstring); `take` takes a step."""
    parameters = list(stepper.model.parameters())
    marks: list[tuple[float, float]] = []

    def mark(*_: object) -> None:
        marks.append((torch.cuda.memory_allocated() / GIB, held_gib(parameter.grad for parameter in parameters)))

    model: nn.Module = stepper.training_model
    hooks = [model.register_forward_pre_hook(mark), model.register_forward_hook(mark)]
    torch.cuda.reset_peak_memory_stats()
    take()
    for hook in hooks:
        hook.remove()
    peak = torch.cuda.max_memory_allocated() / GIB
    weights = held_gib(parameters)
    (before, gradients), (after, _) = marks[-2:]  # before and after the last forward pass
    state = held_gib(value for entry in unwrap(stepper.optimizer).state.values() for value in entry.values())
    return {
        "weights": weights,
        "optimizer_state": state,
        "gradients": gradients,
        "kept_casts": before - weights - state - gradients,
        "activations": after - before,
        "backward_pass": peak - after,
        "peak": peak,
        "reserved": torch.cuda.max_memory_reserved() / GIB,
    }


def problems(findings: Mapping[str, Any]) -> list[str]:
    """List sentences on what differs from the request; with any of them the exit code is 1."""
    precision, certificate = findings["precision"], findings["certificate"]
    wrong = list(certificate["reasons"]) if certificate["verdict"] == "failed" else []
    if precision["fallback_reason"]:
        wrong.append(f"--fp8_scenario {precision['requested_scenario']} fell back: {precision['fallback_reason']}")
    if "unfused" in str(findings["attention"]):
        wrong.append("attention runs unfused: unset NVTE_FUSED_ATTN and NVTE_FLASH_ATTN, CUDNN_HOME and CUDNN_PATH")
    skipped = findings["coverage"]["skipped"].items() if precision["effective"] == "fp8" else ()
    return wrong + [f"{name}: {reason}" for name, reason in skipped if "not a multiple of" in reason]
