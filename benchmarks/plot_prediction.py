#!/usr/bin/env python
"""Draw predicted against measured tokens/s for every recorded row that a prediction is made for, but those whose time
is not scored.

python benchmarks/plot_prediction.py benchmarks/plots/prediction.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.colours import PRECISION_COLOURS
from benchmarks.prediction_records import Recorded, recorded_rows
from llm_fp8.utils.errors import OneSentenceParser, run_script
from llm_fp8.utils.json_files import require_writable

MARKERS = {1: "o", 2: "^", 4: "s"}
"""By number of GPUs."""


def per_gpu(record: Recorded) -> tuple[float, float]:
    """Tokens/s of one GPU, measured and predicted."""
    measured = record.prediction.scenario.tokens_per_step / record.step_time_s / record.num_gpus
    return measured, record.prediction.tokens_per_s / record.num_gpus


def draw(path: Path) -> None:
    """Left, throughput on the diagonal; right, the errors of time and memory of the same rows."""
    records = [record for record in recorded_rows() if not (record.out_of_memory or record.not_scored)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.2), layout="constrained")
    for record in records:
        scenario = record.prediction.scenario
        style = {
            "color": PRECISION_COLOURS[scenario.recipe],
            "marker": MARKERS[record.num_gpus],
            "markerfacecolor": PRECISION_COLOURS[scenario.recipe] if record.todays else "none",
            "linestyle": "",
            "alpha": 0.8,
        }
        left.plot(*per_gpu(record), **style)
        right.plot(100 * record.time_error, 100 * record.memory_error, **style)
    ends = (0.9 * min(per_gpu(r)[0] for r in records), 1.1 * max(per_gpu(r)[0] for r in records))
    left.plot(ends, ends, color="#999999", linewidth=1, zorder=0)
    left.set(xscale="log", yscale="log", xlabel="measured tokens/s per GPU", ylabel="predicted tokens/s per GPU")
    left.set_title("throughput")
    right.axhline(0, color="#999999", linewidth=1, zorder=0)
    right.axvline(0, color="#999999", linewidth=1, zorder=0)
    right.set(
        xlabel="error of the step time (%)",
        ylabel="error of the peak memory (%)",
        title="predicted over measured, less one",
    )
    for recipe, colour in PRECISION_COLOURS.items():
        left.plot([], [], "o", color=colour, label=recipe)
    for num_gpus in sorted({record.num_gpus for record in records}):
        left.plot([], [], MARKERS[num_gpus], color="#888888", label=f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}")
    left.plot([], [], "o", color="#888888", markerfacecolor="none", label="decoder before its fused kernels")
    left.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


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
