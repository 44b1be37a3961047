#!/usr/bin/env python
"""Draw tokens/s and peak memory of the variants that `scripts/benchmark.py`, `scripts/benchmark_multi_gpu.py` or
`benchmarks/speed_table.py` measured.

python benchmarks/plot_throughput.py benchmarks/results/throughput_1b.json benchmarks/results/throughput_3b.json \
    benchmarks/results/throughput_8b.json --output benchmarks/plots/throughput.png

One group of bars per workload and number of GPUs, one bar per variant; the height is the median step. The line on a bar
spans the middle eight tenths of the steps; in files that do not hold them, all steps. Of real documents padding does
not count. A dashed line is a target. What was not measured is named where its bar would stand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.colours import colours_of
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import require_writable

FEWEST_BARS = 3
"""Room for so many even where there are fewer, so that titles and the target's name have theirs."""
BARS_OF_A_LINE = 26
"""So many stand side by side at most before the next group begins a new line of panels."""


def read_rows(paths: list[Path]) -> list[dict[str, Any]]:
    """The rows of all files, in order. Raises `UserError` for a file that holds none."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        try:
            found = json.loads(path.read_text())["rows"]
            groups = [(group_of(row), row["arm"]) for row in found]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is no results file of a throughput benchmark ({type(error).__name__}: {error})."
            ) from error
        if not groups:
            raise UserError(f"{path} holds no rows; let the benchmark finish its first measurement.")
        rows += found
    return rows


def group_of(row: dict[str, Any]) -> str:
    """The label of a row's group: what was trained, on how many GPUs."""
    shape = f"{row['batch_size']} x {row['seq_length']:,} tokens x {row['micro_batches']}"
    gpus = f"\n{row['num_gpus']} GPUs" if row.get("num_gpus", 1) > 1 else ""
    text = "\nreal documents, without padding" if row.get("text") is not None else ""
    return f"{row['model']}\n{shape}{gpus}{text}"


def reason_not_measured(row: dict[str, Any]) -> str | None:
    """Why a row has no figures; None where it has."""
    if "tokens_per_s" in row:
        return None
    return "out of memory" if row.get("out_of_memory") or row["failed"] == "out of memory" else "failed"


def tokens_per_s(row: dict[str, Any]) -> tuple[float, float, float]:
    """Median, lower and upper end of the spread, per GPU."""
    kind = "real_tokens_per_s" if "real_tokens_per_s" in row else "tokens_per_s"
    low, high = ("p10", "p90") if f"{kind}_p10" in row else ("slowest", "fastest")
    keys = (kind, f"{kind}_{low}", f"{kind}_{high}")
    middle, start, end = (row[key] / row.get("num_gpus", 1) for key in keys)
    return middle, start, end


def panels(numbers_of_bars: list[int], height: float, ratios: tuple[int, ...] = (1,)) -> tuple[Any, list[list[Any]]]:
    """A figure with a column of axes per group of bars, wrapped into lines.

    Args:
        numbers_of_bars: of each group; they stand at 0, 1, ...
        height: of a line, inches.
        ratios: heights of the axes of a column, from the top.

    Returns:
        The figure; for each group its axes, from the top.
    """
    lines: list[list[int]] = [[]]
    for width in (max(number, FEWEST_BARS) for number in numbers_of_bars):
        if lines[-1] and sum(lines[-1]) + width > BARS_OF_A_LINE:
            lines.append([])
        lines[-1].append(width)
    space = max(0.75 * sum(line) + len(line) for line in lines)
    figure = plt.figure(figsize=(max(6, space), height * len(lines)), layout="constrained")
    columns: list[list[Any]] = []
    for line, part in zip(lines, figure.subfigures(len(lines), 1, squeeze=False)[:, 0], strict=True):
        # What a shorter line leaves free stays free, so that all bars are about equally wide.
        rest = (space - 0.75 * sum(line) - len(line)) / 0.75
        shares = [*line, *([rest] if rest > 1 else [])]
        axes = part.subplots(
            len(ratios), len(shares), sharex="col", squeeze=False, width_ratios=shares, height_ratios=ratios
        )
        for axis in axes[:, len(line) :].flat:
            axis.set_axis_off()
        for number, width in enumerate(line):
            axes[0, number].set_xlim(-0.6, width - 0.4)  # those of a column share it
            columns.append(list(axes[:, number]))
    return figure, columns


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A column of panels per group, each with a scale of its own: tokens/s above, memory below."""
    groups = list(dict.fromkeys(group_of(row) for row in rows))
    longest = max(len(row["arm"]) for row in rows)
    of_groups = [[row for row in rows if group_of(row) == group] for group in groups]
    figure, columns = panels([len(found) for found in of_groups], 7 + 0.06 * longest, (2, 1))
    for (speeds, memories), group, found in zip(columns, groups, of_groups, strict=True):
        for place, (row, colour) in enumerate(zip(found, colours_of([row["arm"] for row in found]), strict=True)):
            if reason := reason_not_measured(row):
                for axis in (speeds, memories):
                    axis.text(
                        place, 0, f" {reason}", rotation=90, ha="center", va="bottom", fontsize=8, color="#888888"
                    )
                continue
            middle, start, end = tokens_per_s(row)
            bar: dict[str, Any] = {"color": colour, "width": 0.8}
            speeds.bar(place, middle, yerr=[[middle - start], [end - middle]], capsize=4, ecolor="black", **bar)
            speeds.annotate(
                f"{middle:,.0f}",
                (place, end),
                (0, 4),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},  # the target's line may pass behind it
            )
            if "peak_memory_gib" in row:
                memories.bar(place, row["peak_memory_gib"], **bar)
                memories.annotate(
                    f"{row['peak_memory_gib']:.0f}",
                    (place, row["peak_memory_gib"]),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=8,
                )
        if target := found[0].get("target_tokens_per_s_per_gpu"):
            speeds.axhline(target, color="black", linestyle="--", linewidth=1)
            end_of_axis = (speeds.get_xlim()[1] - 0.05, target)
            speeds.annotate(
                f"target {target:,.0f}", end_of_axis, (0, 2), textcoords="offset points", ha="right", fontsize=8
            )
        speeds.set_title(group, fontsize=10)
        memories.set_xticks(range(len(found)), [row["arm"] for row in found], rotation=45, ha="right")
        for axis in (speeds, memories):
            axis.margins(y=0.12)
            axis.set_ylim(bottom=0)
            axis.grid(axis="y", alpha=0.3)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
    for axis, label in zip(columns[0], ("tokens/s per GPU", "peak memory (GiB)"), strict=True):
        axis.set_ylabel(label)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure with many panels as PNG, and let go of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def require_png(flag: str, path: Path) -> None:
    """Raise a `UserError` where no PNG file of this name can be written."""
    if path.suffix != ".png":
        raise UserError(f"{flag} {path}: give a name that ends in .png.")
    require_writable(flag, path)


def main() -> int:
    """Read, draw, write."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="JSON files that the benchmarks wrote")
    parser.add_argument("--output", required=True, type=Path, help="PNG file to write")
    options = parser.parse_args()
    require_png("--output", options.output)
    draw(read_rows(options.results), options.output)
    print(options.output)
    return 0


if __name__ == "__main__":
    run_script(main)
