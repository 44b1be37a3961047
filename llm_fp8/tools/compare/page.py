"""A comparison as one HTML page that loads nothing: styles, data and plotly.js stand in it.

Charts are plain values for plotly.js, each with its table. A trace names its variant (key "arm"), by which the page
colours and hides it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from llm_fp8.tools.compare.figures import VariantFigures
from llm_fp8.tools.compare.report import COLUMNS, Comparison, table_rows
from llm_fp8.tools.compare.variants import REFERENCE, describe_variant

ASSETS = Path(__file__).parent / "assets"
EFFECT_WORDS = {
    "all": "everything",
    "quality": "loss and answers",
    "speed": "speed, memory, energy",
    "note": "nothing by itself",
}


def render_page(comparison: Comparison) -> str:
    """The whole page."""
    environment = Environment(
        loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    charts = make_charts(comparison)
    variants = [{"arm": variant.arm, "name": variant.name} for variant in comparison.arms if variant.num_seeds]
    rows = table_rows(comparison.arms)
    figures = [
        {"title": column.title, "how": column.how, "values": [row[i] for row in rows]}
        for i, column in enumerate(COLUMNS)
        if i
    ]
    return environment.get_template("page.html").render(
        title=_title(comparison),
        facts=_facts(comparison),
        arms=variants,
        variant_names=[row[0] for row in rows],
        verdicts=[
            {**dataclasses.asdict(verdict), "name": describe_variant(variant)}
            for variant, verdict in comparison.verdicts.items()
        ],
        figures=figures,
        charts=charts,
        not_drawn=not_drawn(comparison.arms),
        differences=comparison.differences,
        effect_words=EFFECT_WORDS,
        failures=[
            {**dataclasses.asdict(failure), "name": describe_variant(failure.arm)} for failure in comparison.failures
        ],
        sources=comparison.provenance["runs"],
        provenance=_provenance_lines(comparison.provenance["of_first_run"]),
        # '<' cannot end the script element that holds the data when it is written as an escape.
        data=json.dumps(
            _finite({"arms": variants, "charts": [_drawn(chart) for chart in charts]}), allow_nan=False
        ).replace("<", "\\u003c"),
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        script=(ASSETS / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )


def _finite(value: Any) -> Any:
    """`value` with None for non-finite floats; plotly.js leaves a gap there."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drawn(chart: Any) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(chart).items() if key not in ("headers", "rows", "caption")}


def _title(comparison: Comparison) -> str:
    model = str(comparison.provenance["model"] or "model").rstrip("/").split("/")[-1]
    *others, last = [variant.name for variant in comparison.arms]
    return f"{model}: {', '.join(others)} and {last} compared" if others else f"{model}: {last}"


def _facts(comparison: Comparison) -> str:
    """What was run, in a line."""
    provenance = comparison.provenance
    first = provenance["of_first_run"]
    made = datetime.fromisoformat(provenance["made_utc"]).strftime("%Y-%m-%d %H:%M UTC")
    gpus = [gpu["name"] for gpu in first.get("gpus", [])]
    device = f"{len(gpus)} x {gpus[0]}" if gpus else "CPU"
    num_runs = sum(variant.num_seeds for variant in comparison.arms)
    tokens = f", up to {provenance['tokens_seen']:,.0f} tokens" if provenance["tokens_seen"] else ""
    data = f" on {provenance['dataset']}" if provenance["dataset"] else ""
    return f"{num_runs} runs{data}, {provenance['num_steps']:,} steps{tokens} each, {device}. Made {made}."


