"""One recorded step: its kernels, how long the GPU is idle, and on several GPUs communication and the slowest rank.

NCCL's kernels are communication, all others work. A rank that waits for another waits inside a communication kernel, so
the slowest rank is the one whose work takes longest.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from llm_fp8.observability.kernel_trace import (
    LOW_PRECISION,
    GemmKind,
    Interval,
    KernelClass,
    KernelTimes,
    gemm_kernels,
    kernel_class,
    kernel_intervals,
    kernel_times,
    record_kernels,
    time_by_class,
)
from llm_fp8.observability.metrics import GIB
from llm_fp8.observability.step_stats import throughput_summary

WORTH_A_WORD = 0.2
"""Idle share of a step from which on a run reports it."""


def covered(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint ones in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


@dataclass
class StepProfile:
    """What the GPUs did in one step; times in seconds, of this rank unless said. Filled when `profiled` ends."""

    span_s: float = 0.0  # from the first kernel's start to the last one's end
    communication_s: float = 0.0  # in which communication kernels ran
    exposed_communication_s: float = 0.0  # the part of it in which no other kernel ran
    work_s_by_rank: list[float] = field(default_factory=list)  # in which other kernels ran
    peak_memory_gib_by_rank: list[float] = field(default_factory=list)
    gemm_kernels: dict[GemmKind, int] = field(default_factory=dict)  # their number by operand type
    gemm_time_s: dict[GemmKind, float] = field(default_factory=dict)
    time_s_by_class: dict[KernelClass, float] = field(default_factory=dict)  # kernels that overlap count each
    kernels: KernelTimes = field(default_factory=dict)

    @property
    def slowest_rank(self) -> int:
        return max(range(len(self.work_s_by_rank)), key=self.work_s_by_rank.__getitem__)

    @property
    def lag(self) -> float:
        """How much longer than the mean rank's the slowest rank's work takes, as a share."""
        return self.work_s_by_rank[self.slowest_rank] * len(self.work_s_by_rank) / sum(self.work_s_by_rank) - 1

    def figures(self) -> dict[str, float]:
        """Under the keys of `metrics.METRICS`; what the step did not show is left out."""
        figures: dict[str, float] = {
            "num_gemm_kernels": sum(self.gemm_kernels.values()),
            "num_fp8_gemm_kernels": sum(self.gemm_kernels.get(kind, 0) for kind in LOW_PRECISION),
            "num_unknown_gemm_kernels": self.gemm_kernels.get("unknown", 0),
        }
        if gemm_s := sum(self.gemm_time_s.values()):
            figures["fp8_gemm_time_share"] = sum(self.gemm_time_s.get(kind, 0.0) for kind in LOW_PRECISION) / gemm_s
        if len(self.work_s_by_rank) > 1 and self.span_s > 0:
            figures["communication_share"] = self.communication_s / self.span_s
            figures["exposed_communication_share"] = self.exposed_communication_s / self.span_s
            figures["slowest_rank"] = float(self.slowest_rank)
            figures["slowest_rank_lag"] = self.lag
        return figures

    def to_dict(self) -> dict[str, Any]:
        """Plain values for summary.json, without what only several GPUs have where there is one, and the kernels."""
        of_several = ("communication_s", "exposed_communication_s", "work_s_by_rank")
        left_out = ("kernels", *(of_several if len(self.work_s_by_rank) == 1 else ()))
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in left_out}

    def describe(self) -> str:
        total_s = sum(self.time_s_by_class.values())
        shares = [f"{name} {time_s / total_s:.0%}" for name, time_s in self.time_s_by_class.items()]
        words = [
            f"one step recorded: kernels by time: {', '.join(s for s in shares if not s.endswith(' 0%')) or 'none'}"
        ]
        figures = self.figures()
        if "communication_share" in figures:
            words += [
                f"communication {figures['communication_share']:.0%} of the time, "
                f"{figures['exposed_communication_share']:.0%} alone",
                f"slowest rank {self.slowest_rank} ({self.lag:.1%} over the mean)",
                f"peak memory by rank {', '.join(f'{gib:.1f}' for gib in self.peak_memory_gib_by_rank)} GiB",
            ]
        gemms = ", ".join(f"{count} {kind}" for kind, count in sorted(self.gemm_kernels.items()))
        return "; ".join([*words, f"GEMM kernels: {gemms or 'none'}"])


@contextlib.contextmanager
def profiled(accelerator: Accelerator) -> Iterator[StepProfile]:
    """Record the CUDA kernels of the enclosed step; collective: gathers the ranks' times at the end."""
    result = StepProfile()
    torch.cuda.synchronize()
    with record_kernels() as recorded:
        yield result
    intervals = kernel_intervals(recorded)
    communication = covered(span for name, span in intervals if kernel_class(name) == "communication")
    work = covered(span for name, span in intervals if kernel_class(name) != "communication")
    everything = covered([*communication, *work])
    if everything:
        result.span_s = everything[-1][1] - everything[0][0]
    result.communication_s = length(communication)
    result.exposed_communication_s = length(everything) - length(work)
    result.kernels = kernel_times(recorded)
    gemms = gemm_kernels(result.kernels)
    result.gemm_kernels = {kind: kernels.count for kind, kernels in gemms.items()}
    result.gemm_time_s = {kind: kernels.time_s for kind, kernels in gemms.items()}
    result.time_s_by_class = {name: kernels.time_s for name, kernels in time_by_class(result.kernels).items()}
    own = [length(work), torch.cuda.max_memory_allocated() / GIB]
    by_rank = accelerator.gather(torch.tensor(own, device=accelerator.device, dtype=torch.float64)).view(-1, 2)
    result.work_s_by_rank = by_rank[:, 0].tolist()
    result.peak_memory_gib_by_rank = by_rank[:, 1].tolist()


def gpu_idle(profile: StepProfile, steps: list[dict[str, Any]]) -> dict[str, float] | None:
    """The entry `gpu_idle` of a summary for a run's `steps`; None without a recorded kernel or a measured step.

    A layer launches dozens of kernels, in fp8 more than in bf16. With small micro-batches the GPU finishes them before
    the host has launched the next; the step then takes the host's time and fp8 gains nothing.

    work_s: kernels of the recorded step other than communication, on the GPU with most of them. step_time_s: median of
    the measured steps, since recording slows the host. share: of the step in which no such kernel runs.
    """
    step_time_s = throughput_summary(steps).get("median_step_time_s")
    work_s = max(profile.work_s_by_rank, default=0.0)
    if not work_s or not step_time_s:
        return None
    return {"work_s": work_s, "step_time_s": step_time_s, "share": max(0.0, 1 - work_s / step_time_s)}


def describe_gpu_idle(idle: dict[str, Any] | None, num_ranks: int) -> str | None:
    """A sentence on it, with what helps; None where it is small or unknown."""
    if idle is None or idle["share"] < WORTH_A_WORD:
        return None
    why, less = "launch-bound", ", or, with --use_te and packing, let the GPU replay it (--cuda_graphs)"
    if num_ranks > 1:
        why = "launch-bound, or waiting for other GPUs"
        less = "; or a --sharding_mode that communicates less: fsdp_grad, or ddp where it fits"
    return (
        f"the GPU is idle during {idle['share']:.0%} of a step ({why}), which fp8 cannot shorten: give each "
        f"micro-batch more tokens (--batch_size, --max_seq_length), recompute less (--gradient_checkpointing){less}"
    )
