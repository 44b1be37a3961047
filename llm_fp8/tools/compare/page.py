"""A comparison as one HTML page that loads nothing: styles, data and plotly.js stand in it.

Charts are plain values for plotly.js, each with its table. The page colours and hides a trace by its variant ("arm").
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from llm_fp8.tools.compare.figures import VariantFigures
from llm_fp8.tools.compare.report import COLUMNS, Comparison, table_rows
from llm_fp8.tools.compare.statistics import Interval
from llm_fp8.tools.compare.variants import REFERENCE, describe_variant

ASSETS = Path(__file__).parent / "assets"


def render_page(comparison: Comparison) -> str:
    environment = Environment(
        loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    charts = make_charts(comparison)
    arms = [variant for variant in comparison.arms if variant.num_seeds]
    drawn = [
        {name: getattr(chart, name) for name in ("id", "x_title", "y_title", "traces", "band")} for chart in charts
    ]
    data = json.dumps({"arms": [variant.arm for variant in arms], "charts": drawn})
    data = json.dumps(json.loads(data, parse_constant=lambda _: None))  # plotly.js leaves a gap at null, not at NaN
    names, *values = zip(*table_rows(comparison.arms), strict=True)
    return environment.get_template("page.html").render(
        comparison=comparison,
        describe=describe_variant,
        title=_title(comparison),
        facts=_facts(comparison),
        arms=arms,
        variant_names=names,
        figures=list(zip(COLUMNS[1:], values, strict=True)),
        charts=charts,
        not_drawn=not_drawn(comparison.arms),
        effect_words={
            "all": "everything",
            "quality": "loss and answers",
            "speed": "speed, memory, energy",
            "note": "nothing by itself",
        },
        provenance=_provenance_lines(comparison.provenance["of_first_run"]),
        # Written as an escape, '<' cannot end the script element that holds the data.
        data=data.replace("<", "\\u003c"),
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
        script=(ASSETS / "page.js").read_text(encoding="utf-8"),
        plotly=get_plotlyjs(),
    )


def _title(comparison: Comparison) -> str:
    model = str(comparison.provenance["model"] or "model").rstrip("/").split("/")[-1]
    *others, last = [variant.name for variant in comparison.arms]
    return f"{model}: {', '.join(others)} and {last} compared" if others else f"{model}: {last}"


def _facts(comparison: Comparison) -> str:
    provenance = comparison.provenance
    first = provenance["of_first_run"]
    made = datetime.fromisoformat(provenance["made_utc"]).strftime("%Y-%m-%d %H:%M UTC")
    gpus = [gpu["name"] for gpu in first.get("gpus") or []]
    device = f"{len(gpus)} x {gpus[0]}" if gpus else "CPU"
    num_runs = sum(variant.num_seeds for variant in comparison.arms)
    tokens = f", up to {provenance['tokens_seen']:,.0f} tokens" if provenance["tokens_seen"] else ""
    data = f" on {provenance['dataset']}" if provenance["dataset"] else ""
    return f"{num_runs} runs{data}, {provenance['num_steps']:,} steps{tokens} each, {device}. Made {made}."


def _provenance_lines(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    git, cpu = provenance.get("git") or {}, provenance.get("cpu") or {}
    packages = {name: version for name, version in (provenance.get("packages") or {}).items() if version}
    lines = [
        ("command", " ".join(provenance.get("command") or [])),
        ("commit", f"{git.get('commit', '')}{' with uncommitted changes' if git.get('dirty') else ''}"),
        (
            "GPUs",
            ", ".join(f"{gpu['name']}, {gpu['memory_gib']} GiB" for gpu in provenance.get("gpus") or []) or "none",
        ),
        ("driver, CUDA, cuDNN", ", ".join(str(provenance.get(key) or "none") for key in ("driver", "cuda", "cudnn"))),
        ("python", str(provenance.get("python", ""))),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("processor", f"{cpu.get('model')}, {cpu.get('num_cores')} cores"),
        ("system", str(provenance.get("os", ""))),
        ("environment", ", ".join(f"{name}={value}" for name, value in (provenance.get("environment") or {}).items())),
    ]
    return [(name, text) for name, text in lines if text.strip()] if provenance else []


NUM_TABLE_ROWS = 12
Table = list[list[str]]


@dataclass(frozen=True)
class Chart:
    """One chart: plotly.js traces and axis titles, a caption, and the values as a table."""

    id: str
    title: str
    caption: str
    x_title: str
    y_title: str
    headers: list[str]
    traces: list[dict[str, Any]]
    rows: Table
    band: tuple[float, float] | None = None
    """A range of y that is shaded."""


def make_charts(comparison: Comparison) -> list[Chart]:
    """All charts that there is something to draw in."""
    curves, variants, margin = comparison.curves, comparison.arms, comparison.quality_margin
    charts = [
        _bars(
            variants,
            "speed",
            "Tokens per second",
            "Median over steps, mean over seeds; whiskers, and brackets in the table: 95% interval over seeds.",
            "tokens/s",
            "{:,.0f}",
            lambda own: own.tokens_per_s,
        ),
        _bars(
            variants,
            "gap",
            "Final eval loss gap to bf16",
            f"Final eval loss minus bf16's: bars are means, points seeds. Shaded: the margin, {margin:g}.",
            "nats/token",
            "{:+.4f}",
            lambda own: own.loss_gap.mean if own.loss_gap else None,
            lambda own: own.loss_gap.by_seed if own.loss_gap else {},
            (-margin, margin),
        ),
        _bars(
            variants,
            "exact-match",
            "Exact match",
            "Held-out problems answered right: bars are means, points seeds. The paired test stands in the table of "
            "figures.",
            "% of problems",
            "{:.1f}",
            lambda own: 100 * statistics.mean(own.exact_match.values()) if own.exact_match else None,
            lambda own: {seed: 100 * share for seed, share in own.exact_match.items()},
        ),
        _bars(
            variants,
            "memory",
            "Peak memory",
            "How it is computed stands below.",
            "GiB",
            "{:.1f}",
            lambda own: own.peak_memory_gib,
        ),
        _bars(
            variants,
            "energy",
            "Energy",
            "How it is computed stands below.",
            "J per million tokens",
            "{:,.0f}",
            lambda own: own.energy_j_per_million_tokens,
        ),
        Chart(
            "rate-step",
            "Tokens per second by step",
            "All positions of a step over its time, on all GPUs. The first steps hold start-up and compilation; no "
            "figure counts them.",
            "optimizer step",
            "tokens/s",
            *_lines(curves, "tokens_per_s", "{:,.0f}"),
        ),
        Chart(
            "gap-step",
            "Eval loss gap to bf16 by step",
            "Eval loss minus that of the bf16 run of the same seed at the same step. Zero is bf16.",
            "optimizer step",
            "nats/token",
            *_lines(_gap_curves(curves), "gap", "{:+.4f}", "line-points"),
        ),
        _loss_chart(curves, "wall_time_s", "seconds of training", "Loss by wall time"),
        _loss_chart(curves, "step", "optimizer step", "Loss by step"),
        _loss_chart(curves, "tokens", "tokens trained on", "Loss by tokens"),
    ]
    return [chart for chart in charts if chart.traces]


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
    variants: Sequence[VariantFigures],
    id: str,
    title: str,
    caption: str,
    unit: str,
    shape: str,
    figure: Callable[[VariantFigures], Interval | float | None],
    by_seed: Callable[[VariantFigures], dict[int, float]] | None = None,
    band: tuple[float, float] | None = None,
) -> Chart:
    """A bar for each variant that has the figure, with whiskers where it is an interval; `by_seed`: points."""
    traces: list[dict[str, Any]] = []
    rows = []
    for own in variants:
        found = figure(own)
        if found is None:
            continue
        interval = found if isinstance(found, Interval) else Interval(found, None, None)
        mean, common = interval.value, {"arm": own.arm, "name": own.name}
        traces.append({**common, "kind": "bar", "x": [own.name], "y": [mean], "text": [shape.format(mean)]})
        if interval.low is not None and interval.high is not None:
            traces[-1]["error"] = [interval.high - mean, mean - interval.low]
        if by_seed is None:
            rows.append([own.name, interval.describe(shape)])
            continue
        seeds = by_seed(own)
        points = {"kind": "points", "x": [own.name] * len(seeds), "y": list(seeds.values())}
        traces.append({**common, "name": f"{own.name}, each seed", **points})
        rows += [[own.name, str(seed), shape.format(value)] for seed, value in (*seeds.items(), ("mean", mean))]
    headers = ["variant", unit] if by_seed is None else ["variant", "seed", unit]
    return Chart(id, title, caption, "", unit, headers, traces, rows, band)


def _who(curve: dict[str, Any], suffix: str = "") -> dict[str, Any]:
    return {"arm": curve["arm"], "name": f"{curve['name']}, seed {curve['seed']}{suffix}"}


def _lines(
    curves: list[dict[str, Any]], figure: str, shape: str, kind: str = "line"
) -> tuple[list[str], list[dict[str, Any]], Table]:
    """Headers, traces and table rows of a figure by step: a line for each run."""
    headers, rows = _curve_table(curves, "step", figure, "optimizer step", shape)
    return headers, [{**_who(curve), "kind": kind, "x": curve["step"], "y": curve[figure]} for curve in curves], rows


def _loss_chart(curves: list[dict[str, Any]], axis: str, x_title: str, title: str) -> Chart:
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
    return Chart(f"loss-{axis.replace('_', '-')}", title, caption, x_title, "nats/token", headers, traces, rows)


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