def _provenance_lines(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    """What a reader would ask of the first run, as name and text."""
    git = provenance.get("git") or {}
    packages = {name: version for name, version in provenance.get("packages", {}).items() if version}
    lines = [
        ("command", " ".join(provenance.get("command", []))),
        ("commit", f"{git.get('commit', '')}{' with uncommitted changes' if git.get('dirty') else ''}"),
        ("GPUs", ", ".join(f"{gpu['name']}, {gpu['memory_gib']} GiB" for gpu in provenance.get("gpus", [])) or "none"),
        ("driver, CUDA, cuDNN", ", ".join(str(provenance.get(key) or "none") for key in ("driver", "cuda", "cudnn"))),
        ("python", str(provenance.get("python", ""))),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("processor", f"{provenance.get('cpu', {}).get('model')}, {provenance.get('cpu', {}).get('num_cores')} cores"),
        ("system", str(provenance.get("os", ""))),
        ("environment", ", ".join(f"{name}={value}" for name, value in provenance.get("environment", {}).items())),
    ]
    return [(name, text) for name, text in lines if text.strip()] if provenance else []


NUM_TABLE_ROWS = 12


@dataclass(frozen=True)
class Chart:
    """One chart: plotly.js traces and axis titles, a caption, and the values as a table."""

    id: str
    title: str
    caption: str
    x_title: str
    y_title: str
    traces: list[dict[str, Any]]
    headers: list[str]
    rows: list[list[str]]
    band: tuple[float, float] | None = None
    """A range of y that is shaded."""
    is_wide: bool = field(default=False)


def make_charts(comparison: Comparison) -> list[Chart]:
    """All charts that there is something to draw in."""
    curves, variants = comparison.curves, comparison.arms
    charts = [
        _speed_bars(variants),
        _gap_bars(variants, comparison.quality_margin),
        _exact_match_bars(variants),
        _bars(variants, "memory", "Peak memory", "GiB", "peak_memory_gib", "{:.1f}"),
        _bars(variants, "energy", "Energy", "J per million tokens", "energy_j_per_million_tokens", "{:,.0f}"),
        _rate_chart(curves),
        _gap_curves(curves),
        _loss_chart(curves, "wall_time_s", "seconds of training", "Loss by wall time"),
        _loss_chart(curves, "step", "optimizer step", "Loss by step"),
        _loss_chart(curves, "tokens", "tokens trained on", "Loss by tokens"),
    ]
    return [chart for chart in charts if chart is not None and chart.traces]


def not_drawn(variants: Sequence[VariantFigures]) -> list[str]:
    """What no variant has a figure of, in words."""
    present = {
        "peak memory": any(variant.peak_memory_gib is not None for variant in variants),
        "energy": any(variant.energy_j_per_million_tokens is not None for variant in variants),
        "eval loss": any(variant.eval_loss for variant in variants),
        "exact match": any(variant.exact_match for variant in variants),
    }
    return [name for name, there in present.items() if not there]


def _who(curve: dict[str, Any], suffix: str = "") -> dict[str, Any]:
    return {"arm": curve["arm"], "name": f"{curve['name']}, seed {curve['seed']}{suffix}"}


def _loss_chart(curves: list[dict[str, Any]], axis: str, x_title: str, title: str) -> Chart | None:
    traces: list[dict[str, Any]] = []
    for curve in curves:
        if curve[axis]:
            evaluation = curve["evaluation"]
            traces += [
                {**_who(curve), "kind": "line", "x": curve[axis], "y": curve["loss"]},
                {**_who(curve, ", eval"), "kind": "points", "x": evaluation[axis], "y": evaluation["loss"]},
            ]
    smoothed = max(curve["smoothed_over_steps"] for curve in curves)
    mean = f"trailing mean over {smoothed} steps" if smoothed > 1 else "each step's"
    caption = f"Lines: training loss, {mean}. Points: eval loss. One of each per seed."
    headers, rows = _curve_table(curves, axis, "loss", x_title, "{:.4f}")
    return (
        Chart(f"loss-{axis.replace('_', '-')}", title, caption, x_title, "nats/token", traces, headers, rows)
        if traces
        else None
    )


def _rate_chart(curves: list[dict[str, Any]]) -> Chart:
    traces = [{**_who(curve), "kind": "line", "x": curve["step"], "y": curve["tokens_per_s"]} for curve in curves]
    headers, rows = _curve_table(curves, "step", "tokens_per_s", "optimizer step", "{:,.0f}")
    caption = (
        "All positions of a step over its time, on all GPUs. The first steps hold start-up and compilation; no "
        "figure counts them."
    )
    return Chart("rate-step", "Tokens per second by step", caption, "optimizer step", "tokens/s", traces, headers, rows)


def _gap_curves(curves: list[dict[str, Any]]) -> Chart | None:
    """Eval loss during training against the bf16 run of the same seed at the same step."""
    base = {
        curve["seed"]: dict(zip(curve["evaluation"]["step"], curve["evaluation"]["loss"], strict=True))
        for curve in curves
        if curve["arm"] == REFERENCE
    }
    traces: list[dict[str, Any]] = []
    by_step: dict[float, dict[str, list[float]]] = {}
    for curve in curves:
        reference = base.get(curve["seed"], {})
        evaluation = zip(curve["evaluation"]["step"], curve["evaluation"]["loss"], strict=True)
        gaps = {step: loss - reference[step] for step, loss in evaluation if step in reference}
        if curve["arm"] == REFERENCE or len(gaps) < 2:
            continue
        traces.append({**_who(curve), "kind": "line-points", "x": list(gaps), "y": list(gaps.values())})
        for step, gap in gaps.items():
            by_step.setdefault(step, {}).setdefault(curve["name"], []).append(gap)
    names = list(dict.fromkeys(name for gaps_of in by_step.values() for name in gaps_of))
    rows = [
        [
            f"{step:,.0f}",
            *(f"{statistics.mean(by_step[step][name]):+.4f}" if name in by_step[step] else "" for name in names),
        ]
        for step in _thinned(sorted(by_step))
    ]
    caption = "Eval loss minus that of the bf16 run of the same seed at the same step. Zero is bf16."
    headers = ["optimizer step", *names]
    return Chart(
        "gap-step", "Eval loss gap to bf16 by step", caption, "optimizer step", "nats/token", traces, headers, rows
    )


def _thinned(values: list[Any]) -> list[Any]:
    """At most `NUM_TABLE_ROWS` of `values`, evenly spread, the last among them."""
    if len(values) <= NUM_TABLE_ROWS:
        return values
    return [values[round(i * (len(values) - 1) / (NUM_TABLE_ROWS - 1))] for i in range(NUM_TABLE_ROWS)]


def _curve_table(
    curves: list[dict[str, Any]], axis: str, figure: str, x_title: str, number: str
) -> tuple[list[str], list[list[str]]]:
    """A figure at a dozen steps, a column per variant, mean over seeds; by wall time a column of seconds each, too."""
    by_variant: dict[str, list[dict[str, Any]]] = {}
    for curve in curves:
        by_variant.setdefault(curve["name"], []).append(curve)
    steps = _thinned(sorted({step for curve in curves for step in curve["step"]}))

    def mean_at(name: str, step: float, key: str) -> float | None:
        values = [dict(zip(curve["step"], curve[key], strict=False)).get(step) for curve in by_variant[name]]
        known = [value for value in values if value is not None]
        return statistics.mean(known) if known else None

    def text(value: float | None, shape: str) -> str:
        return "" if value is None else shape.format(value)

    headers, rows = ["optimizer step"], [[f"{step:,.0f}"] for step in steps]
    if axis == "tokens":
        headers.append(x_title)
        first = next(iter(by_variant))
        rows = [[*row, text(mean_at(first, step, axis), "{:,.0f}")] for row, step in zip(rows, steps, strict=True)]
    for name in by_variant:
        if axis == "wall_time_s":
            headers.append(f"{name}: s")
            rows = [[*row, text(mean_at(name, step, axis), "{:,.1f}")] for row, step in zip(rows, steps, strict=True)]
        headers.append(name)
        rows = [[*row, text(mean_at(name, step, figure), number)] for row, step in zip(rows, steps, strict=True)]
    return headers, rows


def _bar(own: VariantFigures, value: float, shape: str, **more: Any) -> dict[str, Any]:
    text = [shape.format(value)]
    return {"arm": own.arm, "name": own.name, "kind": "bar", "x": [own.name], "y": [value], "text": text, **more}


def _bar_with_seeds(own: VariantFigures, mean: float, by_seed: dict[int, float], shape: str) -> list[dict[str, Any]]:
    """A bar at `mean` and a point for each seed."""
    x, y = [own.name] * len(by_seed), list(by_seed.values())
    points = {"arm": own.arm, "name": f"{own.name}, each seed", "kind": "points", "x": x, "y": y}
    return [_bar(own, mean, shape), points]


def _seed_rows(own: VariantFigures, mean: float, by_seed: dict[int, float], shape: str) -> list[list[str]]:
    return [[own.name, str(seed), shape.format(value)] for seed, value in (*by_seed.items(), ("mean", mean))]


def _bars(variants: Sequence[VariantFigures], name: str, title: str, unit: str, field: str, shape: str) -> Chart:
    values = [(own, value) for own in variants if (value := getattr(own, field)) is not None]
    rows = [[own.name, shape.format(value)] for own, value in values]
    traces = [_bar(own, value, shape) for own, value in values]
    return Chart(name, title, f"{unit}; how it is computed stands below.", "", unit, traces, ["variant", unit], rows)


def _exact_match_bars(variants: Sequence[VariantFigures]) -> Chart:
    traces, rows = [], []
    for own in variants:
        if own.exact_match:
            percent = 100 * statistics.mean(own.exact_match.values())
            by_seed = {seed: 100 * share for seed, share in own.exact_match.items()}
            traces += _bar_with_seeds(own, percent, by_seed, "{:.1f}")
            rows += _seed_rows(own, percent, by_seed, "{:.1f}")
    caption = (
        "Held-out problems answered right, in %: bars are means, points seeds. The paired test stands in the "
        "table of figures."
    )
    return Chart("exact-match", "Exact match", caption, "", "% of problems", traces, ["variant", "seed", "%"], rows)


def _speed_bars(variants: Sequence[VariantFigures]) -> Chart:
    traces, rows = [], []
    for own in variants:
        if (rate := own.tokens_per_s) is not None:
            whole = rate.low is not None and rate.high is not None
            error = {"error": [rate.high - rate.value, rate.value - rate.low]} if whole else {}  # type: ignore[operator]
            traces.append(_bar(own, rate.value, "{:,.0f}", **error))
            rows.append([own.name, rate.describe("{:,.0f}")])
    caption = "Median over steps, mean over seeds; whiskers: 95% interval over seeds."
    headers = ["variant", "tokens/s (95% interval)"]
    return Chart("speed", "Tokens per second", caption, "", "tokens/s", traces, headers, rows)


def _gap_bars(variants: Sequence[VariantFigures], margin: float) -> Chart:
    traces, rows = [], []
    for own in variants:
        if (gap := own.loss_gap) is not None:
            traces += _bar_with_seeds(own, gap.mean, gap.by_seed, "{:+.4f}")
            rows += _seed_rows(own, gap.mean, gap.by_seed, "{:+.4f}")
    caption = f"Final eval loss minus bf16's: bars are means, points seeds. Shaded: the margin, {margin:g}."
    headers = ["variant", "seed", "gap"]
    return Chart(
        "gap", "Final eval loss gap to bf16", caption, "", "nats/token", traces, headers, rows, (-margin, margin)
    )
