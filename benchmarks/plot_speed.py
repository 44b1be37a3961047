#!/usr/bin/env python
"""Draw tokens/s and the parts of a step of one workload, from a file of `scripts/benchmark.py`,
`scripts/benchmark_multi_gpu.py` or `benchmarks/speed_table.py`.

    table=benchmarks/results/speed_table_h200.json
    python benchmarks/plot_speed.py $table --row 8b --output benchmarks/plots/speed_8b.png
    python benchmarks/plot_speed.py $table --row 8b --parts --arms bf16,current,delayed \
        --output benchmarks/plots/step_8b.png

A bar is the median step of a variant. Without --arms the variants of ours that have no further option are drawn beside
all baselines.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.colours import colours_of, save, trained_in, write_message
from llm_fp8.tools.bench.variants import BASELINES
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import read_json, require_writable

Row = dict[str, Any]

LABELS = {
    "hf_bf16": "Hugging Face + Accelerate, bf16",
    "hf_bf16_compiled": "the same, compiled",
    "accelerate_te": "Accelerate's fp8",
    "te_autocast": "te.autocast by hand, fp8",
    "torchao_tensorwise": "torchao tensorwise, fp8",
    "torchao_rowwise": "torchao rowwise, fp8",
}
"""Of baselines; a variant of ours has its name."""
PARTS = {"GEMMs": ("gemm",), "attention": ("attention",), "casts": ("cast",), "all else": ()}
"""Part of a step -> its kernel classes; the last one takes the rest."""
PART_COLOURS = ("#4a6fa5", "#9db7d8", "#1f2d44", "#c9ced6")
"""None of a precision's."""


def read_rows(path: Path, workload: str | None, variants: list[str] | None) -> list[Row]:
    """The rows of one workload, in the order of `variants`, or baselines first. Raises `UserError` where the file has
    no such rows.
    """
    record = read_json(path)
    try:
        by_workload: dict[str, list[Row]] = {}
        gpus = [gpu["name"].removeprefix("NVIDIA ") for gpu in (record.get("provenance") or {}).get("gpus") or ()]
        for row in record["rows"]:
            by_workload.setdefault(workload_of(row), []).append({"gpu": gpus[0] if gpus else "GPU"} | row)
            trained_in(row["arm"])
    except (KeyError, TypeError, StopIteration) as error:
        raise UserError(
            f"results {path}: not a file of a throughput benchmark ({type(error).__name__}: {error})."
        ) from error
    if workload is None and len(by_workload) == 1:
        (workload,) = by_workload
    if workload not in by_workload:
        raise UserError(f"--row {workload}: {path} has {', '.join(by_workload) or 'no rows'}; name one of them.")
    rows = by_workload[workload]
    if variants is None:
        ours = [row for row in rows if not is_baseline(row) and row["arm"].split(":")[-1] == trained_in(row["arm"])]
        return sorted(
            [row for row in rows if is_baseline(row)] + ours, key=lambda row: (not is_baseline(row), speed(row))
        )
    found = {row["arm"]: row for row in rows}
    if missing := [name for name in variants if name not in found]:
        raise UserError(f"--arms {missing[0]}: row {workload} of {path} has {', '.join(found)}.")
    return [found[name] for name in variants]


def workload_of(row: Row) -> str:
    """The row of the speed table, else the workload as it is written in options, which the oldest files lack."""
    written = f"{row['model']}:{row['batch_size']}x{row['seq_length']}x{row['micro_batches']}"
    return row.get("row") or row.get("workload", written)


def is_baseline(row: Row) -> bool:
    return trained_in(row["arm"]) in BASELINES


def speed(row: Row) -> float:
    """Tokens/s of one GPU, of real documents without padding; 0 where none was measured."""
    return row.get("real_tokens_per_s", row.get("tokens_per_s", 0.0)) / row.get("num_gpus", 1)


def label(row: Row) -> str:
    name = row["arm"]
    if is_baseline(row):
        return name.replace(trained_in(name), LABELS[trained_in(name)])
    return f"ours: {'' if trained_in(name) == 'bf16' else 'fp8 '}{name}"


def what_was_trained(rows: list[Row]) -> str:
    """The workload, for the line below the title."""
    row = rows[0]
    gpus = f"{row['num_gpus']} {row['gpu']}s" if row.get("num_gpus", 1) > 1 else f"one {row['gpu']}"
    return f"{row['model']}, micro-batches of {row['batch_size']} x {row['seq_length']:,} tokens, {gpus}"


def draw_speed(rows: list[Row], path: Path) -> None:
    """A bar per variant with its tokens/s and peak memory; the title says what ours gain."""
    figure, axis = plt.subplots(figsize=(8, 1 + 0.34 * len(rows)), layout="constrained")
    best = max(map(speed, rows))
    for place, (row, colour) in enumerate(zip(rows, colours_of([row["arm"] for row in rows]), strict=True)):
        if not speed(row):
            axis.text(0.01 * best, place, row.get("failed", "out of memory")[:40], va="center", fontsize=10)
            continue
        axis.barh(place, speed(row), color=colour, height=0.75)
        weight = "normal" if is_baseline(row) else "bold"
        axis.text(1.01 * speed(row), place, f"{speed(row):,.0f}", va="center", fontsize=10, weight=weight)
        axis.text(1.29 * best, place, f"{row['peak_memory_gib']:.0f} GiB", va="center", ha="right", fontsize=10)
    axis.set_yticks(range(len(rows)), list(map(label, rows)), fontsize=10)
    axis.set_xlim(0, 1.3 * best)
    finish(axis)
    write_message(figure, gains(rows), f"{what_was_trained(rows)}; tokens/s and peak memory")
    save(figure, path)


