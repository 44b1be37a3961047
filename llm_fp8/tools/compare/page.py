"""A comparison as one HTML page that loads nothing and runs no script: words, tables, and charts as SVG."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from llm_fp8.tools.compare.charts import make_charts, speed_chart
from llm_fp8.tools.compare.report import COLUMNS, NOT_APPLICABLE, Comparison, table_rows
from llm_fp8.tools.compare.variants import describe_variant

ASSETS = Path(__file__).parent / "assets"
NUM_STYLES = 7
"""Colours, dashes and marks of variants in assets/page.css and page.html."""


def render_page(comparison: Comparison) -> str:
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: without_folders(value) if type(value) is str else value,
    )
    names, *values = zip(*table_rows(comparison.arms), strict=True)
    return environment.get_template("page.html").render(
        comparison=comparison,
        describe=describe_variant,
        title=_title(comparison),
        facts=_facts(comparison),
        arms=[variant for variant in comparison.arms if variant.num_seeds],
        style_of={variant.arm: number % NUM_STYLES for number, variant in enumerate(comparison.arms)},
        variant_names=names,
        figures=list(zip(COLUMNS[1:], values, strict=True)),
        speed=speed_chart(comparison),
        charts=make_charts(comparison),
        effect_words={
            "all": "everything",
            "quality": "loss and answers",
            "speed": "speed, memory, energy",
            "note": "nothing by itself",
        },
        provenance=_provenance_lines(comparison.provenance["of_first_run"]),
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
    )


def without_folders(text: str) -> str:
    """`text` with the last part alone of each absolute path: the page may be sent to others."""
    return re.sub(r"(?<![\w.:/<])~?/(?=\S)(?:[^\s/'\",;]+/)*", "", text)


def _title(comparison: Comparison) -> str:
    model = str(comparison.provenance["model"] or "model").rstrip("/").split("/")[-1]
    *others, last = [variant.name for variant in comparison.arms]
    return f"{model}: {', '.join(others)} and {last} compared" if others else f"{model}: {last}"


def _facts(comparison: Comparison) -> list[str]:
    """What was trained on what, in short phrases; what the runs do not tell is left out."""
    provenance = comparison.provenance
    parameters, sequences, length = map(provenance.get, ("num_parameters", "global_batch_size", "max_seq_length"))
    gpus = [gpu["name"] for gpu in provenance["of_first_run"].get("gpus") or []]
    made = datetime.fromisoformat(provenance["made_utc"]).strftime("%Y-%m-%d %H:%M UTC")
    facts = [
        f"{parameters / 1e6:,.0f} million parameters" if parameters else "",
        "from random weights" if provenance.get("random_weights") else "",
        f"{sequences:,} sequences of {length:,} tokens a step" if sequences and length else "",
        f"{len(gpus)} x {gpus[0]}" if gpus else "CPU",
        f"{sum(variant.num_seeds for variant in comparison.arms)} runs of {provenance['num_steps']:,} steps",
        f"up to {provenance['tokens_seen']:,.0f} tokens each" if provenance["tokens_seen"] else "",
        f"dataset {provenance['dataset']}" if provenance["dataset"] else "",
        f"made {made}",
    ]
    return [fact for fact in facts if fact]


def _provenance_lines(provenance: dict[str, Any]) -> list[tuple[str, str]]:
    git, cpu, gpus = (provenance.get(name) or {} for name in ("git", "cpu", "gpus"))
    packages = {name: version for name, version in (provenance.get("packages") or {}).items() if version}
    versions = [str(provenance.get(key) or "unknown") for key in ("driver", "cuda", "cudnn")] if gpus else []
    lines = [
        ("command", " ".join(provenance.get("command") or [])),
        ("commit", f"{git.get('commit', '')}{' with uncommitted changes' if git.get('dirty') else ''}"),
        ("GPUs", ", ".join(f"{gpu['name']}, {gpu['memory_gib']} GiB" for gpu in gpus) or NOT_APPLICABLE),
        ("driver, CUDA, cuDNN", ", ".join(versions) or NOT_APPLICABLE),
        ("python", str(provenance.get("python", ""))),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items())),
        ("processor", f"{cpu.get('model')}, {cpu.get('num_cores')} cores"),
        ("system", str(provenance.get("os", ""))),
        ("environment", ", ".join(f"{name}={value}" for name, value in (provenance.get("environment") or {}).items())),
    ]
    return [(name, text) for name, text in lines if text.strip()] if provenance else []
