"""A comparison as one value that JSON can hold, and its table: one row per variant, on the terminal and on the page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from rich.console import Console
from rich.table import Table

from llm_fp8.tools.compare.differences import Difference, find_differences, label
from llm_fp8.tools.compare.figures import VariantFigures, smoothing_window, variant_figures
from llm_fp8.tools.compare.run_record import RunRecord
from llm_fp8.tools.compare.statistics import Interval, trailing_mean
from llm_fp8.tools.compare.variants import REFERENCE, describe_variant
from llm_fp8.tools.compare.verdict import QUALITY_MARGIN, Verdict, is_fp8, judge
from llm_fp8.utils.errors import UserError

MAX_CURVE_POINTS = 600
"""Points of a curve that the report keeps; of longer runs a point is the mean of several steps."""


@dataclass(frozen=True)
class Failure:
    """A run that did not finish."""

    arm: str
    seed: int
    reason: str
    log: str


@dataclass(frozen=True)
class Comparison:
    """What comparison.json holds; there a variant is called an arm. `arms` has the reference first, `verdicts` last."""

    arms: list[VariantFigures]
    verdicts: dict[str, Verdict]
    differences: list[Difference]
    failures: list[Failure]
    curves: list[dict[str, Any]]
    provenance: dict[str, Any]
    quality_margin: float


def compare(
    runs: Sequence[RunRecord],
    failures: Sequence[Failure] = (),
    overlaps: Sequence[tuple[str, str]] = (),
    variant_order: Sequence[str] = (),
    quality_margin: float = QUALITY_MARGIN,
) -> Comparison:
    """Compare finished runs, at least one. Raises `UserError` for two of the same variant and seed."""
    seen: dict[str, str] = {}
    for run in runs:
        if label(run) in seen:
            raise UserError(
                f"{seen[label(run)]} and {run.source} are of the same variant and seed ({label(run)}); give one of "
                "them, or runs with different --seed."
            )
        seen[label(run)] = run.source
    present = {run.variant for run in runs} | {failure.arm for failure in failures}
    ordered = [name for name in dict.fromkeys([REFERENCE, *variant_order, *sorted(present)]) if name in present]
    by_variant = {
        name: sorted((run for run in runs if run.variant == name), key=lambda run: run.seed) for name in ordered
    }
    reference = by_variant.get(REFERENCE, [])
    differences = find_differences(runs, overlaps)
    figures = [
        variant_figures(variant, own, reference, num_failed=sum(failure.arm == variant for failure in failures))
        for variant, own in by_variant.items()
    ]
    baseline = next((variant for variant in figures if variant.arm == REFERENCE), None)
    return Comparison(
        arms=figures,
        verdicts={
            variant.arm: judge(variant, baseline, differences, quality_margin)
            for variant in sorted(figures, key=lambda variant: variant.arm == REFERENCE)
        },
        differences=differences,
        failures=list(failures),
        curves=[_curves(run) for own in by_variant.values() for run in own],
        provenance=_provenance(runs),
        quality_margin=quality_margin,
    )


def _provenance(runs: Sequence[RunRecord]) -> dict[str, Any]:
    first = next((run for run in runs if run.provenance), None)
    return {
        "made_utc": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "runs": {label(run): run.source for run in runs},
        "of_first_run": {} if first is None else first.provenance,
        "model": next((run.config["model"].get("model_name") for run in runs if "model" in run.config), None),
        "dataset": next((run.config["data"].get("dataset_name") for run in runs if "data" in run.config), None),
        "num_steps": max(len(run.steps) for run in runs),
        "tokens_seen": max((run.token_trace[-1] for run in runs if run.token_trace), default=None),
        "random_weights": bool(runs[0].config.get("model", {}).get("random_init")),
        "num_parameters": runs[0].model.get("num_parameters"),
        "global_batch_size": runs[0].effective.get("global_batch_size"),
        "max_seq_length": runs[0].config.get("data", {}).get("max_seq_length"),
    }


def _curves(run: RunRecord) -> dict[str, Any]:
    """One run's curves: means of groups of consecutive steps, at each group's last step."""
    group = -(-len(run.steps) // MAX_CURVE_POINTS)
    last = [min(start + group, len(run.steps)) - 1 for start in range(0, len(run.steps), group)]
    smooth = trailing_mean([step["loss"] for step in run.steps], smoothing_window(len(run.steps)))
    rates = trailing_mean([step.get("tokens_per_s", float("nan")) for step in run.steps], group)
    times, tokens = run.wall_times_s, run.token_trace
    position = {step["step"]: index for index, step in enumerate(run.steps)}
    evaluated = [record for record in run.evaluations if record["step"] in position]
    at = [position[record["step"]] for record in evaluated]
    return {
        "arm": run.variant,
        "name": describe_variant(run.variant),
        "seed": run.seed,
        "step": [run.steps[i]["step"] for i in last],
        "tokens": [tokens[i] for i in last] if tokens else [],
        "wall_time_s": [times[i] for i in last],
        "loss": [smooth[i] for i in last],
        "tokens_per_s": [rates[i] for i in last],
        "evaluation": {
            "step": [record["step"] for record in evaluated],
            "tokens": [tokens[i] for i in at] if tokens else [],
            "wall_time_s": [times[i] for i in at],
            "loss": [record["eval_loss"] for record in evaluated],
        },
    }


NOT_MEASURED, NOT_APPLICABLE = "not measured", "not applicable"


@dataclass(frozen=True)
class Column:
    """A figure: its title with unit, how it is computed, and its text for a variant."""

    title: str
    how: str
    text: Callable[[VariantFigures], str]


def _variant(own: VariantFigures) -> str:
    return own.name + (f" with {', '.join(f'{k}={v}' for k, v in own.options.items())}" if own.options else "")


def _effective(own: VariantFigures) -> str:
    ran = " and ".join(own.effective) or "nothing"
    return f"{ran} (fell back)" if own.fallback_reasons else ran


def _interval(found: Interval | None, shape: str) -> str:
    return found.describe(shape) if found else NOT_MEASURED


def _number(value: float | None, shape: str) -> str:
    return _interval(None if value is None else Interval(value, None, None), shape)


def _gap(own: VariantFigures) -> str:
    gap = own.loss_gap
    if own.arm == REFERENCE:
        return "0"
    return _interval(Interval(gap.mean, gap.low, gap.high) if gap else None, "{:+.4f}")


def _equal_loss(own: VariantFigures) -> str:
    equal = own.equal_loss_time
    if equal is None:
        return NOT_MEASURED
    reached = [value for value in equal.by_seed_s.values() if value is not None]
    words = f"{statistics.mean(reached):,.1f}" if reached else "never"
    if 0 < len(reached) < len(equal.by_seed_s):
        words += f" in {len(reached)} of {len(equal.by_seed_s)} seeds"
    return f"{words} ({'eval' if equal.loss == 'held-out' else equal.loss} loss)"


def _exact_match(own: VariantFigures) -> str:
    if not own.exact_match:
        return NOT_MEASURED
    share = f"{100 * statistics.mean(own.exact_match.values()):.1f}"
    if own.answers is None:
        return share
    answers = own.answers
    return f"{share} ({100 * answers.difference:+.1f}, p = {answers.p_value:.2g}, {answers.num_problems} answers)"


def _certificate(own: VariantFigures) -> str:
    if own.certificate.state == "missing" and not is_fp8(own):
        return NOT_APPLICABLE
    return ": ".join([own.certificate.state, *filter(None, ["; ".join(own.certificate.reasons)])])


COLUMNS = (
    Column("variant", "What was asked for; fp8 options that are not at their default stand beside it.", _variant),
    Column("ran", "The precision that was in effect, from run.json.", _effective),
    Column(
        "runs",
        "Finished runs, one per seed.",
        lambda own: f"{own.num_seeds}" + (f", {own.num_failed} failed" if own.num_failed else ""),
    ),
    Column(
        "tokens/s (95% interval)",
        "Median over the steps of a run, its first ten left out (half of a run of fewer than twenty) and the one "
        "whose kernels were recorded; mean over runs. All positions, padding included, on all GPUs. In "
        "brackets Student's t interval over runs; one run has none.",
        lambda own: _interval(own.tokens_per_s, "{:,.0f}"),
    ),
    Column(
        "speed-up over bf16 (95% interval)",
        "Quotient of the two variants' tokens/s, with Student's t interval over the quotients by seed (Welch's where "
        "the seeds differ). One seed has none.",
        lambda own: "1" if own.arm == REFERENCE else _interval(own.speedup, "{:.3f}"),
    ),
    Column(
        "peak memory, GiB",
        "Most memory that tensors held on any GPU in any run of the variant; with exact match up to the first "
        "evaluation, whose copy of the model would count.",
        lambda own: _number(own.peak_memory_gib, "{:.1f}"),
    ),
    Column(
        "energy, J per million tokens",
        "From the GPUs' own counters, training steps alone: median over steps, mean over runs. The host's consumption "
        "is not in it.",
        lambda own: _number(own.energy_j_per_million_tokens, "{:,.0f}"),
    ),
    Column(
        "eval loss, nats/token",
        "Mean over seeds of the loss on the eval sequences after the last step.",
        lambda own: _number(statistics.mean(own.eval_loss.values()) if own.eval_loss else None, "{:.4f}"),
    ),
    Column(
        "gap to bf16, nats/token (95% interval)",
        "Mean over seeds of the difference to the bf16 run of the same seed, with Student's t interval. A variant "
        "passes for as good where the interval lies below the margin (--quality_margin).",
        _gap,
    ),
    Column(
        "time to bf16's final loss, s",
        "Seconds of training until the loss is first at or below the one that the bf16 run of the same seed ends "
        "with; mean over seeds. From the eval loss where it was evaluated more than once, else from the training "
        "loss (trailing mean over a twentieth of the steps). Evaluations, checkpoints and start-up are left out.",
        _equal_loss,
    ),
    Column(
        "exact match, %",
        "Held-out problems answered right; in brackets the difference to bf16 in points, with an exact sign test in "
        "which a problem is one trial, however many seeds answered it.",
        _exact_match,
    ),
    Column(
        "certificate",
        "Whether each run carries the proof, from its recorded kernels, that it computed as asked.",
        _certificate,
    ),
)


def table_rows(variants: Sequence[VariantFigures]) -> list[list[str]]:
    return [[column.text(variant) for column in COLUMNS] for variant in variants]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print it on a console that takes words as they are, without markup."""
    for verdict in comparison.verdicts.values():
        console.print(f"[{verdict.conclusion}] {' '.join(verdict.sentences)}")
    console.print()
    # Figures down, variants across: a table of ten columns does not fit a terminal.
    table = Table("", *(variant.name for variant in comparison.arms))
    rows = table_rows(comparison.arms)
    for number, column in enumerate(COLUMNS[1:], start=1):
        table.add_row(column.title, *(row[number] for row in rows))
    console.print(table)
    for failure in comparison.failures:
        console.print(f"FAILED {failure.arm} seed {failure.seed}: {failure.reason} ({failure.log})")
    for difference in comparison.differences:
        values = "; ".join(f"{value} ({', '.join(labels)})" for value, labels in difference.values.items())
        console.print(f"flag [{difference.effect}] {difference.field}: {values}")
