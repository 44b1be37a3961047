#!/usr/bin/env python
"""Draw the plots of the documentation from recorded results.

    python benchmarks/plots.py speed benchmarks/results/speed_table_h200.json benchmarks/plots/speed_8b.png --row 8b
    python benchmarks/plots.py parts benchmarks/results/speed_table_h200.json benchmarks/plots/step_8b.png --row 8b \\
        --variants bf16,current,delayed
    python benchmarks/plots.py curves benchmarks/results/gsm8k_curves.json benchmarks/plots/gsm8k_curves.png
    python benchmarks/plots.py pretrained benchmarks/results/pretrained.json benchmarks/plots/pretrained.png

`speed` shows tokens/s and peak memory of the baselines and our plain recipes, or of --variants. `parts` shows the parts
of a recorded step. `curves` shows the eval loss of training from scratch (benchmarks/gsm8k_curves.py). `pretrained`
shows the cost of fp8 in a pretrained model (benchmarks/pretrained.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.script import run_script, writable
from llm_fp8.utils.errors import OneSentenceParser, UserError, reading
from llm_fp8.utils.json_files import read_json

Row = dict[str, Any]

COLOURS = {
    "bf16": "#444444",
    "delayed": "#d1495b",
    "current": "#00798c",
    "block": "#edae49",
    "hf_bf16": "#b0b7c3",
    "hf_bf16_compiled": "#8a93a3",
    "accelerate_te": "#8fb8de",
    "torchao_tensorwise": "#9ccfa0",
    "torchao_rowwise": "#6fae75",
}
"""Precision of our variants, or name of a baseline -> colour."""
OTHER_COLOUR = "#2e4057"
LABELS = {
    "hf_bf16": "Hugging Face + Accelerate, bf16",
    "hf_bf16_compiled": "the same, compiled",
    "accelerate_te": "Accelerate's fp8",
    "torchao_tensorwise": "torchao tensorwise, fp8",
    "torchao_rowwise": "torchao rowwise, fp8",
}
"""Baseline -> its label. The label of our variants is their name."""
PARTS = {"GEMMs": ("gemm",), "attention": ("attention",), "casts": ("cast",), "all else": ()}
"""Part of a step -> its kernel classes. The last part has all other classes."""
PART_COLOURS = ("#4a6fa5", "#9db7d8", "#1f2d44", "#c9ced6")
DARK_PARTS = ("#4a6fa5", "#1f2d44")
DRAWN = {
    "bf16": ("bf16", COLOURS["bf16"], "-"),
    "hf_bf16": ("Hugging Face, bf16", COLOURS["hf_bf16_compiled"], "-"),
    "delayed": ("delayed", COLOURS["delayed"], "-"),
    "delayed_qkv_bf16": ("delayed, qkv in bf16", COLOURS["delayed"], "--"),
    "delayed_fp8head": ("delayed, fp8 lm_head gradients", COLOURS["delayed"], "--"),
    "delayed_fp8head_all": ("delayed, fp8 lm_head", COLOURS["delayed"], ":"),
    "current": ("current", COLOURS["current"], "-"),
    "block": ("block", COLOURS["block"], "-"),
    "block_qkv_bf16": ("block, qkv in bf16", COLOURS["block"], "--"),
}
"""Variant of benchmarks/pretrained.py or gsm8k_curves.py -> label, colour and line style."""


def write_message(figure: Any, message: str, measured: str) -> None:
    """Write `message` as the plot's title, and at the bottom `measured`, a description of the measurement."""
    figure.suptitle(message, x=0.01, ha="left", fontsize=12, weight="bold")
    figure.supxlabel(measured, x=0.01, ha="left", fontsize=9, color="#555555")


def label_ends(axis: Any, x: float, ends: dict[str, tuple[float, Any]], gap: float) -> None:
    """Write the label of each line at the line's right end, whose x coordinate is `x`. `ends` maps a label to the y
    coordinate of the line's end and to the colour. Labels are at least `gap` apart, in units of the y axis.
    """
    height = float("-inf")
    for label, (end, colour) in sorted(ends.items(), key=lambda item: item[1][0]):
        height = max(end, height + gap)
        placement = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
        axis.annotate(label, (x, height), (6, 0), color=colour, fontsize=10, **placement)


