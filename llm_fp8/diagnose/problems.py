"""What was asked for and is not so: the sentences that make the diagnosis end with code 1; and why layers are outside fp8."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from llm_fp8.config import PrecisionConfig
from llm_fp8.diagnose.operands import PASSES, ModuleGemms, is_low_precision
from llm_fp8.precision import PrecisionPlan
from llm_fp8.swap import Census
from llm_fp8.torchao_fp8 import num_fp8_products

SIZE_REASON = "is not a multiple of"
"""Part of the census's reason for a layer that fp8 GEMMs cannot take."""


def precision_problems(
    plan: PrecisionPlan, modules: Iterable[ModuleGemms], fp8_names: Collection[str], seen_inside: str | None
) -> list[str]:
    """Sentences on layers whose GEMMs are not of the precision asked for.

    Args:
        plan: of the run.
        modules: what was recorded.
        fp8_names: names of the modules that the census counts as fp8.
        seen_inside: the recipe in force inside the first of them (`Precision.seen_inside`).
    """
    found = {module.name: module for module in modules}
    if plan.effective != "fp8":
        narrow = [name for name, module in found.items() if _low_precision_passes(module)]
        return [f"{_listed(narrow)}: fp8 GEMMs in a run that asked for {plan.requested}"] if narrow else []
    problems = []
    if plan.fallback_reason:
        problems.append(
            f"--fp8_scenario {plan.requested_scenario} was asked for and {plan.effective_scenario} runs: {plan.fallback_reason}"
        )
    if seen_inside == "none":
        problems.append("no fp8 recipe is in force inside Transformer Engine's modules")
    silent = [name for name in fp8_names if name not in found]
    if silent:
        problems.append(f"{_listed(silent)}: no GEMM was seen")
    in_fp8 = num_fp8_products(plan.recipe) if plan.backend == "torchao" else len(PASSES)
    for gemm_pass in PASSES[:in_fp8]:
        wide = [
            name
            for name in fp8_names
            if name in found and not all(map(is_low_precision, found[name].passes[gemm_pass] or ["none x none"]))
        ]
        if wide:
            operands = sorted({pair for name in wide for pair in found[name].operands(gemm_pass)})
            problems.append(f"{_listed(wide)}: {gemm_pass} multiplies {', '.join(operands) or 'nothing'}, not fp8")
    return problems


def left_out_problems(census: Census) -> list[str]:
    """Sentences on layers that fp8 was asked for and that cannot take it."""
    return [f"{pattern}: {reason}, so it is not in fp8" for pattern, reason in census.skipped.items() if SIZE_REASON in reason]


def attention_problems(attention: str | None) -> list[str]:
    """A sentence where attention is unfused."""
    return ["attention runs unfused"] if attention == "unfused" else []


def reasons_outside_fp8(census: Census, options: PrecisionConfig, plan: PrecisionPlan) -> dict[str, str]:
    """Name pattern -> how many modules are not in fp8, and why, for every pattern that the census lists as such."""
    first, last = options.fp8_first_bf16_layers, options.fp8_last_bf16_layers
    kept = f"kept by --fp8_first_bf16_layers {first} --fp8_last_bf16_layers {last}" if first or last else ""
    why = {}
    for pattern, reason in census.skipped.items():
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
