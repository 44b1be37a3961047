"""A comparison as one value that JSON can hold, as a table on the terminal, and as one HTML page that loads nothing and
runs no script: words, tables, and charts as SVG.
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
    """A run that did not finish."""

    variant: str
    seed: int
    reason: str
    log: str


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
    in_order = sorted(runs, key=lambda run: (run.variant != REFERENCE, run.seed))
    differences = find_differences(runs)
    by_name: dict[str, list[RunRecord]] = {}
    for run in in_order:
        by_name.setdefault(run.variant, []).append(run)
    failed = Counter(failure.variant for failure in failures)
    names = sorted({**by_name, **failed}, key=lambda name: name != REFERENCE)
    reference = by_name.get(REFERENCE, [])
    figures = [variant_figures(name, by_name.get(name, []), reference, failed[name]) for name in names]
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


def speed_bars(comparison: Comparison) -> list[dict[str, Any]]:
    """A bar and its whisker for each variant with a speed, as places in percent of the drawing's width."""
    found = [(style, own, own.tokens_per_s) for style, own in enumerate(comparison.variants) if own.tokens_per_s]
    longest = max((speed.high or speed.value for *_, speed in found), default=1.0)
    bars = []
    for style, own, speed in found:
        verdict = comparison.verdicts[own.variant]
        bar = {"style": style, "name": own.name, "text": speed.describe("{:,.0f} tokens/s")}
        bar |= {"note": f"{verdict.conclusion}, quality: {verdict.quality}", "length": 100 * speed.value / longest}
        bar["is_doubtful"] = verdict.quality in ("worse", "not shown")
        bar["whisker"] = [100 * max(end, 0) / longest for end in (speed.low, speed.high) if end is not None]
        bars.append(bar)
    return bars


def line_chart(comparison: Comparison, key: str, title: str) -> dict[str, Any] | None:
    """The losses under `key` by step: a polyline per run, in thousandths from the top left; None without two steps.
    The training loss is a trailing mean.
    """
    styles = {own.variant: number for number, own in enumerate(comparison.variants)}
    curves = []
    for curve in comparison.curves:
        steps, losses = [step for step, _ in curve[key]], [loss for _, loss in curve[key]]
        window = len(losses) // 20 + 1 if key == "loss" else 1
        means = [fmean(losses[max(0, at - window) : at]) for at in range(1, len(losses) + 1)]
        places = [(step, mean) for step, mean in zip(steps, means, strict=True) if math.isfinite(mean)]
        curves.append((styles[curve["variant"]], f"{curve['variant']}, seed {curve['seed']}", places))
    points = [place for *_, places in curves for place in places]
    if len({step for step, _ in points}) < 2:
        return None
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*points, strict=True))
    across, up = 1000 / (right - left), 1000 / (high - low or 1)
    lines = [
        (style, name, " ".join(f"{(step - left) * across:.0f},{(high - loss) * up:.0f}" for step, loss in places))
        for style, name, places in curves
    ]
    ends = {"x_ends": (f"step {left:.0f}", f"step {right:.0f}"), "y_ends": (f"{low:.3f}", f"{high:.3f}")}
    return {"title": title, "lines": lines, **ends}


def without_folders(text: Any) -> Any:
    """`text` with the last part alone of each absolute path: the page may be sent to others."""
    return re.sub(r"(?<![\w.:/<])~?/(?=\S)(?:[^\s/'\",;]+/)*", "", text) if type(text) is str else text


def render_page(comparison: Comparison) -> str:
    """The whole page."""
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
