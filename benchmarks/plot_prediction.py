#!/usr/bin/env python
"""Draw the error of the predicted step time of every row of today's decoder that no constant was fitted to.

python benchmarks/plot_prediction.py benchmarks/plots/prediction.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.colours import PRECISION_COLOURS, save, write_message
from benchmarks.prediction_records import recorded_rows
from llm_fp8.utils.errors import OneSentenceParser, run_script
from llm_fp8.utils.json_files import require_writable

MARKERS = {1: "o", 2: "^", 4: "s"}
"""By number of GPUs."""


def draw(path: Path) -> None:
    """The error of the predicted step time over tokens/s per GPU, of the rows of the table in docs/results.md."""
    records = [
        record
        for record in recorded_rows()
        if record.todays and record.held_out and not (record.out_of_memory or record.not_scored)
    ]
    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for record in records:
        colour = PRECISION_COLOURS[record.prediction.scenario.recipe]
        axis.plot(
            record.row["tokens_per_s"] / record.num_gpus,
            100 * record.time_error,
            marker=MARKERS[record.num_gpus],
            color=colour,
            linestyle="",
            alpha=0.8,
        )
    axis.axhline(0, color="#999999", linewidth=1, zorder=0)
    axis.set(xscale="log", xlabel="measured tokens/s per GPU", ylabel="predicted over measured step time, less 1 [%]")
    places = (5000, 10000, 20000, 50000, 100000)
    axis.set_xticks(places, [f"{place:,}" for place in places])
    axis.minorticks_off()
    for recipe, colour in PRECISION_COLOURS.items():
        axis.plot([], [], "o", color=colour, label=recipe)
    for num_gpus in sorted({record.num_gpus for record in records}):
        axis.plot([], [], MARKERS[num_gpus], color="#888888", label=f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}")
    figure.legend(loc="outside right center", fontsize=9, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    worst = max(abs(record.time_error) for record in records)
    write_message(
        figure,
        f"The predicted step time is within {worst:.1%} of each of {len(records)} measured ones",
        "1B to 14B on one, two and four H200s; rows that no constant was fitted to",
    )
    save(figure, path)


def main() -> int:
    """Draw."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("output", type=Path, help="PNG file to write")
    options = parser.parse_args()
    require_writable("output", options.output)
    draw(options.output)
    return 0


if __name__ == "__main__":
    run_script(main)
