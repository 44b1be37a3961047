"""Figures of a comparison as charts: what is drawn, with every place in percent of the drawing, so that it fits any
width, and the words beside it. The page's template (assets/page.html) turns them into SVG.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from llm_fp8.tools.compare.differences import concerning
from llm_fp8.tools.compare.figures import VariantFigures
from llm_fp8.tools.compare.report import Comparison
from llm_fp8.tools.compare.statistics import Interval
from llm_fp8.tools.compare.variants import REFERENCE

MAX_INTERVALS = 5


def can_be_drawn(value: float) -> bool:
    """Whether `value` is finite and of a size that a run can have."""
    return abs(value) < 1e15


@dataclass(frozen=True)
class Scale:
    """The range of an axis. It goes below zero only where a value does."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float], from_zero: bool = True) -> Scale:
        """Around the `values` that can be drawn, with a margin of 5%."""
        known = [float(value) for value in values if can_be_drawn(value)] or [0.0]
        low, high = min(known), max(known)
        if from_zero:
            low, high = min(low, 0), max(high, 0)
        largest, spread = max(abs(low), abs(high)), high - low
        margin = (spread if spread > 1e-9 * max(largest, 1e-3) else max(largest, 1)) / 20
        return cls(low - margin if low < 0 else max(low - margin, 0), high + margin)

    def percent(self, value: float) -> float:
        """The place of `value`, from the low end."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)

    def ticks(self) -> list[tuple[float, str]]:
        """Places and labels of round numbers, at most `MAX_INTERVALS` + 1."""
        least = (self.high - self.low) / MAX_INTERVALS
        power = 10.0 ** math.floor(math.log10(least))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
        numbers = range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        unit, suffix = next(((u, s) for u, s in ((1e9, "B"), (1e6, "M")) if self.high >= u), (1, ""))
        digits = max(0, -math.floor(math.log10(step / unit) + 1e-9))
        return [(self.percent(n * step), f"{n * step / unit:,.{digits}f}{suffix}" if n else "0") for n in numbers]


@dataclass(frozen=True)
class Bar:
    """A variant's bar, its whisker and a point for each seed, in percent from the left."""

    arm: str
    name: str
    text: str
    start: float
    length: float
    whisker: tuple[float, float] | None
    points: list[float]
    note: str
    is_doubtful: bool


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars, one per variant; `band`: start and length of what is shaded."""

    title: str
    caption: str
    bars: list[Bar]
    zero: float
    band: tuple[float, float] | None


@dataclass(frozen=True)
class Line:
    """A run's line as SVG polylines of thousandths from the top left, with a gap where a value cannot be drawn; and
    points, in percent, with words.
    """

    arm: str
    name: str
    pieces: list[str]
    points: list[tuple[float, float, str]]


@dataclass(frozen=True)
class LineChart:
    """A line per run."""

    title: str
    caption: str
    x_title: str
    y_title: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[Line]


def speed_chart(comparison: Comparison) -> BarChart:
    """Tokens/s, with what is known of each variant's quality: speed counts at equal quality."""
    caption = "All GPUs. Pale: not shown to learn as well as bf16. Whiskers: 95% interval over seeds."
    title, notes = "Tokens per second at equal quality", {own.arm: _quality(own, comparison) for own in comparison.arms}
    return _bars(comparison, title, "{:,.0f} tokens/s", lambda own: own.tokens_per_s, caption, notes=notes)


def _quality(own: VariantFigures, comparison: Comparison) -> tuple[str, bool]:
    """What stands beside a variant's speed, and whether the speed is of doubtful worth."""
    verdict = comparison.verdicts[own.arm]
    words = [verdict.quality if verdict.quality == "baseline" else f"quality {verdict.quality}"]
    if verdict.conclusion in ("fell back", "not comparable", "not certified"):
        words.insert(0, verdict.conclusion)
    if concerning(comparison.differences, own.arm, "speed"):
        words.insert(0, "speed not comparable")
    elif own.speedup:
        words.insert(0, f"{own.speedup.value:.2f} times bf16")
    return "; ".join(words), verdict.quality in ("worse", "not shown") or verdict.conclusion == "not certified"


def make_charts(comparison: Comparison) -> list[BarChart | LineChart]:
    """All other charts that there is something to draw in."""
    curves, margin, seeds = comparison.curves, comparison.quality_margin, "Bars are means, points seeds."
    rate = (
        "All positions of a step over its time, all GPUs. Start-up and compilation, in the first steps, count nowhere."
    )
    gap = "Eval loss minus that of the bf16 run of the same seed at the same step."
    loss = "Lines: training loss, trailing mean over a twentieth of the steps. Points: eval loss."
    charts: list[BarChart | LineChart] = [
        _bars(
            comparison,
            "Final eval loss gap to bf16",
            "{:+.4f} nats/token",
            lambda own: own.loss_gap.by_seed if own.loss_gap else None,
            f"{seeds} Shaded: the margin, {margin:g}.",
            margin,
        ),
        _bars(
            comparison,
            "Exact match",
            "{:.1f} %",
            lambda own: {seed: 100 * share for seed, share in own.exact_match.items()},
            f"Held-out problems answered right. {seeds}",
        ),
        _bars(comparison, "Peak memory", "{:.1f} GiB", lambda own: own.peak_memory_gib),
        _bars(comparison, "Energy", "{:,.0f} J per million tokens", lambda own: own.energy_j_per_million_tokens),
        _lines(curves, "tokens_per_s", "step", "Tokens per second by step", rate),
        _lines(_gap_curves(curves), "gap", "step", "Eval loss gap to bf16 by step", gap),
        _lines(curves, "loss", "wall_time_s", "Loss by wall time", loss),
        _lines(curves, "loss", "step", "Loss by step", loss),
        _lines([curve for curve in curves if curve["tokens"]], "loss", "tokens", "Loss by tokens", loss),
    ]
    return [chart for chart in charts if (chart.bars if isinstance(chart, BarChart) else chart.lines)]


