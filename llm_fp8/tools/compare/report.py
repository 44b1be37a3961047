"""Runs, failures and remarks of a comparison put together as one value, which JSON can hold and every output is made
from.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from rich.console import Console
from rich.table import Table

from llm_fp8.tools.compare.arms import REFERENCE, describe_variant
from llm_fp8.tools.compare.differences import Difference, find_differences, label
from llm_fp8.tools.compare.figures import VariantFigures, smoothing_window, variant_figures
from llm_fp8.tools.compare.run_record import RunRecord
from llm_fp8.tools.compare.statistics import trailing_mean
from llm_fp8.tools.compare.verdict import Verdict, judge
from llm_fp8.utils.errors import UserError

MAX_CURVE_POINTS = 600
"""Points of a curve that the report keeps; of longer runs each point is the mean of as many steps as it takes."""


@dataclass(frozen=True)
class Failure:
    """A run that did not finish."""

    arm: str
    seed: int
    reason: str
    log: str


@dataclass(frozen=True)
class Comparison:
    """The whole comparison. `arms` in the order of the report, the reference first; `verdicts` with the reference
    last.
    """

    arms: list[VariantFigures]
    verdicts: dict[str, Verdict]
    differences: list[Difference]
    failures: list[Failure]
    curves: list[dict[str, Any]]
    provenance: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)


def compare(
    runs: Sequence[RunRecord],
    failures: Sequence[Failure] = (),
    overlaps: Sequence[tuple[str, str]] = (),
    arm_order: Sequence[str] = (),
) -> Comparison:
    """Compare finished runs. Raises `UserError` where two runs are of the same arm and seed, or there is no run at
    all.
    """
    if not runs:
        raise UserError("no run finished, so there is nothing to compare.")
    seen: dict[str, str] = {}
    for run in runs:
        if label(run) in seen:
            raise UserError(
                f"{seen[label(run)]} and {run.source} are both {label(run)}; give one of them, or runs with different "
                "--seed."
            )
        seen[label(run)] = run.source
    present = {run.arm for run in runs} | {failure.arm for failure in failures}
    ordered = [arm for arm in arm_order if arm in present] + sorted(present - set(arm_order))
    ordered.sort(key=lambda arm: arm != REFERENCE)
    by_arm = {arm: sorted((run for run in runs if run.arm == arm), key=lambda run: run.seed) for arm in ordered}
    reference = by_arm.get(REFERENCE, [])
    differences = find_differences(runs, overlaps)
    figures = [
        variant_figures(arm, own, reference, num_failed=sum(failure.arm == arm for failure in failures))
        for arm, own in by_arm.items()
    ]
    held_against = next((arm for arm in figures if arm.arm == REFERENCE), None)
    return Comparison(
        arms=figures,
        verdicts={
            arm.arm: judge(arm, held_against, differences)
            for arm in sorted(figures, key=lambda arm: arm.arm == REFERENCE)
        },
        differences=differences,
        failures=list(failures),
        curves=[_curves(run) for own in by_arm.values() for run in own],
        provenance=_provenance(runs),
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
    }


def _curves(run: RunRecord) -> dict[str, Any]:
    """One run's curves, thinned to at most `MAX_CURVE_POINTS`: means of groups of consecutive steps, at the group's
    last step.
    """
    window = smoothing_window(len(run.steps))
    group = -(-len(run.steps) // MAX_CURVE_POINTS)
    last = [min(start + group, len(run.steps)) - 1 for start in range(0, len(run.steps), group)]
    smooth = trailing_mean([step["loss"] for step in run.steps], window)
    rates = trailing_mean([step.get("tokens_per_s", float("nan")) for step in run.steps], group)
    times, tokens = run.wall_times_s, run.token_trace
    position = {step["step"]: index for index, step in enumerate(run.steps)}
    evaluated = [record for record in run.evaluations if record["step"] in position]
    at = [position[record["step"]] for record in evaluated]
    return {
        "arm": run.arm,
        "name": describe_variant(run.arm),
        "seed": run.seed,
        "smoothed_over_steps": window,
        "grouped_steps": group,
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


# --- rows ------------------------------------------------------------------------------------------------
# The table of a comparison as text: one row per arm, the same on the terminal and on the page.

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Column:
    """A figure: its title with unit, how it is computed, and its text for an arm."""

    title: str
    how: str
    text: Callable[[VariantFigures], str]


def _arm(arm: VariantFigures) -> str:
    return arm.name + (f" with {', '.join(f'{k}={v}' for k, v in arm.options.items())}" if arm.options else "")


def _effective(arm: VariantFigures) -> str:
    ran = " and ".join(arm.effective) or "nothing"
    return f"{ran} (fell back)" if arm.fallback_reasons else ran


def _runs(arm: VariantFigures) -> str:
    return f"{arm.num_seeds}" + (f", {arm.num_failed} failed" if arm.num_failed else "")


def _rate(arm: VariantFigures) -> str:
    rate = arm.tokens_per_s
    return f"{rate.value:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})" if rate else NOT_MEASURED


def _speedup(arm: VariantFigures) -> str:
    if arm.arm == REFERENCE:
        return "1"
    return f"{arm.speedup.value:.3f} ({arm.speedup.low:.3f} to {arm.speedup.high:.3f})" if arm.speedup else NOT_MEASURED


def _memory(arm: VariantFigures) -> str:
    return NOT_MEASURED if arm.peak_memory_gib is None else f"{arm.peak_memory_gib:.1f}"


def _energy(arm: VariantFigures) -> str:
    energy = arm.energy_j_per_million_tokens
    return NOT_MEASURED if energy is None else f"{energy:,.0f}"


def _eval_loss(arm: VariantFigures) -> str:
    return f"{statistics.mean(arm.eval_loss.values()):.4f}" if arm.eval_loss else NOT_MEASURED


def _gap(arm: VariantFigures) -> str:
    if arm.arm == REFERENCE:
        values = arm.eval_loss.values()
        return f"spread {max(values) - min(values):.4f}" if len(values) > 1 else "spread unknown"
    gap = arm.loss_gap
    if gap is None:
        return NOT_MEASURED
    spread = "unknown" if gap.reference_spread is None else f"{gap.reference_spread:.4f}"
    seeds = (
        f"{min(gap.by_seed.values()):+.4f} to {max(gap.by_seed.values()):+.4f} by seed; "
        if len(gap.by_seed) > 1
        else ""
    )
    return f"{gap.mean:+.4f} ({seeds}spread of bf16 {spread})"


def _equal_loss(arm: VariantFigures) -> str:
    equal = arm.equal_loss_time
    if equal is None:
        return NOT_MEASURED
    reached = [value for value in equal.by_seed_s.values() if value is not None]
    words = f"{statistics.mean(reached):,.1f}" if reached else "never"
    missed = len(equal.by_seed_s) - len(reached)
    not_all = f" in {len(reached)} of {len(equal.by_seed_s)} seeds" if reached and missed else ""
    return f"{words}{not_all} ({equal.loss} loss)"


def _exact_match(arm: VariantFigures) -> str:
    if not arm.exact_match:
        return NOT_MEASURED
    share = f"{100 * statistics.mean(arm.exact_match.values()):.1f}"
    if arm.answers is None:
        return share
    return (
        f"{share} ({100 * arm.answers.difference:+.1f}, p = {arm.answers.p_value:.2g}, {arm.answers.num_problems} "
        "pairs)"
    )


def _certificate(arm: VariantFigures) -> str:
    reasons = f": {'; '.join(arm.certificate.reasons)}" if arm.certificate.reasons else ""
    return f"{'none' if arm.certificate.state == 'missing' else arm.certificate.state}{reasons}"


COLUMNS = (
    Column("arm", "What was asked for; fp8 options that are not at their default stand beside it.", _arm),
    Column("ran", "The precision that was in effect, from run.json.", _effective),
    Column("runs", "Finished runs, one per seed.", _runs),
    Column(
        "tokens/s (95% interval)",
        "Median over the steps of a run, its first ten left out (half of a run of fewer than twenty) and the one "
        "whose kernels were recorded; mean over runs. All positions, padding included, on all GPUs. In brackets the "
        "95% bootstrap interval over seeds and, in blocks of ten, over steps.",
        _rate,
    ),
    Column(
        "speed-up over bf16 (95% interval)",
        "Quotient of the two arms' tokens/s, with its bootstrap interval; runs of the same seed are drawn together. "
        "With one seed the interval covers the steps of that run alone.",
        _speedup,
    ),
    Column(
        "peak memory, GiB",
        "Most memory that tensors held on any GPU in any run of the arm; with exact match up to the first evaluation, "
        "whose copy of the model would count.",
        _memory,
    ),
    Column(
        "energy, J per million tokens",
        "From the GPUs' own counters, training steps alone: median over steps, mean over runs. The host's consumption "
        "is not in it.",
        _energy,
    ),
    Column(
        "held-out loss, nats/token", "Mean over seeds of the loss on held-out rows after the last step.", _eval_loss
    ),
    Column(
        "gap to bf16, nats/token",
        "Mean over seeds of the difference to the bf16 run of the same seed; in brackets the smallest and the "
        "largest. The spread is the largest minus the smallest final loss of the bf16 seeds: a gap inside it is no "
        "more than another seed does.",
        _gap,
    ),
    Column(
        "time to bf16's final loss, s",
        "Seconds of training until the loss is first at or below the one that the bf16 run of the same seed ends "
        "with; mean over seeds. From the held-out loss where it was evaluated more than once, else from the training "
        "loss (trailing mean over a twentieth of the steps). Evaluations, checkpoints and start-up are left out.",
        _equal_loss,
    ),
    Column(
        "exact match, %",
        "Held-out problems answered right; in brackets the difference to bf16 in points, with McNemar's exact test on "
        "the same problems, pooled over seeds.",
        _exact_match,
    ),
    Column(
        "certificate",
        "Whether each run carries the proof, from its recorded kernels, that it computed as asked.",
        _certificate,
    ),
)


def table_rows(arms: Sequence[VariantFigures]) -> list[list[str]]:
    """Texts of all columns, one row per arm."""
    return [[column.text(arm) for column in COLUMNS] for arm in arms]


# --- text ------------------------------------------------------------------------------------------------
# A comparison on a terminal.


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Verdicts, table, failures and flags."""
    for verdict in comparison.verdicts.values():
        console.print(f"[{verdict.conclusion}] {verdict.sentence}", markup=False, highlight=False)
    console.print()
    # Figures down, arms across: a table of ten columns does not fit a terminal.
    table = Table("", *(arm.name for arm in comparison.arms))
    rows = table_rows(comparison.arms)
    for number, column in enumerate(COLUMNS[1:], start=1):
        table.add_row(column.title, *(row[number] for row in rows))
    console.print(table, highlight=False, markup=False)
    for failure in comparison.failures:
        console.print(
            f"FAILED {failure.arm} seed {failure.seed}: {failure.reason} ({failure.log})", markup=False, highlight=False
        )
    for difference in comparison.differences:
        values = "; ".join(f"{value} ({', '.join(labels)})" for value, labels in difference.values.items())
        console.print(f"flag [{difference.effect}] {difference.field}: {values}", markup=False, highlight=False)
