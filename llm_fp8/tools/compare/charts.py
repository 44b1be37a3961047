"""Figures of a comparison as charts: what is drawn, with every place in percent of the drawing, so that it fits any
width, and the words and tables beside it. The page's template (assets/page.html) turns them into SVG.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llm_fp8.tools.compare.differences import concerning
from llm_fp8.tools.compare.figures import VariantFigures
from llm_fp8.tools.compare.report import Comparison
from llm_fp8.tools.compare.statistics import Interval
from llm_fp8.tools.compare.variants import REFERENCE

NUM_TABLE_ROWS = 12
MAX_INTERVALS = 5
Table = list[list[str]]


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
    """A variant's bar. Places are percent from the left."""

    arm: str
    name: str
    text: str
    """The value."""
    start: float
    length: float
    whisker: tuple[float, float] | None
    points: list[float]
    """Of each seed."""
    note: str
    is_doubtful: bool = False


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars, one per variant."""

    id: str
    title: str
    caption: str
    bars: list[Bar]
    zero: float
    band: tuple[float, float] | None
    """Start and length of what is shaded."""


@dataclass(frozen=True)
class Line:
    """A run's line, and points on it or beside it."""

    arm: str
    name: str
    pieces: list[str]
    """Points of SVG polylines, thousandths from the top left; the line has a gap where a value cannot be drawn."""
    points: list[tuple[float, float, str]]
    """Percent from the left and from the top, with words."""


@dataclass(frozen=True)
class LineChart:
    """A line per run, and the values at a dozen steps as a table."""

    id: str
    title: str
    caption: str
    x_title: str
    y_title: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[Line]
    headers: list[str]
    rows: Table


def speed_chart(comparison: Comparison) -> BarChart:
    """Tokens/s, with what is known of each variant's quality: speed counts at equal quality."""
    return _bars(
        comparison,
        "speed",
        "Tokens per second at equal quality",
        "All GPUs together. A pale bar is of a variant that is not shown to learn as well as bf16. Whiskers: 95% "
        "interval over seeds.",
        "{:,.0f}",
        " tokens/s",
        lambda own: own.tokens_per_s,
        with_quality=True,
    )


def _quality(own: VariantFigures, comparison: Comparison) -> tuple[str, bool]:
    """What stands beside a variant's speed, and whether the speed is of doubtful worth."""
    verdict = comparison.verdicts[own.arm]
    words = [
        {
            "baseline": "baseline",
            "as good": "quality as good",
            "slightly worse": "quality slightly worse",
            "worse": "quality worse",
            "not shown": "equal quality not shown",
        }[verdict.quality]
    ]
    if verdict.conclusion in ("fell back", "not comparable", "not certified"):
        words.insert(0, verdict.conclusion)
    if concerning(comparison.differences, own.arm, "speed"):
        words.insert(0, "speed not comparable")
    elif own.speedup:
        words.insert(0, f"{own.speedup.value:.2f} times bf16")
    return "; ".join(words), verdict.quality in ("worse", "not shown") or verdict.conclusion == "not certified"


def make_charts(comparison: Comparison) -> list[BarChart | LineChart]:
    """All other charts that there is something to draw in."""
    curves, margin = comparison.curves, comparison.quality_margin
    gap_curves = _gap_curves(curves)
    charts: list[BarChart | LineChart] = [
        _bars(
            comparison,
            "gap",
            "Final eval loss gap to bf16",
            f"Final eval loss minus bf16's: bars are means, points seeds. Shaded: the margin, {margin:g}.",
            "{:+.4f}",
            " nats/token",
            lambda own: own.loss_gap.mean if own.loss_gap else None,
            lambda own: own.loss_gap.by_seed if own.loss_gap else {},
            margin,
        ),
        _bars(
            comparison,
            "exact-match",
            "Exact match",
            "Held-out problems answered right: bars are means, points seeds. The paired test stands in the table of "
            "figures.",
            "{:.1f}",
            "%",
            lambda own: 100 * statistics.mean(own.exact_match.values()) if own.exact_match else None,
            lambda own: {seed: 100 * share for seed, share in own.exact_match.items()},
        ),
        _bars(
            comparison,
            "memory",
            "Peak memory",
            "How it is computed stands below.",
            "{:.1f}",
            " GiB",
            lambda own: own.peak_memory_gib,
        ),
        _bars(
            comparison,
            "energy",
            "Energy",
            "How it is computed stands below.",
            "{:,.0f}",
            " J per million tokens",
            lambda own: own.energy_j_per_million_tokens,
        ),
        _lines(
            curves,
            "rate-step",
            "Tokens per second by step",
            "All positions of a step over its time, on all GPUs. The first steps hold start-up and compilation; no "
            "figure counts them.",
            "tokens_per_s",
            "tokens/s",
            "{:,.0f}",
        ),
        _lines(
            gap_curves,
            "gap-step",
            "Eval loss gap to bf16 by step",
            "Eval loss minus that of the bf16 run of the same seed at the same step. Zero is bf16.",
            "gap",
            "nats/token",
            "{:+.4f}",
        ),
        *(
            _lines(
                [curve for curve in curves if curve[axis]],
                f"loss-{axis.replace('_', '-')}",
                f"Loss by {words}",
                "Lines: training loss, trailing mean over a twentieth of the steps. Points: eval loss. One of each per "
                "seed.",
                "loss",
                "nats/token",
                "{:.4f}",
                axis,
                x_title,
                from_zero=False,
            )
            for axis, words, x_title in (
                ("wall_time_s", "wall time", "seconds of training"),
                ("step", "step", "optimizer step"),
                ("tokens", "tokens", "tokens trained on"),
            )
        ),
    ]
    return [chart for chart in charts if (chart.bars if isinstance(chart, BarChart) else chart.lines)]


