"""The findings as plain values, as in the JSON file, and the problems, which make the diagnosis exit with code 1."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from llm_fp8.config.options import Config, PrecisionConfig
from llm_fp8.observability.metrics import GIB
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.precision.coverage import Fp8Coverage
from llm_fp8.precision.plan import PrecisionPlan, precision_name
from llm_fp8.precision.torchao import num_fp8_gemms_of
from llm_fp8.tools.diagnose.bottlenecks import StepMeasurements, ranked_bottlenecks
from llm_fp8.tools.diagnose.gemm_operands import PASSES, ModuleGemms, group_layers, is_low_precision
from llm_fp8.tools.diagnose.memory import HOW_FOUND
from llm_fp8.utils.errors import EXIT_FAILED_CHECK, EXIT_NO_GPU, listed


def findings(
    config: Config,
    device: str,
    plan: PrecisionPlan,
    coverage: Fp8Coverage | None,
    notes: Sequence[str],
    problems: Sequence[str] = (),
    attention: str | None = None,
    modules: Sequence[ModuleGemms] = (),
    time: dict[str, Any] | None = None,
    memory: dict[str, Any] | None = None,
    planned_memory: dict[str, int] | None = None,
) -> dict[str, Any]:
    """What was found, as it stands in the JSON file; times in seconds, memory in GiB. Without a GPU there are no `time`
    (`time_findings`) and `memory` (`memory_findings`), and `planned_memory` has bytes by kind.
    """
    outside_fp8 = reasons_outside_fp8(coverage, config.precision, plan) if coverage is not None else {}
    return {
        "schema_version": 2,
        "exit_code": EXIT_NO_GPU if time is None else EXIT_FAILED_CHECK if problems else 0,
        "problems": problems,
        "notes": notes,
        "device": device,
        "precision": plan.to_dict() if time is not None else {**plan.to_dict(), "checked": False},
        "attention": attention,
        "census": None if coverage is None else {**coverage.to_dict(), "outside_fp8": outside_fp8},
        "layers": group_layers(modules),
        "modules": {module.name: {name: list(module.operands(name)) for name in PASSES} for module in modules},
        "time": time,
        "memory": memory,
        "planned_memory_gib": None if planned_memory is None else _in_gib(planned_memory),
        "config": config.to_dict(),
        "provenance": collect_provenance(sys.argv),
    }


def time_findings(facts: StepMeasurements) -> dict[str, Any]:
    """Where the time of a step goes, its lower bounds, and what costs most, the largest first."""
    step, bounds_s, gemm_bounds_s = facts.time, facts.bounds_s, facts.gemm_bounds_s
    return {
        "step_time_s": step.step_s,
        "recorded_span_s": step.recorded_span_s,
        "busy_s": step.busy_s,
        "gap_s": step.gap_s,
        "overlap_s": step.overlap_s,
        "classes": {
            name: {"count": taken.count, "time_s": taken.time_s, "floor_s": bounds_s.get(name)}
            for name, taken in step.classes.items()
        },
        "gemms": {
            kind: {"count": taken.count, "time_s": taken.time_s, "floor_s": gemm_bounds_s.get(kind)}
            for kind, taken in step.gemms.items()
        },
        "ceilings": dataclasses.asdict(facts.rates),
        "losses": [{**dataclasses.asdict(one), "share": one.lost_s / step.step_s} for one in ranked_bottlenecks(facts)],
    }


def memory_findings(stage: str, kinds: dict[str, int], peak: int, reserved: int) -> dict[str, Any]:
    """The peak of a step divided (`divide_peak`); of a step without hooks the peak, and what the allocator had
    `reserved` on the GPU by its end. All arguments in bytes.
    """
    return {
        "peak_gib": peak / GIB,
        "reserved_gib": reserved / GIB,
        "watched_peak_gib": sum(kinds.values()) / GIB,
        "stage": stage,
        "kinds_gib": _in_gib(kinds),
        "how_found": HOW_FOUND,
    }


def _in_gib(kinds: dict[str, int]) -> dict[str, float]:
    return {kind: num_bytes / GIB for kind, num_bytes in kinds.items()}


def precision_problems(
    plan: PrecisionPlan, modules: Iterable[ModuleGemms], fp8_names: Collection[str], recipe_inside_modules: str | None
) -> list[str]:
    """Sentences on layers whose recorded GEMMs are not of the precision asked for. `fp8_names`: modules in fp8 by the
    coverage; `recipe_inside_modules`: the recipe in force inside them.
    """
    found = {module.name: module for module in modules}
    if plan.effective != "fp8":
        in_fp8 = [
            name
            for name, module in found.items()
            if any(is_low_precision(pair) for gemm_pass in PASSES for pair in module.passes[gemm_pass])
        ]
        return (
            [f"{listed(in_fp8)}: fp8 GEMMs in a run that asked for {precision_name(plan.requested, None)}"]
            if in_fp8
            else []
        )
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
        problems.append(f"{listed(silent)}: no GEMM was seen")
    num_fp8 = num_fp8_gemms_of(plan.recipe) if plan.backend == "torchao" else len(PASSES)
    for gemm_pass in PASSES[:num_fp8]:
        others = [
            name
            for name in fp8_names
            if name in found and not all(map(is_low_precision, found[name].passes[gemm_pass] or ["none x none"]))
        ]
        if others:
            operands = sorted({pair for name in others for pair in found[name].operands(gemm_pass)})
            problems.append(f"{listed(others)}: {gemm_pass} multiplies {', '.join(operands) or 'nothing'}, not fp8")
    return problems


def left_out_problems(coverage: Fp8Coverage) -> list[str]:
    """Sentences on layers whose size fp8 GEMMs cannot take."""
    return [
        f"{pattern}: {reason}, so it is not in fp8"
        for pattern, reason in coverage.skipped.items()
        if "is not a multiple of" in reason
    ]


def reasons_outside_fp8(coverage: Fp8Coverage, options: PrecisionConfig, plan: PrecisionPlan) -> dict[str, str]:
    """Name pattern -> how many modules are not in fp8, and why."""
    kept = f"kept by --fp8_bf16_modules {options.fp8_bf16_modules}" if options.fp8_bf16_modules else ""
    why = {}
    for pattern, reason in coverage.skipped.items():
        if "(" not in reason:
            added = kept if plan.effective == "fp8" else f"--mixed_precision {plan.effective} runs"
            reason = f"{reason} ({added})" if added else reason
        why[pattern] = reason
    return why
