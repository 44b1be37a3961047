"""A comparison as one HTML page that needs nothing beside itself: styles, data and plotly.js stand in it, and it
asks no network for anything.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from llm_fp8.tools.compare.arms import REFERENCE, describe_variant
from llm_fp8.tools.compare.figures import VariantFigures
from llm_fp8.tools.compare.report import COLUMNS, Comparison, table_rows

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
    arms = [{"arm": arm.arm, "name": arm.name} for arm in comparison.arms if arm.num_seeds]
    rows = table_rows(comparison.arms)
    figures = [
        {"title": column.title, "how": column.how, "values": [row[i] for row in rows]}
        for i, column in enumerate(COLUMNS)
        if i
    ]
    return environment.get_template("page.html").render(
        title=_title(comparison),
        facts=_facts(comparison),
        arms=arms,
        arm_names=[row[0] for row in rows],
        verdicts=[
            {**dataclasses.asdict(verdict), "name": describe_variant(arm)}
            for arm, verdict in comparison.verdicts.items()
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
            _finite({"arms": arms, "charts": [_drawn(chart) for chart in charts]}), allow_nan=False
        ).replace("<", "\\u003c"),
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        script=(ASSETS / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )


def _finite(value: Any) -> Any:
    """`value` with None in the place of floats that JSON has no word for; plotly.js leaves a gap there."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drawn(chart: Any) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(chart).items() if key not in ("headers", "rows", "caption")}


def _title(comparison: Comparison) -> str:
    model = str(comparison.provenance["model"] or "model").rstrip("/").split("/")[-1]
    *others, last = [arm.name for arm in comparison.arms]
    return f"{model}: {', '.join(others)} and {last} compared" if others else f"{model}: {last}"


def _facts(comparison: Comparison) -> str:
    """What was run, in a line."""
    provenance = comparison.provenance
    first = provenance["of_first_run"]
    made = datetime.fromisoformat(provenance["made_utc"]).strftime("%Y-%m-%d %H:%M UTC")
    gpus = [gpu["name"] for gpu in first.get("gpus", [])]
    device = f"{len(gpus)} x {gpus[0]}" if gpus else "CPU"
    num_runs = sum(arm.num_seeds for arm in comparison.arms)
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


# --- charts ----------------------------------------------------------------------------------------------
# The charts of the page as plain values for plotly.js, each with the table that says the same.
#
# A trace names its arm, so that the page can colour and hide it; a trace without one belongs to no arm and always
# stays.

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
    curves, arms = comparison.curves, comparison.arms
    charts = [
        _speed_bars(arms),
        _gap_bars(arms),
        _exact_match_bars(arms),
        _bars(arms, "memory", "Peak memory", "GiB", lambda arm: arm.peak_memory_gib, "{:.1f}"),
        _bars(arms, "energy", "Energy", "J per million tokens", lambda arm: arm.energy_j_per_million_tokens, "{:,.0f}"),
        _rate_chart(curves),
        _gap_curves(curves),
        _loss_chart(curves, "wall_time_s", "seconds of training", "Loss by wall time"),
        _loss_chart(curves, "step", "optimizer step", "Loss by step"),
        _loss_chart(curves, "tokens", "tokens trained on", "Loss by tokens"),
    ]
    return [chart for chart in charts if chart is not None and chart.traces]


def not_drawn(arms: Sequence[VariantFigures]) -> list[str]:
    """What no arm has a figure of, in words."""
    present = {
        "peak memory": any(arm.peak_memory_gib is not None for arm in arms),
        "energy": any(arm.energy_j_per_million_tokens is not None for arm in arms),
        "held-out loss": any(arm.eval_loss for arm in arms),
        "exact match": any(arm.exact_match for arm in arms),
    }
    return [name for name, there in present.items() if not there]