def save(figure: Any, path: Path) -> None:
    """Write a PNG of twice the displayed size, in 64 colours. A white background suits both light and dark pages."""
    figure.savefig(path, dpi=200, facecolor="white")
    plt.close(figure)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


def precision_of(variant: str) -> str:
    """Split a variant's name at ":". Return the part in `COLOURS` ('bf16' of 'fsdp_full:bf16'), or else the first."""
    parts = variant.split(":")
    return next((part for part in parts if part in COLOURS), parts[0])


def read_rows(path: Path, row_name: str | None, variants: list[str] | None) -> list[Row]:
    """Return from the file `path` the results of `variants` or, by default, of all baselines and of the recipes without
    further options. The workload is `row_name` or, by default, the only one. Raise `UserError` if one is missing.
    """
    with reading("results", path, "the rows of a throughput benchmark"):
        record = read_json(path)
        gpu = record["provenance"]["gpus"][0]["name"].removeprefix("NVIDIA ")
        by_name: dict[str, list[Row]] = {}
        for row in record["rows"]:
            by_name.setdefault(row.get("row", row["workload"]), []).append({"gpu": gpu, **row})
    if row_name is None and len(by_name) == 1:
        (row_name,) = by_name
    if row_name not in by_name:
        raise UserError(f"--row {row_name}: {path} has {', '.join(by_name)}; name one of them.")
    rows = by_name[row_name]
    if variants is None:
        plain = [row for row in rows if row["baseline"] or row["variant"].split(":")[-1] in COLOURS]
        return sorted(plain, key=lambda row: (row["baseline"] is None, speed(row)))
    measured = {row["variant"]: row for row in rows}
    for name in variants:
        if name not in measured:
            raise UserError(f"--variants {name}: row {row_name} of {path} has {', '.join(measured)}.")
    return [measured[name] for name in variants]


def speed(row: Row) -> float:
    """Return the tokens/s per GPU, or 0 if they were not measured. On real documents padding does not count."""
    key = "real_tokens_per_s" if row.get("dataset") else "tokens_per_s"
    return row.get(key, 0.0) / row.get("num_gpus", 1)


def label(row: Row) -> str:
    name = row["variant"]
    if row["baseline"]:
        return name.replace(row["baseline"], LABELS[row["baseline"]])
    return f"ours: {name}" if precision_of(name) == "bf16" else f"ours: fp8 {name}"


def describe_workload(row: Row) -> str:
    num_gpus = row.get("num_gpus", 1)
    gpus = f"{num_gpus} {row['gpu']}s" if num_gpus > 1 else f"one {row['gpu']}"
    num_tokens = num_gpus * row["micro_batches"] * row["batch_size"] * row["seq_length"]
    weights = "" if row.get("dataset") else " with random weights"
    return f"{row['model']}{weights} on {gpus}, {num_tokens:,} tokens a step"


def finish(axis: Any) -> None:
    """Draw the first bar at the top of `axis`, and hide ticks and frame."""
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.tick_params(left=False)
    axis.spines[:].set_visible(False)


