#!/usr/bin/env python
"""Draw the eval loss curves that `benchmarks/gsm8k_curves.py` measured.

python benchmarks/plot_curves.py benchmarks/results/gsm8k_curves.json benchmarks/plots/gsm8k_curves.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.colours import PRECISION_COLOURS, label_ends, save, write_message
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import read_json, require_writable

LABELS = {}
LINES: dict[str, str] = {}
"""Of variants of a precision, in its colour; others are solid."""


def draw(record: dict[str, Any], path: Path) -> None:
    """The second half of training on one GPU: a line per variant (mean over seeds), bf16's range as a band."""
    runs = [run for run in record["runs"] if ":" not in run["arm"]]
    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    ends, finals = {}, {}
    for variant in dict.fromkeys(run["arm"] for run in runs):
        curves = [np.array(run["evaluations"]) for run in runs if run["arm"] == variant]
        tokens, losses = curves[0][:, 1] / 1e6, np.array([curve[:, 2] for curve in curves])
        colour = PRECISION_COLOURS[variant.partition("_")[0]]
        axis.plot(tokens, losses.mean(axis=0), LINES.get(variant, "-"), color=colour)
        if variant == "bf16":
            axis.fill_between(tokens, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.15, linewidth=0)
        finals[variant] = losses[:, -1]
        ends[LABELS.get(variant, variant)] = (losses[:, -1].mean(), colour)
    last, lowest = tokens.max(), min(map(np.min, finals.values()))
    axis.set_xlim(0.5 * last, last)
    axis.set_ylim(lowest - 0.02, lowest + 0.38)
    label_ends(axis, last, ends, 0.022)
    axis.set_xlabel("tokens seen (millions)")
    axis.set_ylabel("eval loss (nats per token)")
    axis.spines[["top", "right"]].set_visible(False)
    spread = finals["bf16"].min(), finals["bf16"].max()
    inside = all(spread[0] <= losses.mean() <= spread[1] for losses in finals.values())
    write_message(
        figure,
        f"From scratch every recipe ends {'inside' if inside else 'not always inside'} the spread of bf16's seeds",
        f"{runs[0]['num_parameters'] / 1e6:.0f}M parameters on the text of GSM8K; means of seeds, band: bf16's",
    )
    save(figure, path)
    plt.close(figure)


def read(path: Path) -> dict[str, Any]:
    """The record in `path`. Raises `UserError` where it holds no curves."""
    try:
        record = read_json(path)
        if all(run["evaluations"] for run in record["runs"]) and record["runs"]:
            return record
    except (UserError, KeyError, TypeError) as error:
        raise UserError(
            f"results {path}: not a file of benchmarks/gsm8k_curves.py ({type(error).__name__}: {error})."
        ) from error
    raise UserError(f"results {path}: it holds no finished run.")


def main(argv: list[str] | None = None) -> int:
    """Read, draw."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=Path, help="JSON file of benchmarks/gsm8k_curves.py")
    parser.add_argument("output", type=Path, help="PNG file to write")
    options = parser.parse_args(argv)
    record = read(options.results)
    require_writable("output", options.output)
    draw(record, options.output)
    return 0


if __name__ == "__main__":
    run_script(main)
