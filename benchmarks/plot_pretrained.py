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

from benchmarks.colours import PRECISION_COLOURS
from llm_fp8.utils.errors import OneSentenceParser, run_script
from llm_fp8.utils.json_files import read_json, require_writable

DRAWN = {
    "hf_bf16": ("Hugging Face, bf16", "#b0b7c3", "-"),
    "delayed": ("fp8 delayed", PRECISION_COLOURS["delayed"], "-"),
    "delayed_qkv_bf16": ("fp8 delayed, qkv in bf16", PRECISION_COLOURS["delayed"], "--"),
    "current": ("fp8 current", PRECISION_COLOURS["current"], "-"),
    "block": ("fp8 block", PRECISION_COLOURS["block"], "-"),
    "block_qkv_bf16": ("fp8 block, qkv in bf16", PRECISION_COLOURS["block"], "--"),
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
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for variant, (label, colour, line) in DRAWN.items():
        gaps: dict[float, list[float]] = {}
        for (name, rate, seed), loss in sorted(losses.items()):
            if name == variant and ("bf16", rate, seed) in losses:
                gaps.setdefault(rate, []).append(loss - losses["bf16", rate, seed])
        axes.plot(list(gaps), list(map(fmean, gaps.values())), line, color=colour, label=label)
        for rate, seeds in gaps.items():
            axes.plot([rate] * len(seeds), seeds, "o", color=colour, markersize=4)
    axes.axhline(0, color=PRECISION_COLOURS["bf16"], linewidth=1, label="bf16, the same modules")
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("eval loss of the bf16 export above bf16's [nats]")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    plt.savefig(options.output, dpi=120)
    return 0


if __name__ == "__main__":
    run_script(main)
