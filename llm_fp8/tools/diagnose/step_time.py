"""Where the time of an optimizer step goes: kernel classes, GEMMs by operand type, gaps.

Recording slows the host down and leaves the kernels as long as they are. So kernels are those of a recorded step, and
gaps are what steps that nothing recorded take beyond them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from llm_fp8.observability.kernel_trace import KernelTime, gemm_kernels, kernel_intervals, kernel_times, time_by_class
from llm_fp8.observability.step_profile import covered, length

_FUSED_ATTENTION = re.compile(r"flash|fmha|sdpa", re.IGNORECASE)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    step_s: float
    """The median step that nothing recorded."""
    recorded_span_s: float
    """From the first kernel's start to the last one's end, in the recorded step."""
    busy_s: float
    """In which at least one kernel of the recorded step ran."""
    classes: dict[str, KernelTime]
    """By kernel class, the longest first."""
    gemms: dict[str, KernelTime]
    """The GEMMs by the type of their operands."""

    @property
    def gap_s(self) -> float:
        """GPU idle in an unrecorded step; 0 where the recorded step's kernels alone took longer."""
        return max(0.0, self.step_s - self.busy_s)

    @property
    def overlap_s(self) -> float:
        """Concurrent kernels, counted twice by `classes`: classes + gaps - overlap = step, where there are gaps."""
        return sum(taken.time_s for taken in self.classes.values()) - self.busy_s

    def class_s(self, *names: str) -> float:
        return sum(self.classes[name].time_s for name in names if name in self.classes)

    def named_s(self, kernel_class: str, part: str) -> float:
        """Seconds of the kernels of a class whose name holds `part`."""
        taken = self.classes.get(kernel_class, KernelTime())
        return sum(time_s for name, time_s in taken.names.items() if part in name)

    @property
    def has_fused_attention(self) -> bool:
        """Whether a kernel that computes attention as one ran: cuDNN's, flash-attn's or torch's own."""
        return any(_FUSED_ATTENTION.search(name) for name in self.classes.get("attention", KernelTime()).names)


def step_time(recorded: Any, step_s: float) -> StepTime:
    """Add up a `torch.profiler.profile` of one step; `step_s` is of unrecorded ones. ValueError without a kernel."""
    intervals = [interval for _, interval in kernel_intervals(recorded)]
    if not intervals:
        raise ValueError("the recorded step holds no GPU kernel")
    union = covered(intervals)
    times = kernel_times(recorded)
    return StepTime(
        step_s=step_s,
        recorded_span_s=union[-1][1] - union[0][0],
        busy_s=length(union),
        classes={str(name): taken for name, taken in time_by_class(times).items()},
        gemms={str(name): taken for name, taken in gemm_kernels(times).items()},
    )
