"""A comparison as one value for JSON, as a table on the terminal, and as one HTML page with tables and SVG charts. The
page loads no other file and runs no script.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console
from rich.table import Table

from llm_fp8.tools.compare.figures import Difference, VariantFigures, find_differences, variant_figures
from llm_fp8.tools.compare.run_record import REFERENCE, RunRecord
from llm_fp8.tools.compare.statistics import Interval
from llm_fp8.tools.compare.verdict import QUALITY_MARGIN, Verdict, judge
from llm_fp8.utils.errors import UserError

ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class Failure:
    variant: str
    seed: int
    reason: str
    log: str


@dataclass(frozen=True)
class Comparison:
    """The content of comparison.json; the reference comes first."""

    variants: list[VariantFigures]
    verdicts: dict[str, Verdict]
    differences: list[Difference]
    failures: list[Failure]
    curves: list[dict[str, Any]]  # the variant, seed, losses and eval losses of each run, as (step, loss)
    runs: dict[str, str]  # label of a run -> its folder or W&B path
    provenance: dict[str, Any]  # the provenance of the first run; `differences` holds what differs in others
    quality_margin: float


def compare(
    runs: Sequence[RunRecord], failures: Sequence[Failure] = (), quality_margin: float = QUALITY_MARGIN
) -> Comparison:
    """Compare one or more finished runs. Raises `UserError` for two runs of the same variant and seed."""
    sources: dict[str, str] = {}
    for run in runs:
        if run.label in sources:
            raise UserError(f"{sources[run.label]} and {run.source} are both {run.label}; give one of them.")
        sources[run.label] = run.source
    in_order = sorted(runs, key=lambda run: (run.variant != REFERENCE, run.seed))
    differences = find_differences(runs)
    by_variant: dict[str, list[RunRecord]] = {}
    for run in in_order:
        by_variant.setdefault(run.variant, []).append(run)
    num_failed = Counter(failure.variant for failure in failures)
    variants = sorted({**by_variant, **num_failed}, key=lambda variant: variant != REFERENCE)
    reference = by_variant.get(REFERENCE, [])
    figures = [variant_figures(name, by_variant.get(name, []), reference, num_failed[name]) for name in variants]
    baseline = figures[0] if figures[0].variant == REFERENCE else None
    curves = []
    for run in in_order:
        losses = {"loss": run.steps, "eval_loss": run.evaluations}
        points = {key: [(entry["step"], entry[key]) for entry in entries] for key, entries in losses.items()}
        curves.append({"variant": run.variant, "seed": run.seed, **points})
    return Comparison(
        variants=figures,
        verdicts={own.variant: judge(own, baseline, differences, quality_margin) for own in figures},
        differences=differences,
        failures=list(failures),
        curves=curves,
        runs=sources,
        provenance={**runs[0].stored["provenance"], **runs[0].stored["model"]},
        quality_margin=quality_margin,
    )


def _text(value: Interval | float | None, shape: str) -> str:
    if isinstance(value, Interval):
        return value.describe(shape)
    return "-" if value is None else shape.format(value)


def figure_rows(own: VariantFigures) -> dict[str, str]:
    """Title with unit -> text, for the figures of a variant."""
    gap, answers, certificate = own.loss_gap, own.answers, own.certificate
    match = _text(own.exact_match and 100 * own.exact_match, "{:.1f}")
    if answers is not None:
        match += f" ({100 * answers.difference:+.1f}, p = {answers.p_value:.2g}, {answers.num_problems} answers)"
    return {
        "ran": " and ".join(own.effective) + (" (fell back)" if own.fallback_reasons else ""),
        "runs": f"{len(own.seeds)}" + (f", {own.num_failed} failed" if own.num_failed else ""),
        "tokens/s (95% interval)": _text(own.tokens_per_s, "{:,.0f}"),
        "speed-up over bf16": _text(own.speedup, "{:.3f}"),
        "peak memory, GiB": _text(own.peak_memory_gib, "{:.1f}"),
        "energy, J per million tokens": _text(own.energy_j_per_million_tokens, "{:,.0f}"),
        "time to bf16's final loss, s": _text(own.time_to_reference_loss_s, "{:,.1f}"),
        "eval loss, nats/token": _text(fmean(own.eval_loss.values()) if own.eval_loss else None, "{:.4f}"),
        "gap to bf16, nats/token": _text(gap, "{:+.4f}"),
        "exact match, %": match,
        "certificate": ": ".join([certificate.state, *filter(None, ["; ".join(certificate.reasons)])]),
    }


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print verdicts, figures, failures and differences on a console without markup."""
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


