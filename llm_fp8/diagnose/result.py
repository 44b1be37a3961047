"""The findings, as they go to the terminal and into the JSON file."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from llm_fp8.ceilings import Ceilings
from llm_fp8.diagnose.layers import LayerGroup
from llm_fp8.diagnose.losses import Loss, StepFacts, ranked_losses
from llm_fp8.diagnose.memory_kinds import HOW_FOUND, MemoryAtPeak
from llm_fp8.diagnose.operands import ModuleGemms
from llm_fp8.diagnose.step_time import StepTime
from llm_fp8.errors import EXIT_FAILED_CHECK, EXIT_NO_GPU
from llm_fp8.metrics import GIB
from llm_fp8.swap import Census

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class TimeFindings:
    """Where the time of a step goes, the least it could be, and what it is lost to."""

    step: StepTime
    floors_s: dict[str, float]
    """By kernel class."""
    gemm_floors_s: dict[str, float]
    """By operand type."""
    ceilings: Ceilings
    losses: list[Loss]
    """The largest first."""

    @classmethod
    def of(cls, facts: StepFacts) -> TimeFindings:
        """What `facts` come to."""
        return cls(facts.time, facts.floors_s, facts.gemm_floors_s, facts.ceilings, ranked_losses(facts))


@dataclass(frozen=True)
class MemoryFindings:
    """The peak of a step divided, and the peak of a step that nothing watched; bytes."""

    at_peak: MemoryAtPeak
    unwatched_peak: int
    reserved: int
    """What the allocator had taken from the GPU by the end of the unwatched step."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found. What needs a GPU is None where there is none."""

    config: dict[str, Any]
    provenance: dict[str, Any]
    device: str
    precision: dict[str, Any]
    census: Census | None
    outside_fp8: dict[str, str]
    """Name pattern -> how many modules are not in fp8, and why."""
    groups: list[LayerGroup] = field(default_factory=list)
    modules: list[ModuleGemms] = field(default_factory=list)
    attention: str | None = None
    time: TimeFindings | None = None
    memory: MemoryFindings | None = None
    planned_memory: dict[str, int] | None = None
    """Bytes by kind, worked out from the number of parameters; without a GPU only."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    has_gpu: bool = True

    @property
    def exit_code(self) -> int:
        """0; 1 where something that was asked for is not so; 3 without a GPU."""
        if not self.has_gpu:
            return EXIT_NO_GPU
        return EXIT_FAILED_CHECK if self.problems else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the JSON file. Times are in seconds, memory in GiB."""
        return {
            "schema_version": SCHEMA_VERSION,
            "exit_code": self.exit_code,
            "problems": self.problems,
            "notes": self.notes,
            "device": self.device,
            "precision": self.precision,
            "attention": self.attention,
            "census": None if self.census is None else {**self.census.to_dict(), "outside_fp8": self.outside_fp8},
            "layers": [
                {
                    "module": group.module,
                    "layers": group.layer_ranges,
                    "kind": group.kind,
                    "told_by": group.told_by,
                    **{gemm_pass: list(pairs) for gemm_pass, pairs in group.operands.items()},
                }
                for group in self.groups
            ],
            "modules": {
                module.name: {gemm_pass: list(module.operands(gemm_pass)) for gemm_pass in module.passes}
                for module in self.modules
            },
            "time": None if self.time is None else _time_dict(self.time),
            "memory": None if self.memory is None else _memory_dict(self.memory),
            "planned_memory_gib": None
            if self.planned_memory is None
            else {kind: num_bytes / GIB for kind, num_bytes in self.planned_memory.items()},
            "config": self.config,
            "provenance": self.provenance,
        }


def _time_dict(found: TimeFindings) -> dict[str, Any]:
    step = found.step
    return {
        "step_time_s": step.step_s,
        "recorded_span_s": step.recorded_span_s,
        "busy_s": step.busy_s,
        "gap_s": step.gap_s,
        "overlap_s": step.overlap_s,
        "classes": {
            name: {"count": taken.count, "time_s": taken.time_s, "floor_s": found.floors_s.get(name)}
            for name, taken in step.classes.items()
        },
        "gemms": {
            kind: {"count": taken.count, "time_s": taken.time_s, "floor_s": found.gemm_floors_s.get(kind)}
            for kind, taken in step.gemms.items()
        },
        "ceilings": dataclasses.asdict(found.ceilings),
        "losses": [{**dataclasses.asdict(loss), "share": loss.lost_s / step.step_s} for loss in found.losses],
    }


def _memory_dict(found: MemoryFindings) -> dict[str, Any]:
    return {
        "peak_gib": found.unwatched_peak / GIB,
        "reserved_gib": found.reserved / GIB,
        "watched_peak_gib": found.at_peak.peak / GIB,
        "stage": found.at_peak.stage,
        "kinds_gib": {kind: num_bytes / GIB for kind, num_bytes in found.at_peak.kinds.items()},
        "how_found": HOW_FOUND,
    }
