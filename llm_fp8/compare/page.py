"""A comparison as one HTML page that needs nothing beside itself: styles, data and plotly.js stand in it, and it asks no network for anything."""

from __future__ import annotations

import dataclasses
import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from llm_fp8.compare.arms import describe_arm
from llm_fp8.compare.charts import make_charts, not_drawn
from llm_fp8.compare.comparison import Comparison
from llm_fp8.compare.rows import COLUMNS, table_rows

ASSETS = Path(__file__).parent / "assets"
EFFECT_WORDS = {"all": "everything", "quality": "loss and answers", "speed": "speed, memory, energy", "note": "nothing by itself"}


def render_page(comparison: Comparison) -> str:
    """The whole page."""
    environment = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    charts = make_charts(comparison)
    arms = [{"arm": arm.arm, "name": arm.name} for arm in comparison.arms if arm.num_seeds]
    rows = table_rows(comparison.arms)
    figures = [
        {"title": column.title, "how": column.how, "values": [row[i] for row in rows]} for i, column in enumerate(COLUMNS) if i
    ]
    return environment.get_template("page.html").render(
        title=_title(comparison),
        facts=_facts(comparison),
        arms=arms,
        arm_names=[row[0] for row in rows],
        verdicts=[{**dataclasses.asdict(verdict), "name": describe_arm(arm)} for arm, verdict in comparison.verdicts.items()],
        figures=figures,
        charts=charts,
        not_drawn=not_drawn(comparison.arms),
        differences=comparison.differences,
        effect_words=EFFECT_WORDS,
        failures=[{**dataclasses.asdict(failure), "name": describe_arm(failure.arm)} for failure in comparison.failures],
        sources=comparison.provenance["runs"],
        provenance=_provenance_lines(comparison.provenance["of_first_run"]),
        # '<' cannot end the script element that holds the data when it is written as an escape.
        data=json.dumps(_finite({"arms": arms, "charts": [_drawn(chart) for chart in charts]}), allow_nan=False).replace(
            "<", "\\u003c"
        ),
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
