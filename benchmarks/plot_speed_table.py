#!/usr/bin/env python
"""Draw the file of `benchmarks/speed_table.py`.

    python benchmarks/plot_speed_table.py benchmarks/results/speed_table_h200.json --output
    benchmarks/plots/speed_table.png

Up to three pictures, the last two where the file has something for them:

    speed_table.png           tokens/s with targets, and peak memory, as plot_throughput.py draws them
    speed_table_kernels.png   the time of a step by kernel class: GEMMs below, a black line at the measured rates; on
                              top the time in which no kernel ran, on one GPU
    speed_table_scaling.png   tokens/s per GPU over the number of GPUs; the point of one GPU is the same recipe there
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.plot_throughput import draw as draw_speeds
from benchmarks.plot_throughput import group_of, panels, read_rows, require_png, save, tokens_per_s
from llm_fp8.observability.kernel_trace import KERNEL_CLASSES
from llm_fp8.tools.bench.variants import recorded_variant
from llm_fp8.utils.errors import OneSentenceParser, run_script

Row = dict[str, Any]
GAP = "no kernel"


def step_parts(row: Row) -> dict[str, float]:
    """What a step consists of, in ms: kernel class -> time, GEMMs first, then the gaps."""
    step = row["step"]
    found = {name: step["time_s_by_class"][name] * 1e3 for name in KERNEL_CLASSES if name in step["time_s_by_class"]}
    return {**found, GAP: step["gap_s"] * 1e3} if "gap_s" in step else found


def draw_kernels(rows: list[Row], path: Path) -> bool:
    """A panel per workload, a bar per variant; False where no row knows its kernels."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if "step" in row:
            groups.setdefault(group_of(row), []).append(row)
    if not groups:
        return False
    figure, columns = panels([len(found) for found in groups.values()], 6)
    colours = dict(
        zip((*KERNEL_CLASSES, GAP), (*plt.get_cmap("tab20").colors[: len(KERNEL_CLASSES)], "#eeeeee"), strict=True)
    )
    for (axis,), (group, found) in zip(columns, groups.items(), strict=True):
        for place, row in enumerate(found):
            bottom = 0.0
            for name, time_ms in step_parts(row).items():
                axis.bar(place, time_ms, bottom=bottom, color=colours[name], width=0.8)
                bottom += time_ms
            if row["step"]["gemm_floor_s"] is not None:
                axis.hlines(row["step"]["gemm_floor_s"] * 1e3, place - 0.4, place + 0.4, color="black", linewidth=2)
        axis.set_title(group, fontsize=10)
        axis.set_xticks(range(len(found)), [row["arm"] for row in found], rotation=45, ha="right")
        axis.spines[["top", "right"]].set_visible(False)
    columns[0][0].set_ylabel("one step (ms); black: GEMMs at the measured rates")
    used = [name for name in colours if any(name in step_parts(row) for found in groups.values() for row in found)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[name]) for name in used]
    figure.legend(handles[::-1], used[::-1], loc="outside right center", fontsize=8)
    save(figure, path)
    return True


def scaling_lines(rows: list[Row]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Model and row length -> variant on several GPUs -> points (number of GPUs, tokens/s per GPU), those of one GPU
    included; lines of one point left out.
    """
    measured = [row for row in rows if "tokens_per_s" in row and row.get("text") is None]
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in measured:
        variant = recorded_variant(row["arm"])
        if variant.mode is None:
            continue
        title = f"{row['model']}, rows of {row['seq_length']:,}"
        line = lines.setdefault(title, {}).setdefault(row["arm"], [])
        of_one = (
            one
            for one in measured
            if (one["arm"], one["workload"]) == (variant.on_one_gpu, row["workload"]) and one.get("num_gpus", 1) == 1
        )
        if not line and (one := next(of_one, None)) is not None:
            line.append((1, tokens_per_s(one)[0]))
        line.append((row["num_gpus"], tokens_per_s(row)[0]))
    long_ones = {
        title: {variant: sorted(line) for variant, line in of_one.items() if len(line) > 1}
        for title, of_one in lines.items()
    }
    return {title: found for title, found in long_ones.items() if found}


def draw_scaling(rows: list[Row], path: Path) -> bool:
    """A panel per model and row length, a line per variant; False where nothing was measured on two numbers of GPUs."""
    lines = scaling_lines(rows)
    if not lines:
        return False
    figure, axes = plt.subplots(1, len(lines), figsize=(6.5 * len(lines), 7), layout="constrained", squeeze=False)
    for axis, (title, of_variants) in zip(axes[0], lines.items(), strict=True):
        for variant, points in of_variants.items():
            axis.plot(*zip(*points, strict=True), marker="o", label=variant)
        numbers = sorted({number for points in of_variants.values() for number, _ in points})
        axis.set_xscale("log", base=2)
        axis.set_xticks(numbers, list(map(str, numbers)))
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("GPUs")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12))  # below, where no line runs
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("tokens/s per GPU")
    save(figure, path)
    return True


def main() -> int:
    """Read, draw, write."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=Path, help="JSON file of benchmarks/speed_table.py")
    parser.add_argument(
        "--output", required=True, type=Path, help="PNG file to write; the other two have its name and a word more"
    )
    options = parser.parse_args()
    require_png("--output", options.output)
    rows = read_rows([options.results])
    draw_speeds(rows, options.output)
    print(options.output)
    for name, draw in (("kernels", draw_kernels), ("scaling", draw_scaling)):
        path = options.output.with_stem(f"{options.output.stem}_{name}")
        print(path if draw(rows, path) else f"nothing for {path.name}: the file has no rows that it could show")
    return 0


if __name__ == "__main__":
    run_script(main)
