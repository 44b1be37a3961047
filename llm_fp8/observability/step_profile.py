"""One recorded step of this process's GPU: its kernels, how long it communicates and how long it is idle.

NCCL's kernels are communication, all others work. A rank that waits for another waits inside a communication kernel.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from llm_fp8.observability import kernel_trace as traces
from llm_fp8.observability.metrics import throughput_summary

WORTH_A_WORD = 0.2  # idle share of a step from which on a run reports it


def covered_s(intervals: Iterable[traces.Interval]) -> float:
    """Measure the union of the intervals, in seconds."""
    total_s, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total_s += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total_s


@dataclass
class StepProfile:
    """The GPU's work in one step; times in seconds. `profiled` fills it at its end."""

    span_s: float = 0.0  # from the first kernel's start to the last one's end
    communication_s: float = 0.0  # in which communication kernels ran
    exposed_communication_s: float = 0.0  # the part of it in which no other kernel ran
    work_s: float = 0.0  # in which other kernels ran
    kernels: traces.KernelTimes = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """Return the figures by keys of `metrics.METRICS`, without those that the step did not show."""
        gemms = traces.gemm_kernels(self.kernels)
        in_fp8 = [times for kind, times in gemms.items() if kind in traces.LOW_PRECISION]
        figures: dict[str, float] = {
            "num_gemm_kernels": sum(times.count for times in gemms.values()),
            "num_fp8_gemm_kernels": sum(times.count for times in in_fp8),
            "num_unknown_gemm_kernels": gemms["unknown"].count if "unknown" in gemms else 0,
        }
        if gemms:
            time_s = sum(times.time_s for times in gemms.values())
            figures["fp8_gemm_time_share"] = sum(times.time_s for times in in_fp8) / time_s
        if self.communication_s:
            figures["communication_share"] = self.communication_s / self.span_s
            figures["exposed_communication_share"] = self.exposed_communication_s / self.span_s
        return figures

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for summary.json; `time_s_by_class` counts overlapping kernels each."""
        return {
            **{name: value for name, value in vars(self).items() if name != "kernels"},
            "gemm_kernels": {kind: times.count for kind, times in traces.gemm_kernels(self.kernels).items()},
            "time_s_by_class": {name: times.time_s for name, times in traces.time_by_class(self.kernels).items()},
        }

    def gpu_idle(self, steps: list[dict[str, Any]]) -> dict[str, float] | None:
        """Return the entry `gpu_idle` of a summary; None without a recorded kernel or a measured one of `steps`.

        work_s: kernels of the recorded step other than communication. step_time_s: median of the measured steps in its
        precision, or of all without one, since recording slows the host. share: of step_time_s without such a kernel.
        """
        in_fp8 = self.figures()["num_fp8_gemm_kernels"] > 0
        alike = [step for step in steps if (step.get("fp8_linear_flop_share", 0.0) > 0) == in_fp8]
        step_time_s = throughput_summary(alike or steps).get("median_step_time_s")
        if not self.work_s or not step_time_s:
            return None
        share = max(0.0, 1 - self.work_s / step_time_s)
        return {"work_s": self.work_s, "step_time_s": step_time_s, "share": share}


@contextlib.contextmanager
def profiled(trace: Path | None = None) -> Iterator[StepProfile]:
    """Record the CUDA kernels of the enclosed step, also in the file `trace`, in Chrome's format."""
    result = StepProfile()
    torch.cuda.synchronize()
    with traces.record_kernels() as recorded:
        yield result
    if trace is not None:
        recorded.export_chrome_trace(str(trace))
    intervals = traces.kernel_intervals(recorded)
    everything = [span for _, span in intervals]
    if everything:
        result.span_s = max(end for _, end in everything) - min(start for start, _ in everything)
    result.communication_s = covered_s(span for name, span in intervals if traces.kernel_class(name) == "communication")
    result.work_s = covered_s(span for name, span in intervals if traces.kernel_class(name) != "communication")
    result.exposed_communication_s = covered_s(everything) - result.work_s
    result.kernels = traces.kernel_times(recorded)


def describe_gpu_idle(idle: dict[str, Any] | None, mode: str) -> str | None:
    """Describe an idle GPU, with what helps; None if the idle share is small or unknown."""
    if idle is None or idle["share"] < WORTH_A_WORD:
        return None
    more = "" if mode in ("single", "ddp") else ", or try --sharding_mode fsdp_grad or ddp"
    share = f"the GPU computes nothing during {idle['share']:.0%} of a step, which fp8 cannot shorten"
    return f"{share}: raise --batch_size or --max_seq_length, recompute less{more}"
