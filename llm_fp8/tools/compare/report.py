"""A comparison as one value that JSON can hold, and its table: one column per variant, on the terminal and the page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from llm_fp8.tools.compare.differences import Difference, find_differences
from llm_fp8.tools.compare.figures import VariantFigures, variant_figures
from llm_fp8.tools.compare.launch import Failure
from llm_fp8.tools.compare.run_record import RunRecord
from llm_fp8.tools.compare.statistics import Interval
from llm_fp8.tools.compare.variants import REFERENCE
from llm_fp8.tools.compare.verdict import QUALITY_MARGIN, Verdict, judge
from llm_fp8.utils.errors import UserError


@dataclass(frozen=True)
class Comparison:
    """What comparison.json holds; the reference stands first."""

    variants: list[VariantFigures]
    verdicts: dict[str, Verdict]
    differences: list[Difference]
    failures: list[Failure]
    curves: list[dict[str, Any]]
    """Steps, losses and eval losses of each run."""
    runs: dict[str, str]
    """Label of each run -> its folder or W&B path."""
    provenance: dict[str, Any]
    """That of the first run; where another differs, it stands in `differences`."""
    quality_margin: float


def compare(
    runs: Sequence[RunRecord], failures: Sequence[Failure] = (), quality_margin: float = QUALITY_MARGIN
) -> Comparison:
    """Compare finished runs, at least one. Raises `UserError` for two of the same variant and seed."""
    sources: dict[str, str] = {}
    for run in runs:
        if run.label in sources:
            raise UserError(f"{sources[run.label]} and {run.source} are both {run.label}; give one of them.")
        sources[run.label] = run.source
    names = dict.fromkeys([run.variant for run in runs] + [failure.variant for failure in failures])
    in_order = sorted(runs, key=lambda run: (run.variant != REFERENCE, run.seed))
    reference = [run for run in in_order if run.variant == REFERENCE]
    differences = find_differences(runs)
    figures = []
    for name in sorted(names, key=lambda name: name != REFERENCE):
        own = [run for run in in_order if run.variant == name]
        failed = sum(failure.variant == name for failure in failures)
        figures.append(variant_figures(name, own, reference, num_failed=failed))
    baseline = figures[0] if figures[0].variant == REFERENCE else None
    curves = [
        {
            "variant": run.variant,
            "seed": run.seed,
            "loss": [(step["step"], step["loss"]) for step in run.steps],
            "eval_loss": [(entry["step"], entry["eval_loss"]) for entry in run.evaluations],
        }
        for run in in_order
    ]
    return Comparison(
        variants=figures,
        verdicts={own.variant: judge(own, baseline, differences, quality_margin) for own in figures},
        differences=differences,
        failures=list(failures),
        curves=curves,
        runs=sources,
        provenance={**runs[0].provenance, **runs[0].model},
        quality_margin=quality_margin,
    )


def _text(value: Interval | float | None, shape: str) -> str:
    if isinstance(value, Interval):
        return value.describe(shape)
    return "-" if value is None else shape.format(value)


def figure_rows(own: VariantFigures) -> dict[str, str]:
    """Title with unit -> text, of the figures of a variant."""
    gap, answers, certificate = own.loss_gap, own.answers, own.certificate
    match = _text(own.exact_match and 100 * own.exact_match, "{:.1f}")
    if answers is not None:
        match += f" ({100 * answers.difference:+.1f}, p = {answers.p_value:.2g}, {answers.num_problems} answers)"
    return {
        "ran": " and ".join(own.effective) + (" (fell back)" if own.fallback_reasons else ""),
        "runs": f"{own.num_seeds}" + (f", {own.num_failed} failed" if own.num_failed else ""),
        "tokens/s (95% interval)": _text(own.tokens_per_s, "{:,.0f}"),
        "speed-up over bf16": _text(own.speedup, "{:.3f}"),
        "peak memory, GiB": _text(own.peak_memory_gib, "{:.1f}"),
        "energy, J per million tokens": _text(own.energy_j_per_million_tokens, "{:,.0f}"),
        "time to bf16's final loss, s": _text(own.time_to_reference_loss_s, "{:,.1f}"),
        "eval loss, nats/token": _text(statistics.mean(own.eval_loss.values()) if own.eval_loss else None, "{:.4f}"),
        "gap to bf16, nats/token": _text(gap.interval if gap else None, "{:+.4f}"),
        "exact match, %": match,
        "certificate": ": ".join([certificate.state, *filter(None, ["; ".join(certificate.reasons)])]),
    }


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print verdicts, figures, failures and differences on a console that takes words without markup."""
    for verdict in comparison.verdicts.values():
        console.print(f"[{verdict.conclusion}] {' '.join(verdict.sentences)}")
    table = Table("", *(own.name for own in comparison.variants))
    columns = [figure_rows(own) for own in comparison.variants]
    for title in columns[0]:
        table.add_row(title, *(column[title] for column in columns))
    console.print(table)
    for failure in comparison.failures:
        console.print(f"FAILED {failure.variant} seed {failure.seed}: {failure.reason} ({failure.log})")
    for difference in comparison.differences:
        values = "; ".join(f"{value} ({', '.join(labels)})" for value, labels in difference.values.items())
        console.print(f"differs [{difference.effect}] {difference.field}: {values}")
