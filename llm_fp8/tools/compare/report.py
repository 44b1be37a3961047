"""Report a comparison as JSON, as a table on the terminal, and as a self-contained HTML page without scripts."""

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

from llm_fp8.tools.compare.figures import MIN_SEEDS, Difference, VariantFigures, find_differences, variant_figures
from llm_fp8.tools.compare.run_record import REFERENCE, RunRecord
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
    """The content of comparison.json. The reference variant is the first of `variants`."""

    variants: list[VariantFigures]
    verdicts: dict[str, Verdict]
    differences: list[Difference]
    failures: list[Failure]
    curves: list[dict[str, Any]]  # each run's variant and seed, its losses and eval losses as (step, loss)
    runs: dict[str, str]  # label of a run -> its folder or W&B path
    provenance: dict[str, Any]  # the provenance of the first run; `differences` lists how other runs differ
    quality_margin: float


def compare(runs: Sequence[RunRecord], failures: Sequence[Failure] = (), margin: float = QUALITY_MARGIN) -> Comparison:
    """Compare finished runs. `margin` is --quality_margin. Raise `UserError` if two runs share variant and seed."""
    sources: dict[str, str] = {}
    for run in runs:
        if run.label in sources:
            duplicate = f"{sources[run.label]} and {run.source} are both of precision {run.label}"
            raise UserError(f"{duplicate}; give only one run for each precision and seed.")
        sources[run.label] = run.source
    in_order = sorted(runs, key=lambda run: (run.variant != REFERENCE, run.seed))
    differences = find_differences(runs)
    num_failed = Counter(failure.variant for failure in failures)
    names = dict.fromkeys([*(run.variant for run in in_order), *num_failed])
    by_variant = {name: [run for run in in_order if run.variant == name] for name in (REFERENCE, *names)}
    variants = sorted(names, key=lambda variant: variant != REFERENCE)
    figures = [variant_figures(name, by_variant[name], by_variant[REFERENCE], num_failed[name]) for name in variants]
    baseline = figures[0] if figures[0].variant == REFERENCE else None
    verdicts = {each.variant: judge(each, baseline, differences, margin) for each in figures}
    if baseline and len(figures) == 1:
        seeds = ", ".join(map(str, baseline.seeds))
        alone = f"Every run is in {baseline.name}, so there is nothing to compare: add fp8 runs with seeds {seeds}."
        verdicts = {REFERENCE: Verdict("nothing to compare", [alone])}
    first, curves = runs[0].stored, []
    for run in in_order:
        losses = {"loss": run.steps, "eval_loss": run.evaluations}
        points = {key: [(entry["step"], entry[key]) for entry in entries] for key, entries in losses.items()}
        curves.append({"variant": run.variant, "seed": run.seed, **points})
    return Comparison(
        variants=figures,
        verdicts=verdicts,
        differences=differences,
        failures=list(failures),
        curves=curves,
        runs=sources,
        provenance={**first["provenance"], **first["config"]["model"]},
        quality_margin=margin,
    )