def speed_bars(comparison: Comparison) -> list[dict[str, Any]]:
    """A bar and its whisker for each variant with a speed; lengths are in percent of the drawing's width."""
    measured = [(style, own, own.tokens_per_s) for style, own in enumerate(comparison.variants) if own.tokens_per_s]
    longest = max((speed.high or speed.value for *_, speed in measured), default=1.0)
    bars = []
    for style, own, speed in measured:
        verdict = comparison.verdicts[own.variant]
        bar = {
            "style": style,
            "name": own.name,
            "text": speed.describe("{:,.0f} tokens/s"),
            "note": f"{verdict.conclusion}, quality: {verdict.quality}",
            "length": 100 * speed.value / longest,
            "is_doubtful": verdict.quality in ("worse", "not shown"),
            "whisker": [100 * max(end, 0) / longest for end in (speed.low, speed.high) if end is not None],
        }
        bars.append(bar)
    return bars


def line_chart(comparison: Comparison, key: str, title: str) -> dict[str, Any] | None:
    """A chart of the losses under `key` by step, with a polyline per run in thousandths from the top left; None with
    fewer than two steps. The training loss is a trailing mean.
    """
    styles = {own.variant: number for number, own in enumerate(comparison.variants)}
    curves = []
    for curve in comparison.curves:
        losses = [loss for _, loss in curve[key]]
        window = len(losses) // 20 + 1 if key == "loss" else 1
        means = [(step, fmean(losses[max(0, n - window) : n])) for n, (step, _) in enumerate(curve[key], start=1)]
        points = [(step, mean) for step, mean in means if math.isfinite(mean)]
        curves.append((styles[curve["variant"]], f"{curve['variant']}, seed {curve['seed']}", points))
    all_points = [point for *_, points in curves for point in points]
    if len({step for step, _ in all_points}) < 2:
        return None
    steps, values = zip(*all_points, strict=True)
    first, last = min(steps), max(steps)
    low, high = min(values), max(values)
    x_scale = 1000 / (last - first)
    y_scale = 1000 / (high - low or 1)
    lines = [
        (
            style,
            name,
            " ".join(f"{(step - first) * x_scale:.0f},{(high - loss) * y_scale:.0f}" for step, loss in points),
        )
        for style, name, points in curves
    ]
    ends = {"x_ends": (f"step {first:.0f}", f"step {last:.0f}"), "y_ends": (f"{low:.3f}", f"{high:.3f}")}
    return {"title": title, "lines": lines, **ends}


def without_folders(text: Any) -> Any:
    """`text` with absolute paths cut to their last part, since the page may be sent to others."""
    return re.sub(r"(?<![\w.:/<])~?/(?=\S)(?:[^\s/'\",;]+/)*", "", text) if type(text) is str else text


def render_page(comparison: Comparison) -> str:
    environment = Environment(
        loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, finalize=without_folders
    )
    titles = {"eval_loss": "Eval loss by step", "loss": "Training loss by step, trailing mean over a twentieth of them"}
    charts = [line_chart(comparison, key, title) for key, title in titles.items()]
    return environment.get_template("page.html").render(
        comparison=comparison,
        provenance=comparison.provenance,
        columns=[figure_rows(own) for own in comparison.variants],
        speed=speed_bars(comparison),
        lines=[chart for chart in charts if chart],
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
    )