def draw_speed(rows: list[Row], path: Path) -> None:
    """Draw a bar per variant with tokens/s and peak memory. The title compares our fastest with the baselines."""
    figure, axis = plt.subplots(figsize=(8, 1 + 0.34 * len(rows)), layout="constrained")
    best = max(map(speed, rows))
    for place, row in enumerate(rows):
        if not speed(row):
            axis.text(0.01 * best, place, str(row.get("failed", "out of memory"))[:40], va="center", fontsize=10)
            continue
        axis.barh(place, speed(row), color=COLOURS.get(precision_of(row["variant"]), OTHER_COLOUR), height=0.75)
        weight = "normal" if row["baseline"] else "bold"
        axis.text(1.01 * speed(row), place, f"{speed(row):,.0f}", va="center", fontsize=10, weight=weight)
        axis.text(1.29 * best, place, f"{row['peak_memory_gib']:.0f} GiB", va="center", ha="right", fontsize=10)
    axis.set_yticks(range(len(rows)), list(map(label, rows)), fontsize=10)
    axis.set_xlim(0, 1.3 * best)
    finish(axis)
    fastest = max((row for row in rows if not row["baseline"]), key=speed, default=rows[0])
    others = [row for row in rows if precision_of(row["variant"]) == "bf16"]
    others += sorted((row for row in rows if row["baseline"]), key=speed)[-1:]
    slower = [row for row in others if row is not fastest and speed(row)]
    gains = ", ".join(f"{speed(fastest) / speed(row):.2f} times {label(row)}" for row in slower)
    message = f"Speed of {label(fastest)}: {gains}".replace("ours:", "our")
    write_message(figure, message, f"{describe_workload(rows[0])}; tokens per second and peak memory")
    save(figure, path)


def step_parts(row: Row) -> dict[str, float]:
    """Return the ms of each of `PARTS` in the step whose kernels were recorded. Idle time is part of "all else"."""
    step = row["recorded_step"]
    classes = dict(step["time_s_by_class"])
    parts = {part: 1e3 * sum(classes.pop(name, 0.0) for name in names) for part, names in PARTS.items()}
    parts["all else"] += 1e3 * (sum(classes.values()) + step.get("gap_s", 0.0))
    return parts


def draw_parts(rows: list[Row], path: Path) -> None:
    """Draw each variant's time of a step, split into `PARTS`. The title compares the last variant with the first."""
    with reading("results", path, "a recorded step of each variant"):
        parts = [step_parts(row) for row in rows]
    figure, axis = plt.subplots(figsize=(8, 1.6 + 0.55 * len(rows)), layout="constrained")
    longest = max(sum(row_parts.values()) for row_parts in parts)
    for place, row_parts in enumerate(parts):
        left = 0.0
        for (part, time_ms), colour in zip(row_parts.items(), PART_COLOURS, strict=True):
            axis.barh(place, time_ms, left=left, color=colour, height=0.6, label=part if place == 0 else None)
            if time_ms > 0.04 * longest:
                style = {"ha": "center", "va": "center", "fontsize": 9}
                style["color"] = "white" if colour in DARK_PARTS else "black"
                axis.text(left + time_ms / 2, place, f"{time_ms:,.0f}", **style)
            left += time_ms
        axis.text(left + 0.01 * longest, place, f"{left:,.0f}", va="center", fontsize=10, weight="bold")
    axis.set_yticks(range(len(rows)), list(map(label, rows)), fontsize=10)
    axis.set_xlim(0, 1.1 * longest)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(PARTS), frameon=False, fontsize=9)
    finish(axis)
    less = parts[0]["GEMMs"] - parts[-1]["GEMMs"]
    more = sum(parts[-1].values()) - sum(parts[0].values()) + less
    message = f"fp8 {rows[-1]['variant']} takes {less:,.0f} ms off the GEMMs and adds {more:,.0f} ms elsewhere"
    write_message(figure, message, f"{describe_workload(rows[0])}; milliseconds of a step")
    save(figure, path)