def _loss_chart(curves: list[dict[str, Any]], axis: str, x_title: str, title: str) -> Chart | None:
    traces = []
    for curve in curves:
        if not curve[axis]:
            continue
        who = {"arm": curve["arm"], "name": f"{curve['name']}, seed {curve['seed']}"}
        traces.append({**who, "kind": "line", "x": curve[axis], "y": curve["loss"]})
        evaluation = curve["evaluation"]
        traces.append(
            {
                **who,
                "name": f"{who['name']}, held-out",
                "kind": "points",
                "x": evaluation[axis],
                "y": evaluation["loss"],
            }
        )
    smoothed = max(curve["smoothed_over_steps"] for curve in curves)
    mean = f"trailing mean over {smoothed} steps" if smoothed > 1 else "each step's"
    caption = f"Lines: training loss, {mean}. Points: held-out loss. One of each per seed."
    headers, rows = _curve_table(curves, axis, "loss", x_title, "{:.4f}")
    return (
        Chart(f"loss-{axis.replace('_', '-')}", title, caption, x_title, "nats/token", traces, headers, rows)
        if traces
        else None
    )


def _rate_chart(curves: list[dict[str, Any]]) -> Chart:
    traces = [
        {
            "arm": curve["arm"],
            "name": f"{curve['name']}, seed {curve['seed']}",
            "kind": "line",
            "x": curve["step"],
            "y": curve["tokens_per_s"],
        }
        for curve in curves
    ]
    headers, rows = _curve_table(curves, "step", "tokens_per_s", "optimizer step", "{:,.0f}")
    caption = (
        "All positions of a step over its time, on all GPUs. The first steps hold start-up and compilation; no "
        "figure counts them."
    )
    return Chart("rate-step", "Tokens per second by step", caption, "optimizer step", "tokens/s", traces, headers, rows)


def _gap_curves(curves: list[dict[str, Any]]) -> Chart | None:
    """Held-out loss during training against the bf16 run of the same seed at the same step."""
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
        name = f"{curve['name']}, seed {curve['seed']}"
        traces.append(
            {"arm": curve["arm"], "name": name, "kind": "line-points", "x": list(gaps), "y": list(gaps.values())}
        )
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
    caption = "Held-out loss minus that of the bf16 run of the same seed at the same step. Zero is bf16."
    headers = ["optimizer step", *names]
    return Chart(
        "gap-step", "Held-out gap to bf16 by step", caption, "optimizer step", "nats/token", traces, headers, rows
    )


def _thinned(values: list[Any]) -> list[Any]:
    """At most `NUM_TABLE_ROWS` of `values`, evenly spread, the last among them."""
    if len(values) <= NUM_TABLE_ROWS:
        return values
    return [values[round(i * (len(values) - 1) / (NUM_TABLE_ROWS - 1))] for i in range(NUM_TABLE_ROWS)]


def _curve_table(
    curves: list[dict[str, Any]], axis: str, figure: str, x_title: str, number: str
) -> tuple[list[str], list[list[str]]]:
    """A figure at a dozen steps, one column per arm, mean over its seeds; by wall time each arm has a column of
    seconds of its own.
    """
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for curve in curves:
        by_arm.setdefault(curve["name"], []).append(curve)
    steps = _thinned(sorted({step for curve in curves for step in curve["step"]}))

    def mean_at(name: str, step: float, key: str) -> float | None:
        values = [dict(zip(curve["step"], curve[key], strict=False)).get(step) for curve in by_arm[name]]
        known = [value for value in values if value is not None]
        return statistics.mean(known) if known else None

    def text(value: float | None, shape: str) -> str:
        return "" if value is None else shape.format(value)

    headers, rows = ["optimizer step"], [[f"{step:,.0f}"] for step in steps]
    if axis == "tokens":
        headers.append(x_title)
        first = next(iter(by_arm))
        rows = [[*row, text(mean_at(first, step, axis), "{:,.0f}")] for row, step in zip(rows, steps, strict=True)]
    for name in by_arm:
        if axis == "wall_time_s":
            headers.append(f"{name}: s")
            rows = [[*row, text(mean_at(name, step, axis), "{:,.1f}")] for row, step in zip(rows, steps, strict=True)]
        headers.append(name)
        rows = [[*row, text(mean_at(name, step, figure), number)] for row, step in zip(rows, steps, strict=True)]
    return headers, rows