def _bars(
    comparison: Comparison,
    title: str,
    shape: str,
    figure: Callable[[VariantFigures], Interval | dict[int, float] | float | None],
    caption: str = "How it is computed stands below.",
    margin: float = 0.0,
    notes: dict[str, tuple[str, bool]] | None = None,
) -> BarChart:
    """A bar for each variant that has the figure: with whiskers where it is an interval, with points where it is by
    seed. `margin` is shaded on both sides of zero; `shape` is of a number and its unit.
    """
    number, _, unit = shape.partition(" ")
    found = [(own, given) for own in comparison.arms if (given := figure(own)) not in (None, {})]
    by_seed = [given if isinstance(given, dict) else {} for _, given in found]
    means = [
        statistics.mean(seeds.values()) if seeds else given for (_, given), seeds in zip(found, by_seed, strict=True)
    ]
    values = [mean if isinstance(mean, Interval) else Interval(mean, None, None) for mean in means]  # type: ignore[arg-type]
    ends = [end for value in values for end in (value.value, value.high) if end is not None]
    scale = Scale.of([*ends, *(v for seeds in by_seed for v in seeds.values()), margin, -margin])
    bars, zero = [], scale.percent(0)
    for (own, _), value, seeds in zip(found, values, by_seed, strict=True):
        end = scale.percent(value.value) if can_be_drawn(value.value) else zero
        whisker = None
        if value.low is not None and value.high is not None:
            whisker = (scale.percent(max(value.low, scale.low)), scale.percent(value.high))
        points = [scale.percent(value) for value in seeds.values() if can_be_drawn(value)]
        by_words = "; ".join(f"seed {seed}: {number.format(value)}" for seed, value in seeds.items())
        note = (notes or {}).get(own.arm, (by_words, False))
        place = (min(zero, end), round(abs(end - zero), 2))
        bars.append(Bar(own.arm, own.name, f"{value.describe(number)} {unit}", *place, whisker, points, *note))
    low, high = scale.percent(-margin), scale.percent(margin)
    return BarChart(title, caption, bars, zero, (low, round(high - low, 2)) if margin else None)


AXES = {"step": "optimizer step", "wall_time_s": "seconds of training", "tokens": "tokens trained on"}
FIGURES = {"tokens_per_s": "{:,.0f} tokens/s", "gap": "{:+.4f} nats/token", "loss": "{:.4f} nats/token"}


def _lines(curves: list[dict[str, Any]], figure: str, axis: str, title: str, caption: str) -> LineChart:
    """A line for each run of `figure` by `axis`, with points for the evaluations of a loss and for a gap's few."""
    shape, x_title = FIGURES[figure], AXES[axis]
    dotted = [{"loss": curve["evaluation"], "gap": curve}.get(figure, {axis: [], figure: []}) for curve in curves]
    both = [*curves, *dotted]
    x = Scale.of(value for curve in both for value in curve[axis])
    y = Scale.of((value for curve in both for value in curve[figure]), from_zero=figure != "loss")
    lines = []
    for curve, dots in zip(curves, dotted, strict=True):
        pieces: list[list[str]] = [[]]
        for at, value in zip(curve[axis], curve[figure], strict=True):
            if can_be_drawn(at) and can_be_drawn(value):
                pieces[-1].append(f"{10 * x.percent(at):.0f},{1000 - 10 * y.percent(value):.0f}")
            else:
                pieces.append([])
        points = [
            (x.percent(at), round(100 - y.percent(value), 2), f"{x_title} {at:,.0f}: {shape.format(value)}")
            for at, value in zip(dots[axis], dots[figure], strict=True)
            if can_be_drawn(at) and can_be_drawn(value)
        ]
        name = f"{curve['name']}, seed {curve['seed']}"
        lines.append(Line(curve["arm"], name, [" ".join(piece) for piece in pieces if piece], points))
    y_ticks = [(round(100 - at, 2), text) for at, text in y.ticks()]
    return LineChart(title, caption, x_title, shape.partition(" ")[2], x.ticks(), y_ticks, lines)


def _gap_curves(curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs with at least two evaluations at steps where the bf16 run of their seed has one, too: `gap` by `step`."""
    at_step = [dict(zip(curve["evaluation"]["step"], curve["evaluation"]["loss"], strict=True)) for curve in curves]
    base = {curve["seed"]: own for curve, own in zip(curves, at_step, strict=True) if curve["arm"] == REFERENCE}
    found = []
    for curve, own in zip(curves, at_step, strict=True):
        reference = base.get(curve["seed"], {})
        gaps = {step: loss - reference[step] for step, loss in own.items() if step in reference}
        if curve["arm"] != REFERENCE and len(gaps) > 1:
            found.append({**curve, "step": list(gaps), "gap": list(gaps.values())})
    return found
