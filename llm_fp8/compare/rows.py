"""The table of a comparison as text: one row per arm, the same on the terminal and on the page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llm_fp8.compare.arms import REFERENCE
from llm_fp8.compare.figures import ArmFigures

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Column:
    """A figure: its title with unit, how it is computed, and its text for an arm."""

    title: str
    how: str
    text: Callable[[ArmFigures], str]


def _arm(arm: ArmFigures) -> str:
    return arm.name + (f" with {', '.join(f'{k}={v}' for k, v in arm.options.items())}" if arm.options else "")


def _effective(arm: ArmFigures) -> str:
    ran = " and ".join(arm.effective) or "nothing"
    return f"{ran} (fell back)" if arm.fallback_reasons else ran


def _runs(arm: ArmFigures) -> str:
    return f"{arm.num_seeds}" + (f", {arm.num_failed} failed" if arm.num_failed else "")


def _rate(arm: ArmFigures) -> str:
    rate = arm.tokens_per_s
    return f"{rate.value:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})" if rate else NOT_MEASURED


def _speedup(arm: ArmFigures) -> str:
    if arm.arm == REFERENCE:
        return "1"
    return f"{arm.speedup.value:.3f} ({arm.speedup.low:.3f} to {arm.speedup.high:.3f})" if arm.speedup else NOT_MEASURED


def _memory(arm: ArmFigures) -> str:
    return NOT_MEASURED if arm.peak_memory_gib is None else f"{arm.peak_memory_gib:.1f}"


def _energy(arm: ArmFigures) -> str:
    energy = arm.energy_j_per_million_tokens
    return NOT_MEASURED if energy is None else f"{energy:,.0f}"


def _eval_loss(arm: ArmFigures) -> str:
    return f"{statistics.mean(arm.eval_loss.values()):.4f}" if arm.eval_loss else NOT_MEASURED


def _gap(arm: ArmFigures) -> str:
    if arm.arm == REFERENCE:
        values = arm.eval_loss.values()
        return f"spread {max(values) - min(values):.4f}" if len(values) > 1 else "spread unknown"
    gap = arm.loss_gap
    if gap is None:
        return NOT_MEASURED
    spread = "unknown" if gap.reference_spread is None else f"{gap.reference_spread:.4f}"
    seeds = f"{min(gap.by_seed.values()):+.4f} to {max(gap.by_seed.values()):+.4f} by seed; " if len(gap.by_seed) > 1 else ""
    return f"{gap.mean:+.4f} ({seeds}spread of bf16 {spread})"


def _equal_loss(arm: ArmFigures) -> str:
    equal = arm.equal_loss_time
    if equal is None:
        return NOT_MEASURED
    reached = [value for value in equal.by_seed_s.values() if value is not None]
    words = f"{statistics.mean(reached):,.1f}" if reached else "never"
    missed = len(equal.by_seed_s) - len(reached)
    not_all = f" in {len(reached)} of {len(equal.by_seed_s)} seeds" if reached and missed else ""
    return f"{words}{not_all} ({equal.loss} loss)"


def _exact_match(arm: ArmFigures) -> str:
    if not arm.exact_match:
        return NOT_MEASURED
    share = f"{100 * statistics.mean(arm.exact_match.values()):.1f}"
    if arm.answers is None:
        return share
    return f"{share} ({100 * arm.answers.difference:+.1f}, p = {arm.answers.p_value:.2g}, {arm.answers.num_problems} pairs)"


def _certificate(arm: ArmFigures) -> str:
    reasons = f": {'; '.join(arm.certificate.reasons)}" if arm.certificate.reasons else ""
    return f"{'none' if arm.certificate.state == 'missing' else arm.certificate.state}{reasons}"


COLUMNS = (
    Column("arm", "What was asked for; fp8 options that are not at their default stand beside it.", _arm),
    Column("ran", "The precision that was in effect, from run.json.", _effective),
    Column("runs", "Finished runs, one per seed.", _runs),
    Column(
        "tokens/s (95% interval)",
        "Median over the steps of a run, its first ten left out (half of a run of fewer than twenty) and the one whose kernels were recorded; "
        "mean over runs. All positions, padding included, on all GPUs. In brackets the 95% bootstrap interval over seeds and, in blocks of ten, over steps.",
        _rate,
    ),
    Column(
        "speed-up over bf16 (95% interval)",
        "Quotient of the two arms' tokens/s, with its bootstrap interval; runs of the same seed are drawn together. With one seed the interval "
        "covers the steps of that run alone.",
        _speedup,
    ),
    Column(
        "peak memory, GiB",
        "Most memory that tensors held on any GPU in any run of the arm; with exact match up to the first evaluation, whose copy of the model "
        "would count.",
        _memory,
    ),
    Column(
        "energy, J per million tokens",
        "From the GPUs' own counters, training steps alone: median over steps, mean over runs. The host's consumption is not in it.",
        _energy,
    ),
    Column("held-out loss, nats/token", "Mean over seeds of the loss on held-out rows after the last step.", _eval_loss),
    Column(
        "gap to bf16, nats/token",
        "Mean over seeds of the difference to the bf16 run of the same seed; in brackets the smallest and the largest. The spread is the largest minus the smallest final loss of the "
        "bf16 seeds: a gap inside it is no more than another seed does.",
        _gap,
    ),
    Column(
        "time to bf16's final loss, s",
        "Seconds of training until the loss is first at or below the one that the bf16 run of the same seed ends with; mean over seeds. From the "
        "held-out loss where it was evaluated more than once, else from the training loss (trailing mean over a twentieth of the steps). "
        "Evaluations, checkpoints and start-up are left out.",
        _equal_loss,
    ),
    Column(
        "exact match, %",
        "Held-out problems answered right; in brackets the difference to bf16 in points, with McNemar's exact test on the same problems, "
        "pooled over seeds.",
        _exact_match,
    ),
    Column(
        "certificate", "Whether each run carries the proof, from its recorded kernels, that it computed as asked.", _certificate
    ),
)


def table_rows(arms: Sequence[ArmFigures]) -> list[list[str]]:
    """Texts of all columns, one row per arm."""
    return [[column.text(arm) for column in COLUMNS] for arm in arms]