def not_drawn(variants: Sequence[VariantFigures]) -> list[str]:
    """What no variant has a figure of, in words."""
    present = {
        "peak memory": any(variant.peak_memory_gib is not None for variant in variants),
        "energy": any(variant.energy_j_per_million_tokens is not None for variant in variants),
        "eval loss": any(variant.eval_loss for variant in variants),
        "exact match": any(variant.exact_match for variant in variants),
    }
    return [name for name, there in present.items() if not there]


def _bars(
    comparison: Comparison,
    id: str,
    title: str,
    caption: str,
    shape: str,
    unit: str,
    figure: Callable[[VariantFigures], Interval | float | None],
    by_seed: Callable[[VariantFigures], dict[int, float]] = lambda own: {},
    margin: float | None = None,
    with_quality: bool = False,
) -> BarChart:
    """A bar for each variant that has the figure, with whiskers where it is an interval, and points of `by_seed`.
    `margin` is shaded on both sides of zero; `shape` formats a value.
    """
    found = [(own, value) for own in comparison.arms if (value := figure(own)) is not None]
    figures = [(own, v if isinstance(v, Interval) else Interval(v, None, None)) for own, v in found]
    ends = [end for _, v in figures for end in (v.value, v.high) if end is not None]
    scale = Scale.of([*ends, *(v for own, _ in found for v in by_seed(own).values()), margin or 0, -(margin or 0)])
    bars, zero = [], scale.percent(0)
    for own, value in figures:
        end = scale.percent(value.value) if can_be_drawn(value.value) else zero
        whisker = None
        if value.low is not None and value.high is not None:
            whisker = (scale.percent(max(value.low, scale.low)), scale.percent(value.high))
        seeds = by_seed(own)
        points = [scale.percent(number) for number in seeds.values() if can_be_drawn(number)]
        note, is_doubtful = "; ".join(f"seed {seed}: {shape.format(number)}" for seed, number in seeds.items()), False
        if with_quality:
            note, is_doubtful = _quality(own, comparison)
        place = (min(zero, end), round(abs(end - zero), 2))
        bars.append(Bar(own.arm, own.name, value.describe(shape) + unit, *place, whisker, points, note, is_doubtful))
    band = None if margin is None else (scale.percent(-margin), scale.percent(margin) - scale.percent(-margin))
    return BarChart(id, title, caption, bars, zero, band)


def _lines(
    curves: list[dict[str, Any]],
    id: str,
    title: str,
    caption: str,
    figure: str,
    y_title: str,
    shape: str,
    axis: str = "step",
    x_title: str = "optimizer step",
    from_zero: bool = True,
) -> LineChart:
    """A line for each run of `figure` by `axis`; points for the loss's evaluations and for the few of a gap."""
    headers, rows = _curve_table(curves, axis, figure, x_title, shape) if curves else ([], [])
    few = {"loss": lambda curve: curve["evaluation"], "gap": lambda curve: curve}.get(figure, lambda curve: {})
    dots = [list(zip(few(curve).get(axis, []), few(curve).get(figure, []), strict=True)) for curve in curves]
    values = [value for curve in curves for value in curve[figure]] + [value for own in dots for _, value in own]
    x, y = Scale.of(value for curve in curves for value in curve[axis]), Scale.of(values, from_zero)
    lines = []
    for curve, own in zip(curves, dots, strict=True):
        pieces: list[list[str]] = [[]]
        for at, value in zip(curve[axis], curve[figure], strict=True):
            if can_be_drawn(at) and can_be_drawn(value):
                pieces[-1].append(f"{10 * x.percent(at):.0f},{1000 - 10 * y.percent(value):.0f}")
            elif pieces[-1]:
                pieces.append([])
        points = [
            (x.percent(at), round(100 - y.percent(value), 2), f"{x_title} {at:,.0f}: {shape.format(value)}")
            for at, value in own
            if can_be_drawn(at) and can_be_drawn(value)
        ]
        name = f"{curve['name']}, seed {curve['seed']}"
        lines.append(Line(curve["arm"], name, [" ".join(piece) for piece in pieces if piece], points))
    y_ticks = [(round(100 - at, 2), text) for at, text in y.ticks()]
    return LineChart(id, title, caption, x_title, y_title, x.ticks(), y_ticks, lines, headers, rows)


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


def _curve_table(
    curves: list[dict[str, Any]], axis: str, figure: str, x_title: str, shape: str
) -> tuple[list[str], Table]:
    """A figure at a dozen steps, a column per variant, mean over seeds; by wall time a column of seconds each, too."""
    by_variant: dict[str, list[dict[str, Any]]] = {}
    for curve in curves:
        by_variant.setdefault(curve["name"], []).append(curve)
    steps = sorted({step for curve in curves for step in curve["step"]})
    if len(steps) > NUM_TABLE_ROWS:  # evenly spread, the last among them
        steps = [steps[round(i * (len(steps) - 1) / (NUM_TABLE_ROWS - 1))] for i in range(NUM_TABLE_ROWS)]

    def column(name: str, key: str, shape: str) -> list[str]:
        at_step = [dict(zip(curve["step"], curve[key], strict=False)) for curve in by_variant[name]]
        known = [[values[step] for values in at_step if step in values] for step in steps]
        return [shape.format(statistics.mean(values)) if values else "" for values in known]

    columns = {"optimizer step": [f"{step:,.0f}" for step in steps]}
    if axis == "tokens":
        columns[x_title] = column(next(iter(by_variant)), axis, "{:,.0f}")
    for name in by_variant:
        if axis == "wall_time_s":
            columns[f"{name}: s"] = column(name, axis, "{:,.1f}")
        columns[name] = column(name, figure, shape)
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]
