"""One variant, built, timed and recorded, by one process or by all of a launch; and what its step times come to.

As a program one measurement in this process, which `llm_fp8.tools.bench.worker.measure_apart` starts:

    python -m llm_fp8.tools.bench.measure WORKLOAD ARM NUM_STEPS WARMUP ANSWER.json
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState, GradientState

from llm_fp8.distributed.process_group import own_device
from llm_fp8.observability.metrics import GIB, DecoderSize, StepTokens, device_peak_tflops, memory_metrics, step_flops
from llm_fp8.observability.nvml import GpuStateSampler
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.observability.step_profile import profiled
from llm_fp8.tools.bench.variants import Baseline, Variant, parse_variant
from llm_fp8.utils.console import quiet_libraries
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.te_import import forget_delayed_scales

if TYPE_CHECKING:  # scripts/benchmark.py answers --help without importing models
    from llm_fp8.tools.bench.baselines import HfTraining
    from llm_fp8.tools.bench.ours import OurTraining
    from llm_fp8.tools.bench.workload import Workload


def build(work: Workload, variant: Variant) -> OurTraining | HfTraining:
    """The training, ready for its first step; collective. Raises `UserError` where a package is missing."""
    from llm_fp8.tools.bench.baselines import HfTraining
    from llm_fp8.tools.bench.ours import OurTraining

    if isinstance(variant.what, Baseline):
        return HfTraining(work, variant.what, variant.mode, variant.deepspeed_file)
    return OurTraining(work, variant.config(work))


def measure(work: Workload, variant: Variant, warmup: int, device: torch.device) -> dict[str, Any]:
    """Build a variant, time its steps, record the kernels of one more, and free it. Collective.

    Memory is counted from the first step on, on the process that uses most. A CPU has no keys of memory and kernels.

    Returns:
        step_times_s_by_rank: those of each process, without the first `warmup` steps. losses: of all steps, in nats per
            token.
        peak_memory_gib, peak_reserved_memory_gib, memory_before_gib (still held by others).
        gpu_state: `GpuStateSampler.figures` of the timed steps on this process's GPU; None without NVML.
        gemm_kernels: of the recorded step, by operand type: count, time_s and share of all GEMMs' time.
        recorded_step: what else the recorded step shows, and its figures under the keys of `METRICS`.
        build_s, wall_time_s, and the variant's own facts.
    """
    # The variants differ in what they ask of Accelerate's singletons.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    forget_delayed_scales()
    started = time.perf_counter()
    on_gpu = device.type == "cuda"
    before = {"memory_before_gib": torch.cuda.memory_allocated(device) / GIB} if on_gpu else {}
    training = build(work, variant)
    built = time.perf_counter()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with GpuStateSampler(device) as sampler:
        training.take(work.num_steps)
    times, losses = training.recorder.step_times_s[warmup:], list(training.recorder.losses)
    memory = {**memory_metrics(device), **before}
    figures = torch.tensor([[*times, *memory.values()]], dtype=torch.float64, device=device)
    by_rank = training.accelerator.gather(figures)
    found = {**training.facts, "step_times_s_by_rank": by_rank[:, : len(times)].tolist(), "losses": losses}
    if on_gpu:
        found.update(zip(memory, by_rank[:, len(times) :].amax(dim=0).tolist(), strict=True))
        found["gpu_state"] = sampler.figures(sum(times))
        with profiled(training.accelerator) as step:
            training.take(1)
        total_s = sum(step.gemm_time_s.values())
        found["gemm_kernels"] = {
            kind: {"count": count, "time_s": step.gemm_time_s[kind], "share": step.gemm_time_s[kind] / total_s}
            for kind, count in step.gemm_kernels.items()
        }
        found.update(recorded_step=step.to_dict(), **step.figures())
    training.accelerator.free_memory()
    return {**found, "build_s": built - started, "wall_time_s": time.perf_counter() - started}


def header(command: list[str], device: torch.device) -> dict[str, Any]:
    """What a results file says of where it comes from; `command` with the script's name first."""
    peak = device_peak_tflops(device)
    return {"provenance": collect_provenance(command), "peaks": None if peak is None else dataclasses.asdict(peak)}


def describe_failure(error: Exception) -> str:
    """Why a measurement failed, in one line; prints the stack of an error that nobody foresaw."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def speed(
    work: Workload,
    times_s: Sequence[float],
    num_gpus: int = 1,
    context_size: int = 1,
    num_adapter_parameters: int = 0,
    step_tokens: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """Throughput from step times (seconds, at least one); `step_tokens` is `StepTokens` of real documents as a dict.

    tokens_per_s are positions of all GPUs over the median step, and over the longest (_slowest), the shortest
    (_fastest) and the tenths (_p10, _p90); real_tokens_per_s, on real documents, without padding; model_tflops of one
    GPU at the median step.
    """
    if step_tokens is not None:
        tokens = StepTokens(**step_tokens)
    else:
        total = work.tokens_per_step * num_gpus // context_size
        tokens = StepTokens(total, total, total, total * work.seq_length)
    size = DecoderSize.from_config(work.hf_config(), num_adapter_parameters)
    median = statistics.median(times_s)
    tenths = statistics.quantiles(times_s, n=10, method="inclusive") if len(times_s) > 1 else list(times_s)
    seconds = {"": median, "_slowest": max(times_s), "_p10": tenths[-1], "_p90": tenths[0], "_fastest": min(times_s)}
    found = {f"tokens_per_s{end}": tokens.num_tokens / taken for end, taken in seconds.items()}
    if step_tokens is not None:
        found.update({f"real_tokens_per_s{end}": tokens.num_real_tokens / taken for end, taken in seconds.items()})
    return {**found, "model_tflops": step_flops(size, tokens) / median / num_gpus / 1e12}


def describe_gemms(gemm_kernels: dict[str, dict[str, float]]) -> str:
    kinds = (f"{kind} {found['count']} ({found['share']:.0%})" for kind, found in gemm_kernels.items())
    return ", ".join(kinds) or "none"


def main() -> None:
    """Measure what the command line names, and write the answer."""
    from llm_fp8.tools.bench.workload import Workload

    workload, variant, num_steps, warmup, answer = sys.argv[1:]
    quiet_libraries()
    work, device = Workload.parse(workload, int(num_steps)), own_device()
    found: dict[str, Any] = {"failed": None, "header": header([], device)}  # before anything can fail on the GPU
    try:
        found.update(measure(work, parse_variant(variant), int(warmup), device))
    except Exception as error:
        found["failed"] = describe_failure(error)
    write_json_atomic(Path(answer), found)


if __name__ == "__main__":
    main()