def draw_curves(record: Row, path: Path) -> None:
    """Draw eval losses in the second half of runs: each variant's mean over seeds, and bf16's range."""
    runs = record["runs"]
    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    ends, finals, last = {}, {}, 0.0
    for variant in dict.fromkeys(run["variant"] for run in runs):
        evaluations = np.array([run["evaluations"] for run in runs if run["variant"] == variant])
        tokens, losses = evaluations[0, :, 1] / 1e6, evaluations[:, :, 2]
        last = tokens.max()
        name, colour, line = DRAWN[variant]
        axis.plot(tokens, losses.mean(axis=0), line, color=colour)
        if variant == "bf16":
            axis.fill_between(tokens, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        finals[variant] = losses[:, -1]
        ends[name] = (losses[:, -1].mean(), colour)
    lowest = min(map(np.min, finals.values()))
    axis.set_xlim(0.5 * last, last)
    axis.set_ylim(lowest - 0.02, lowest + 0.38)
    label_ends(axis, last, ends, 0.022)
    axis.set_xlabel("tokens seen (millions)")
    axis.set_ylabel("eval loss (nats per token)")
    axis.spines[["top", "right"]].set_visible(False)
    low, high = finals["bf16"].min(), finals["bf16"].max()
    inside = "inside" if all(low <= losses.mean() <= high for losses in finals.values()) else "not always inside"
    message = f"From scratch every recipe ends {inside} the spread of bf16's seeds"
    size = f"{runs[0]['num_parameters'] / 1e6:.0f}M parameters"
    write_message(figure, message, f"{size} on the text of GSM8K; means of seeds, band: bf16's")
    save(figure, path)


def draw_pretrained(record: Row, path: Path) -> None:
    """Draw the cost of each variant against the learning rate. The cost is the eval loss of the variant's bf16 export
    minus that of the bf16 run with the same seed. Each point is a run, and a line connects the means over seeds.
    """
    runs = [run for run in record["runs"] if run["seed"]]
    losses = {(run["variant"], run["learning_rate"], run["seed"]): run["bf16_eval_loss"] for run in runs}
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    ends, fp8_means = {}, []
    for variant, (name, colour, line) in DRAWN.items():
        gaps: dict[float, list[float]] = {}
        for (run_variant, rate, seed), loss in sorted(losses.items()):
            if run_variant == variant and ("bf16", rate, seed) in losses:
                gaps.setdefault(rate, []).append(loss - losses["bf16", rate, seed])
        if not gaps:
            continue
        means = list(map(fmean, gaps.values()))
        axis.plot(list(gaps), means, line, color=colour)
        for rate, seeds in gaps.items():
            axis.plot([rate] * len(seeds), seeds, "o", color=colour, markersize=4)
        ends[name] = (means[-1], colour)
        if variant not in ("bf16", "hf_bf16"):
            fp8_means += means
    (low, high), rates = axis.get_ylim(), sorted({rate for _, rate, _ in losses if rate})
    label_ends(axis, rates[-1], ends, (high - low) / 20)
    axis.set_xscale("log")
    axis.set_xlim(right=1.06 * rates[-1])
    axis.set_xticks(rates, [f"{rate:.0e}".replace("e-0", "e-") for rate in rates])
    axis.minorticks_off()
    axis.set_xlabel("learning rate")
    axis.set_ylabel("eval loss above bf16's (nats per token)")
    axis.spines[["top", "right"]].set_visible(False)
    message = f"fp8 costs a pretrained 135M model {min(fp8_means):.3f} to {max(fp8_means):.3f} nats of eval loss"
    measured = "SmolLM2-135M-Instruct fine-tuned on GSM8K, exported; points: seeds, lines: their means"
    write_message(figure, message, measured)
    save(figure, path)


def main() -> int:
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("plot", choices=["speed", "parts", "curves", "pretrained"])
    parser.add_argument("results", type=Path, help="JSON file of the benchmark")
    parser.add_argument("output", type=writable, help="PNG file to write")
    parser.add_argument("--row", help="speed, parts: row of the speed table; needed if the file has several")
    parser.add_argument("--variants", help="speed, parts: variants to draw, in this order, separated by commas")
    options = parser.parse_args()
    if options.plot in ("speed", "parts"):
        rows = read_rows(options.results, options.row, options.variants.split(",") if options.variants else None)
        (draw_speed if options.plot == "speed" else draw_parts)(rows, options.output)
    else:
        with reading("results", options.results, "the runs"):
            record = read_json(options.results)
            (draw_curves if options.plot == "curves" else draw_pretrained)(record, options.output)
    print(options.output)
    return 0


if __name__ == "__main__":
    run_script(main)
