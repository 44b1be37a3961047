#!/usr/bin/env python
"""Draw what fp8 costs a pretrained model, from the record of `benchmarks/pretrained.py`.

    python benchmarks/plot_pretrained.py benchmarks/results/pretrained.json --output benchmarks/plots/pretrained.png

One line per variant over the learning rate: the eval loss of its bf16 export above that of the bf16 run of the same
seed, in nats. A point is a seed, the line joins their means.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.colours import PRECISION_COLOURS, label_ends, save, write_message
from llm_fp8.utils.errors import OneSentenceParser, run_script
from llm_fp8.utils.json_files import read_json, require_writable

DRAWN = {
    "hf_bf16": ("Hugging Face, bf16", "#8a93a3", "-"),
    "delayed": ("delayed", PRECISION_COLOURS["delayed"], "-"),
    "delayed_qkv_bf16": ("delayed, qkv in bf16", PRECISION_COLOURS["delayed"], "--"),
    "current": ("current", PRECISION_COLOURS["current"], "-"),
    "block": ("block", PRECISION_COLOURS["block"], "-"),
    "block_qkv_bf16": ("block, qkv in bf16", PRECISION_COLOURS["block"], "--"),
}
"""Label, colour and line of each variant drawn."""


def main() -> int:
    """Write the plot."""
    parser = OneSentenceParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("record", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    require_writable("--output", options.output)
    runs = read_json(options.record)["runs"]
    losses = {(run["variant"], run["learning_rate"], run["seed"]): run["bf16_eval_loss"] for run in runs if run["seed"]}
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    ends, means_of_fp8 = {}, []
    for variant, (label, colour, line) in DRAWN.items():
        gaps: dict[float, list[float]] = {}
        for (name, rate, seed), loss in sorted(losses.items()):
            if name == variant and ("bf16", rate, seed) in losses:
                gaps.setdefault(rate, []).append(1e3 * (loss - losses["bf16", rate, seed]))
        if not gaps:
            continue
        means = list(map(fmean, gaps.values()))
        axis.plot(list(gaps), means, line, color=colour, label=label)
        for rate, seeds in gaps.items():
            axis.plot([rate] * len(seeds), seeds, "o", color=colour, markersize=4)
        ends[label] = (means[-1], colour)
        means_of_fp8 += means if variant != "hf_bf16" else []
    axis.axhline(0, zorder=0, color=PRECISION_COLOURS["bf16"], linewidth=1)
    low, high = axis.get_ylim()
    label_ends(axis, max(rate for _, rate, _ in losses), ends, (high - low) / 20)
    axis.set_xscale("log")
    axis.set_xlim(right=1.06 * max(rate for _, rate, _ in losses))
    rates = sorted({rate for _, rate, _ in losses if rate})
    axis.set_xticks(rates, [f"{rate:.0e}".replace("e-0", "e-") for rate in rates])
    axis.minorticks_off()
    axis.set_xlabel("learning rate")
    axis.set_ylabel("0.001 nats above bf16, exported model")
    axis.spines[["top", "right"]].set_visible(False)
    write_message(
        figure,
        f"fp8 costs a pretrained 135M model {min(means_of_fp8) / 1e3:.3f} to {max(means_of_fp8) / 1e3:.3f} nats",
        "SmolLM2-135M-Instruct on GSM8K; points: seeds, lines: their means; 0: bf16, the same modules",
    )
    save(figure, options.output)
    return 0


if __name__ == "__main__":
    run_script(main)