def _bar(arm: VariantFigures, value: float, shape: str, **more: Any) -> dict[str, Any]:
    return {
        "arm": arm.arm,
        "name": arm.name,
        "kind": "bar",
        "x": [arm.name],
        "y": [value],
        "text": [shape.format(value)],
        **more,
    }


def _bars(
    arms: Sequence[VariantFigures],
    name: str,
    title: str,
    unit: str,
    value_of: Callable[[VariantFigures], float | None],
    shape: str,
) -> Chart:
    values = [(arm, value) for arm in arms if (value := value_of(arm)) is not None]
    rows = [[arm.name, shape.format(value)] for arm, value in values]
    traces = [_bar(arm, value, shape) for arm, value in values]
    return Chart(name, title, f"{unit}; how it is computed stands below.", "", unit, traces, ["arm", unit], rows)


def _exact_match_bars(arms: Sequence[VariantFigures]) -> Chart:
    traces, rows = [], []
    for arm in arms:
        if not arm.exact_match:
            continue
        percent = 100 * statistics.mean(arm.exact_match.values())
        points = [100 * share for share in arm.exact_match.values()]
        traces.append(_bar(arm, percent, "{:.1f}"))
        traces.append(
            {
                "arm": arm.arm,
                "name": f"{arm.name}, each seed",
                "kind": "points",
                "x": [arm.name] * len(points),
                "y": points,
            }
        )
        rows += [[arm.name, str(seed), f"{100 * share:.1f}"] for seed, share in arm.exact_match.items()]
        rows.append([arm.name, "mean", f"{percent:.1f}"])
    caption = (
        "Held-out problems answered right, in %: bars are means, points seeds. The paired test stands in the "
        "table of figures."
    )
    return Chart("exact-match", "Exact match", caption, "", "% of problems", traces, ["arm", "seed", "%"], rows)


def _speed_bars(arms: Sequence[VariantFigures]) -> Chart:
    traces, rows = [], []
    for arm in arms:
        rate = arm.tokens_per_s
        if rate is not None:
            error = [rate.high - rate.value, rate.value - rate.low]
            traces.append(_bar(arm, rate.value, "{:,.0f}", error=error))
            rows.append([arm.name, f"{rate.value:,.0f}", f"{rate.low:,.0f} to {rate.high:,.0f}"])
    caption = "Median over steps, mean over seeds; whiskers: 95% bootstrap interval."
    return Chart(
        "speed", "Tokens per second", caption, "", "tokens/s", traces, ["arm", "tokens/s", "95% interval"], rows
    )


def _gap_bars(arms: Sequence[VariantFigures]) -> Chart:
    traces: list[dict[str, Any]] = []
    rows = []
    spread = None
    for arm in arms:
        gap = arm.loss_gap
        if gap is None:
            continue
        spread = gap.reference_spread
        traces.append(_bar(arm, gap.mean, "{:+.4f}"))
        points = list(gap.by_seed.values())
        traces.append(
            {
                "arm": arm.arm,
                "name": f"{arm.name}, each seed",
                "kind": "points",
                "x": [arm.name] * len(points),
                "y": points,
            }
        )
        rows += [[arm.name, str(seed), f"{value:+.4f}"] for seed, value in gap.by_seed.items()]
        rows.append([arm.name, "mean", f"{gap.mean:+.4f}"])
    known = spread is not None
    shaded = (
        f"Shaded: the spread of bf16's seeds, {spread:.4f} to either side."
        if known
        else "The spread of bf16's seeds is unknown."
    )
    caption = f"Final held-out loss minus bf16's: bars are means, points seeds. {shaded}"
    band = (-spread, spread) if spread is not None else None
    return Chart(
        "gap", "Final held-out gap to bf16", caption, "", "nats/token", traces, ["arm", "seed", "gap"], rows, band
    )
