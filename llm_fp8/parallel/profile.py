"""One recorded step of a run on several GPUs: how much of it is communication, and which rank is slow.

Kernels of NCCL are communication, all others are work. A rank that waits for another waits inside a communication kernel, so the slowest
rank is the one whose own work takes longest.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch.profiler import ProfilerActivity, profile

from llm_fp8.kernels import gemm_kernels
from llm_fp8.metrics import GIB

_COMMUNICATION = re.compile(r"nccl", re.IGNORECASE)

Interval = tuple[float, float]


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
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


@dataclass
class StepProfile:
    """What the GPUs did in one step; times in seconds. Filled when the `profiled` block ends."""

    span_s: float = 0.0
    """From the first kernel's start to the last one's end, on this rank."""
    communication_s: float = 0.0
    """In which communication kernels ran, on this rank."""
    exposed_communication_s: float = 0.0
    """In which communication kernels ran and no other, on this rank."""
    work_s_by_rank: list[float] = field(default_factory=list)
    """In which other kernels ran, of each rank."""
    peak_memory_gib_by_rank: list[float] = field(default_factory=list)
    gemm_kernels: dict[str, int] = field(default_factory=dict)
    """GEMM kernels of this rank by operand type."""

    @property
    def slowest_rank(self) -> int:
        """The rank whose own work takes longest."""
        return max(range(len(self.work_s_by_rank)), key=self.work_s_by_rank.__getitem__)

    @property
    def lag(self) -> float:
        """How much longer than the mean rank's the slowest one's work takes, as a share."""
        return self.work_s_by_rank[self.slowest_rank] * len(self.work_s_by_rank) / sum(self.work_s_by_rank) - 1

    def figures(self) -> dict[str, float]:
        """Under the keys of `llm_fp8.metrics.METRICS`."""
        return {
            "communication_share": self.communication_s / self.span_s,
            "exposed_communication_share": self.exposed_communication_s / self.span_s,
            "slowest_rank": float(self.slowest_rank),
            "slowest_rank_lag": self.lag,
        }

    def describe(self) -> str:
        """One line for the terminal."""
        figures = self.figures()
        gemms = ", ".join(f"{count} {kind}" for kind, count in sorted(self.gemm_kernels.items()))
        return (
            f"one step recorded: communication runs {figures['communication_share']:.0%} of the time and alone "
            f"{figures['exposed_communication_share']:.0%}; slowest rank {self.slowest_rank} ({self.lag:.1%} over the mean); peak memory by rank "
            f"{', '.join(f'{gib:.1f}' for gib in self.peak_memory_gib_by_rank)} GiB; GEMM kernels: {gemms}"
        )


@contextlib.contextmanager
def profiled(accelerator: Accelerator) -> Iterator[StepProfile]:
    """Record the CUDA kernels of the enclosed step; collective, because the ranks' times are gathered at the end."""
    result = StepProfile()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        yield result
        torch.cuda.synchronize()
    intervals = kernel_intervals(recorded)
    communication = covered(span for name, span in intervals if _COMMUNICATION.search(name))
    work = covered(span for name, span in intervals if not _COMMUNICATION.search(name))
    everything = covered([*communication, *work])
    if everything:
        result.span_s = everything[-1][1] - everything[0][0]
    result.communication_s = length(communication)
    result.exposed_communication_s = length(everything) - length(work)
    result.gemm_kernels = {kind: kernels.count for kind, kernels in gemm_kernels(recorded).items()}
    own = torch.tensor([length(work), torch.cuda.max_memory_allocated() / GIB], device=accelerator.device, dtype=torch.float64)
    by_rank = accelerator.gather(own).view(-1, 2)
    result.work_s_by_rank = by_rank[:, 0].tolist()
    result.peak_memory_gib_by_rank = by_rank[:, 1].tolist()


def kernel_intervals(recorded: Any) -> list[tuple[str, Interval]]:
    """Name and time (seconds) of every kernel on the GPU in a finished `torch.profiler.profile`."""
    return [
        (event.name, (event.time_range.start / 1e6, event.time_range.end / 1e6))
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
