"""A comparison as one HTML page that loads nothing and runs no script: words, tables, and charts as SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from llm_fp8.tools.compare.differences import concerning
from llm_fp8.tools.compare.figures import VariantFigures
from llm_fp8.tools.compare.report import Comparison, figure_rows
from llm_fp8.tools.compare.statistics import Interval, trailing_mean

ASSETS = Path(__file__).parent / "assets"


def bar_chart(
    comparison: Comparison, shape: str, figure: Callable[[VariantFigures], Interval | None]
) -> list[dict[str, Any]]:
    """A bar and its whisker for each variant that has the figure, as places in percent of the drawing's width; `shape`
    formats a number with its unit.
    """
    found = [(number, own, given) for number, own in enumerate(comparison.variants) if (given := figure(own))]
    ends = [end for *_, given in found for end in (given.value, given.low, given.high) if end is not None]
    low, high = min([0.0, *filter(math.isfinite, ends)]), max([1e-9, *filter(math.isfinite, ends)])

    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2) if math.isfinite(value) else place(0)

    bars = []
    for style, own, given in found:
        start, end = sorted((place(0), place(given.value)))
        whisker = None if given.low is None or given.high is None else (place(given.low), place(given.high))
        places = {"start": start, "length": round(end - start, 2), "whisker": whisker}
        doubtful = comparison.verdicts[own.variant].quality in ("worse", "not shown")
        words = {"name": own.name, "text": given.describe(shape), "note": _note(own, comparison)}
        bars.append({"style": style, "is_doubtful": doubtful, **places, **words})
    return bars


def _note(own: VariantFigures, comparison: Comparison) -> str:
    """What must be read with a variant's speed."""
    verdict = comparison.verdicts[own.variant]
    words = [f"{verdict.conclusion}, quality: {verdict.quality}"]
    if concerning(comparison.differences, own.variant, "speed"):
        words.insert(0, "speed not comparable")
    elif own.speedup:
        words.insert(0, f"{own.speedup.value:.2f} times bf16")
    return "; ".join(words)


def line_chart(comparison: Comparison, key: str, title: str) -> dict[str, Any] | None:
    """The losses under `key` by step: a polyline per run, in thousandths from the top left; None without two steps."""
    styles = {own.variant: number for number, own in enumerate(comparison.variants)}
    points = [point for curve in comparison.curves for point in curve[key] if math.isfinite(point[1])]
    if len({step for step, _ in points}) < 2:
        return None
    steps, losses = zip(*points, strict=True)
    left, bottom, width, height = min(steps), min(losses), max(steps) - min(steps), max(losses) - min(losses)
    lines = []
    for curve in comparison.curves:
        values = [loss for _, loss in curve[key]]
        if key == "loss":
            values = trailing_mean(values, max(1, len(values) // 20))
        places = [
            f"{1000 * (step - left) / width:.0f},{1000 - 1000 * (loss - bottom) / (height or 1):.0f}"
            for (step, _), loss in zip(curve[key], values, strict=True)
            if math.isfinite(loss)
        ]
        lines.append((styles[curve["variant"]], f"{curve['variant']}, seed {curve['seed']}", " ".join(places)))
    ends = {"x_ends": (f"step {left:.0f}", f"step {left + width:.0f}")}
    return {"title": title, "lines": lines, **ends, "y_ends": (f"{bottom:.3f}", f"{bottom + height:.3f}")}


def without_folders(text: Any) -> Any:
    """`text` with the last part alone of each absolute path: the page may be sent to others."""
    return re.sub(r"(?<![\w.:/<])~?/(?=\S)(?:[^\s/'\",;]+/)*", "", text) if type(text) is str else text


def render_page(comparison: Comparison) -> str:
    """The whole page."""
    environment = Environment(
        loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, finalize=without_folders
    )
    provenance = comparison.provenance
    lines = [
        line_chart(comparison, "eval_loss", "Eval loss by step"),
        line_chart(comparison, "loss", "Training loss by step, trailing mean over a twentieth of the steps"),
    ]
    gpus = [gpu["name"] for gpu in provenance.get("gpus") or []]
    facts = {
        "model": str(provenance.get("location", "")).rstrip("/").split("/")[-1],
        "GPUs": f"{len(gpus)} x {gpus[0]}" if gpus else "none",
        "commit": (provenance.get("git") or {}).get("commit"),
        "command": " ".join(provenance.get("command") or []),
        "packages": ", ".join(f"{name} {v}" for name, v in (provenance.get("packages") or {}).items() if v),
    }
    return environment.get_template("page.html").render(
        comparison=comparison,
        columns=[figure_rows(own) for own in comparison.variants],
        speed=bar_chart(comparison, "{:,.0f} tokens/s", lambda own: own.tokens_per_s),
        gap=bar_chart(comparison, "{:+.4f} nats/token", lambda own: own.loss_gap.interval if own.loss_gap else None),
        lines=[chart for chart in lines if chart],
        facts={name: text for name, text in facts.items() if text},
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
    )
