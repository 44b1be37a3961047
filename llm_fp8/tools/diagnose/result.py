"""The findings as plain values, and the problems found, which make the diagnosis exit with code 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.observability.metrics import GIB
from llm_fp8.precision.coverage import Fp8Coverage
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.precision.torchao import num_fp8_gemms_of
from llm_fp8.tools.diagnose.bottlenecks import Bottleneck, StepMeasurements, ranked_bottlenecks
from llm_fp8.tools.diagnose.gemm_operands import PASSES, LayerGroup, ModuleGemms, is_low_precision
from llm_fp8.tools.diagnose.memory import HOW_FOUND, MemoryAtPeak
from llm_fp8.tools.diagnose.step_time import StepTime
from llm_fp8.tools.gemm_rates import MeasuredRates
from llm_fp8.utils.errors import EXIT_FAILED_CHECK, EXIT_NO_GPU

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class TimeFindings:
    """Where the time of a step goes, its lower bounds, and what costs most."""

    step: StepTime
    bounds_s: dict[str, float]
    """By kernel class."""
    gemm_bounds_s: dict[str, float]
    """By operand type."""
    rates: MeasuredRates
    bottlenecks: list[Bottleneck]
    """The largest first."""

    @classmethod
    def of(cls, facts: StepMeasurements) -> TimeFindings:
        return cls(facts.time, facts.bounds_s, facts.gemm_bounds_s, facts.rates, ranked_bottlenecks(facts))


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
    coverage: Fp8Coverage | None
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
            "census": None if self.coverage is None else {**self.coverage.to_dict(), "outside_fp8": self.outside_fp8},
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
            name: {"count": taken.count, "time_s": taken.time_s, "floor_s": found.bounds_s.get(name)}
            for name, taken in step.classes.items()
        },
        "gemms": {
            kind: {"count": taken.count, "time_s": taken.time_s, "floor_s": found.gemm_bounds_s.get(kind)}
            for kind, taken in step.gemms.items()
        },
        "ceilings": dataclasses.asdict(found.rates),
        "losses": [{**dataclasses.asdict(loss), "share": loss.lost_s / step.step_s} for loss in found.bottlenecks],
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


SIZE_REASON = "is not a multiple of"
"""Part of the reason for a layer that fp8 GEMMs cannot take."""


def precision_problems(
    plan: PrecisionPlan, modules: Iterable[ModuleGemms], fp8_names: Collection[str], recipe_inside_modules: str | None
) -> list[str]:
    """Sentences on layers whose recorded GEMMs are not of the precision asked for.

    `fp8_names`: modules in fp8 by the coverage; `recipe_inside_modules`: the recipe in force inside them.
    """
    found = {module.name: module for module in modules}
    if plan.effective != "fp8":
        in_fp8 = [name for name, module in found.items() if _low_precision_passes(module)]
        return [f"{_listed(in_fp8)}: fp8 GEMMs in a run that asked for {plan.requested}"] if in_fp8 else []
    problems = []
    if plan.fallback_reason:
        problems.append(
            f"--fp8_scenario {plan.requested_scenario} was asked for and {plan.effective_scenario} runs: "
            f"{plan.fallback_reason}"
        )
    if recipe_inside_modules == "none":
        problems.append("no fp8 recipe is in force inside Transformer Engine's modules")
    silent = [name for name in fp8_names if name not in found]
    if silent:
        problems.append(f"{_listed(silent)}: no GEMM was seen")
    num_fp8 = num_fp8_gemms_of(plan.recipe) if plan.backend == "torchao" else len(PASSES)
    for gemm_pass in PASSES[:num_fp8]:
        others = [
            name
            for name in fp8_names
            if name in found and not all(map(is_low_precision, found[name].passes[gemm_pass] or ["none x none"]))
        ]
        if others:
            operands = sorted({pair for name in others for pair in found[name].operands(gemm_pass)})
            problems.append(f"{_listed(others)}: {gemm_pass} multiplies {', '.join(operands) or 'nothing'}, not fp8")
    return problems


def left_out_problems(coverage: Fp8Coverage) -> list[str]:
    return [
        f"{pattern}: {reason}, so it is not in fp8"
        for pattern, reason in coverage.skipped.items()
        if SIZE_REASON in reason
    ]


def attention_problems(attention: str | None) -> list[str]:
    return ["attention runs unfused"] if attention == "unfused" else []


def reasons_outside_fp8(coverage: Fp8Coverage, options: PrecisionConfig, plan: PrecisionPlan) -> dict[str, str]:
    """Name pattern -> how many modules are not in fp8, and why."""
    first, last = options.fp8_first_bf16_layers, options.fp8_last_bf16_layers
    kept = f"kept by --fp8_first_bf16_layers {first} --fp8_last_bf16_layers {last}" if first or last else ""
    why = {}
    for pattern, reason in coverage.skipped.items():
        if "(" not in reason:
            added = kept if plan.effective == "fp8" else f"--mixed_precision {plan.effective} runs"
            reason = f"{reason} ({added})" if added else reason
        why[pattern] = reason
    return why


def _low_precision_passes(module: ModuleGemms) -> bool:
    return any(is_low_precision(operands) for gemm_pass in PASSES for operands in module.passes[gemm_pass])


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
