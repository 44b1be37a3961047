#!/usr/bin/env python
"""Draw the eval loss curves that `benchmarks/gsm8k_curves.py` measured.

python benchmarks/plot_curves.py benchmarks/results/gsm8k_curves.json benchmarks/plots/gsm8k_curves.png
python benchmarks/plot_curves.py benchmarks/results/multi_gpu_curves.json benchmarks/plots/multi_gpu_curves.png
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

from benchmarks.colours import PRECISION_COLOURS
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import read_json, require_writable

COLOURS = PRECISION_COLOURS | {"delayed_fp8head": "#7b4b94", "delayed_fp8head_all": "#3d8b37"}
LINES = {"": "-", "fsdp_full": "--", "ddp": ":"}
"""By sharding mode."""


def draw(record: dict[str, Any], path: Path) -> None:
    """One line per variant (mean over seeds), bf16's range over seeds as a band; right, the end enlarged."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    runs = record["runs"]
    # Curves that should lie on one another: those of one GPU are drawn broad and pale, beneath the others.
    pale = {"linewidth": 5, "alpha": 0.3} if any(":" in run["arm"] for run in runs) else {}
    for variant in dict.fromkeys(run["arm"] for run in runs):
        mode, _, precision = variant.rpartition(":")
        of_variant = [run for run in runs if run["arm"] == variant]
        curves = [np.array(run["evaluations"]) for run in of_variant]
        tokens, losses = curves[0][:, 1] / 1e6, np.array([curve[:, 2] for curve in curves])
        where = f", {of_variant[0]['num_gpus']} x {mode}" if mode else ""
        under: dict[str, Any] = pale if not mode else {}
        seeds = f"mean of {len(curves)} seeds" if len(curves) > 1 else "one seed"
        for axis in axes:
            axis.plot(
                tokens,
                losses.mean(axis=0),
                color=COLOURS[precision],
                linestyle=LINES[mode],
                label=f"{precision}{where} ({seeds})",
                **under,
            )
            if variant == "bf16" and len(curves) > 1:
                axis.fill_between(
                    tokens,
                    losses.min(axis=0),
                    losses.max(axis=0),
                    color=COLOURS[precision],
                    alpha=0.15,
                    label="bf16, all seeds",
                )
    parameters = runs[0]["num_parameters"] / 1e6
    axes[0].set_title(f"{parameters:.0f}M parameters from scratch on GSM8K")
    axes[1].set_title("the end of training")
    last = np.array(runs[0]["evaluations"])[:, 1].max() / 1e6
    finals = [run["final_eval_loss"] for run in runs]
    axes[1].set_xlim(0.6 * last, last)
    axes[1].set_ylim(min(finals) - 0.05, max(finals) + 0.15)
    for axis in axes:
        axis.set_xlabel("tokens seen (millions)")
        axis.set_ylabel("eval loss (nats per token)")
        axis.grid(alpha=0.3)
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


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