def gains(rows: list[Row]) -> str:
    """The message: how many times as fast the fastest of ours is as ours in bf16 and as the fastest baseline."""
    ours = max((row for row in rows if not is_baseline(row)), key=speed, default=rows[0])
    others = [row for row in rows if row["arm"].split(":")[-1] == "bf16"]
    others += sorted((row for row in rows if is_baseline(row)), key=speed)[-1:]
    words = [
        f"{speed(ours) / speed(row):.2f} times {label(row) if is_baseline(row) else 'our bf16'}"
        for row in others
        if row is not ours and speed(row)
    ]
    return f"{ours['arm']}: {', '.join(words) or f'{speed(ours):,.0f} tokens/s'}"


def step_parts(row: Row) -> dict[str, float]:
    """`PARTS` of the recorded step, in ms; the time without a kernel belongs to "all else"."""
    step = row["step"]
    classes = dict(step["time_s_by_class"])
    found = {part: 1e3 * sum(classes.pop(name, 0.0) for name in names) for part, names in PARTS.items()}
    found["all else"] += 1e3 * (sum(classes.values()) + step.get("gap_s", 0.0))
    return found


def draw_parts(rows: list[Row], path: Path) -> None:
    """A bar per variant, cut into `PARTS`, each named where it is first wide enough; the title says where the last
    one's time differs from the first one's.
    """
    if any("step" not in row for row in rows):
        raise UserError("--parts: it needs variants that benchmarks/speed_table.py measured, with a recorded step.")
    figure, axis = plt.subplots(figsize=(8, 1.3 + 0.55 * len(rows)), layout="constrained")
    parts = [step_parts(row) for row in rows]
    longest = max(sum(of_row.values()) for of_row in parts)
    unnamed = list(PARTS)
    for place, of_row in enumerate(parts):
        left = 0.0
        for (part, time_ms), colour in zip(of_row.items(), PART_COLOURS, strict=True):
            axis.barh(place, time_ms, left=left, color=colour, height=0.6)
            middle, wide = left + time_ms / 2, time_ms > 0.04 * longest
            words = [f"{time_ms:,.0f}"] if time_ms >= 0.5 and not wide else []
            if wide:
                ink = "white" if sum(to_rgb(colour)) < 1.5 else "black"
                axis.text(middle, place, f"{time_ms:,.0f}", ha="center", va="center", fontsize=9, color=ink)
            if part in unnamed and (wide or part == "casts" and words):
                unnamed.remove(part)
                words = [part, *words]
            gap = 0.006 * longest
            ends = {"attention": ("right", left + time_ms - gap), "all else": ("left", left + gap)}
            side, at = ends.get(part, ("center", middle))
            axis.text(at, place - 0.33, " ".join(words), ha=side, va="bottom", fontsize=9, color="#555555")
            left += time_ms
        axis.text(left + 0.01 * longest, place, f"{left:,.0f}", va="center", fontsize=10, weight="bold")
    axis.set_yticks(range(len(rows)), list(map(label, rows)), fontsize=10)
    axis.set_xlim(0, 1.1 * longest)
    finish(axis)
    less = parts[0]["GEMMs"] - parts[-1]["GEMMs"]
    more = sum(parts[-1].values()) - sum(parts[0].values()) + less
    message = f"{rows[-1]['arm']} takes {less:,.0f} ms off the GEMMs and adds {more:,.0f} ms elsewhere"
    write_message(figure, message, f"{what_was_trained(rows)}; ms of a step")
    save(figure, path)


def finish(axis: Any) -> None:
    """The first bar on top, no frame."""
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.tick_params(left=False)
    axis.spines[:].set_visible(False)


def main(argv: list[str] | None = None) -> int:
    """Read, draw."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=Path, help="JSON file that a throughput benchmark wrote")
    parser.add_argument("--row", help="row of the speed table, or workload; needed where the file has several")
    parser.add_argument("--arms", help="variants to draw, in this order, separated by commas")
    parser.add_argument("--parts", action="store_true", help="the parts of a step in place of tokens/s")
    parser.add_argument("--output", required=True, type=Path, help="PNG file to write")
    options = parser.parse_args(argv)
    if options.output.suffix != ".png":
        raise UserError(f"--output {options.output}: give a name that ends in .png.")
    require_writable("--output", options.output)
    rows = read_rows(options.results, options.row, options.arms.split(",") if options.arms else None)
    (draw_parts if options.parts else draw_speed)(rows, options.output)
    print(options.output)
    return 0


if __name__ == "__main__":
    run_script(main)