def _text(value: object, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def figure_texts(figures: VariantFigures) -> dict[str, str]:
    """Format one variant's figures. Return a dict from the title of each figure, with its unit, to the text."""
    certificate, time_s = figures.certificate, figures.time_to_reference_loss_s
    return {
        "eval loss, nats/token": _text(fmean(figures.eval_loss.values()) if figures.eval_loss else None, ".4f"),
        "gap to bf16, nats/token": _text(figures.loss_gap, "+.4f"),
        "ran as": " and ".join(figures.effective) if set(figures.effective) - {figures.name} else "-",
        "runs": f"{len(figures.seeds)}" + (f", {figures.num_failed} failed" if figures.num_failed else ""),
        "tokens/s": _text(figures.tokens_per_s, ",.0f"),
        "speed-up over bf16": _text(figures.speedup, ".3f"),
        "peak memory, GiB": _text(figures.peak_memory_gib, ".1f"),
        "energy, J per million tokens": _text(figures.energy_j_per_million_tokens, ",.0f"),
        "time to bf16's final loss, s": "not reached" if figures.loss_gap and time_s is None else _text(time_s, ",.1f"),
        "exact match, %": _text(figures.exact_match_percent, ".1f"),
        "exact match above bf16's, points": _text(figures.exact_match_gap, "+.1f"),
        "certificate": ": ".join([certificate.state, *filter(None, ["; ".join(certificate.reasons)])]),
    }


def figure_table(comparison: Comparison) -> dict[str, list[str]]:
    """Map the title of each figure to its text for each variant. Leave out figures that no variant has."""
    columns = [figure_texts(figures) for figures in comparison.variants]
    rows = {title: [column[title] for column in columns] for title in columns[0]}
    return {title: texts for title, texts in rows.items() if set(texts) != {"-"}}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print verdicts, figures, failures and differences. `console` must not interpret markup."""
    for verdict in comparison.verdicts.values():
        if verdict.sentences:
            console.print(f"[{verdict.conclusion}] {' '.join(verdict.sentences)}")
    table = Table("", *(figures.name for figures in comparison.variants))
    for title, texts in figure_table(comparison).items():
        table.add_row(title, *texts)
    console.print(table)
    for failure in comparison.failures:
        console.print(f"FAILED {failure.variant} seed {failure.seed}: {failure.reason} ({failure.log})")
    for difference in comparison.differences:
        values = "; ".join(f"{value} ({', '.join(labels)})" for value, labels in difference.values.items())
        console.print(f"differs [{difference.effect}] {difference.field}: {values}")


def leading_variant(comparison: Comparison) -> str:
    """Return the variant for the top of the page: the fastest with the verdict "use it", else the fastest of all."""
    others = [figures for figures in comparison.variants if figures.variant != REFERENCE] or comparison.variants
    speeds = {figures.variant: figures.speedup.value if figures.speedup else 0.0 for figures in others}
    return max(speeds, key=lambda name: (comparison.verdicts[name].conclusion == "use it", speeds[name]))


def gap_chart(comparison: Comparison) -> dict[str, Any] | None:
    """Return a chart's data: the eval loss of each run minus that of the bf16 run with the same seed, by step. If any
    run has fewer than three evaluations, use trailing means of the training loss. Return None for less than two steps.
    """
    key = "eval_loss" if min(len(curve["eval_loss"]) for curve in comparison.curves) > 2 else "loss"
    reference = {curve["seed"]: dict(curve[key]) for curve in comparison.curves if curve["variant"] == REFERENCE}
    styles = {figures.variant: number for number, figures in enumerate(comparison.variants)}
    lines, shown = [], []
    for curve in comparison.curves:
        base = reference.get(curve["seed"], {})
        gaps = [(step, loss - base.get(step, math.nan)) for step, loss in curve[key]]
        gaps = [(step, gap) for step, gap in gaps if math.isfinite(gap)]
        window = len(gaps) // 20 + 1 if key == "loss" else 1
        points = [(step, fmean(gap for _, gap in gaps[max(0, n - window) : n])) for n, (step, _) in enumerate(gaps, 1)]
        lines.append((styles[curve["variant"]], f"{curve['variant']}, seed {curve['seed']}", points))
        shown += points
    if len(dict(shown)) < 2:
        return None
    x_ends, y_ends = ((min(values), max(values)) for values in zip(*shown, strict=True))
    loss = "Eval loss" if key == "eval_loss" else "Training loss (trailing mean over a twentieth of the steps)"
    title = f"{loss} above bf16's of the same seed, nats/token"
    ticks = {"x_ticks": _ticks(*x_ends, whole=True), "y_ticks": _ticks(*y_ends)}
    return {"title": title, "lines": lines, "x_ends": x_ends, "y_ends": y_ends, **ticks}


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Return about four round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / 4 or 1))
    distance = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= (high - low) / 4)
    distance = max(distance, 1.0) if whole else distance
    return [distance * n for n in range(math.ceil(low / distance), math.floor(high / distance) + 1)]


def without_folders(text: Any) -> Any:
    """Shorten absolute paths in `text` to their last part, since the report page may be sent to others."""
    return re.sub(r"(?<![\w.:/<])~?/(?=\S)(?:[^\s/'\",;]+/)*", "", text) if type(text) is str else text


def render_page(comparison: Comparison) -> str:
    options: Any = {"autoescape": True, "undefined": StrictUndefined, "finalize": without_folders}
    page = Environment(loader=FileSystemLoader(ASSETS), **options).get_template("page.html")
    return page.render(
        comparison=comparison,
        provenance=comparison.provenance,
        lead=leading_variant(comparison),
        figures=figure_table(comparison),
        chart=gap_chart(comparison),
        has_intervals=any(len(figures.seeds) >= MIN_SEEDS for figures in comparison.variants),
        style=(ASSETS / "page.css").read_text(encoding="utf-8"),
    )
