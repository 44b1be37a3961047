#!/usr/bin/env python
"""Held-out loss of one model trained from scratch on GSM8K's text in bf16 (several seeds) and in each fp8 recipe.

    python benchmarks/gsm8k_curves.py --data gsm8k_train.jsonl --output benchmarks/results/gsm8k_curves.json

The question is whether fp8 stays inside what the choice of a seed does to bf16. Every run is a `train_fp8.py` of its own on the same data in the
same order of tokens per step; the seed changes the initial weights and the order. fp8 arms use every seed too, so that each pairs with a bf16 run.
Draw the result with `benchmarks/plot_curves.py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llm_fp8.json_files import write_json_atomic  # noqa: E402
from llm_fp8.models import EMBEDDED_MODEL  # noqa: E402
from llm_fp8.provenance import collect_provenance  # noqa: E402

ARMS = {
    "bf16": ["--mixed_precision", "bf16"],
    "delayed": ["--mixed_precision", "fp8", "--fp8_scenario", "delayed"],
    "current": ["--mixed_precision", "fp8", "--fp8_scenario", "current"],
    "block": ["--mixed_precision", "fp8", "--fp8_scenario", "block"],
}
SIZES = {
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 12,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
}
"""With the embedded tokenizer's vocabulary about 60 million parameters."""


def write_model_folder(folder: Path) -> None:
    """The embedded model's config with larger sizes, and its tokenizer."""
    shutil.copytree(EMBEDDED_MODEL, folder, dirs_exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **SIZES}))


def run_one(arm: str, seed: int, model: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train one arm with one seed; returns its evaluations and summary."""
    command = [
        sys.executable, "train_fp8.py", "--model_name", str(model), "--random_init", "--use_te", "--dataset_name", options.data,
        "--validation_fraction", "0.05", "--max_seq_length", "1024", "--batch_size", "8", "--gradient_accumulation_steps", "2",
        "--num_epochs", str(options.epochs), "--learning_rate", "1e-3", "--weight_decay", "0.1", "--num_warmup_steps", "50",
        "--eval_every", str(options.eval_every), "--seed", str(seed), "--output_dir", str(folder), "--no_export", *ARMS[arm],
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{arm} with seed {seed} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    run = json.loads((folder / "run.json").read_text())
    return {
        "arm": arm,
        "seed": seed,
        "effective_precision": f"{run['precision']['effective']} {run['precision']['effective_scenario'] or ''}".strip(),
        "fp8_linear_flop_share": run["precision"]["census"]["fp8_linear_flop_share"],
        "num_parameters": run["model"]["num_parameters"],
        "evaluations": [[r["step"], r["tokens_seen"], r["eval_loss"]] for r in with_tokens(records) if "eval_loss" in r],
        "train_loss": [[r["step"], round(r["loss"], 5)] for r in records if "loss" in r],
        "final_eval_loss": summary["last_evaluation"]["eval_loss"],
        "tokens_seen": summary["tokens_seen"],
    }


def with_tokens(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evaluation records with the tokens seen at their step."""
    tokens = {r["step"]: r["tokens_seen"] for r in records if "tokens_seen" in r}
    return [{**r, "tokens_seen": tokens[r["step"]]} for r in records]


def compare(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Final held-out loss by arm beside bf16's spread over seeds."""
    by_arm: dict[str, list[float]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], []).append(run["final_eval_loss"])
    bf16 = by_arm["bf16"]
    spread = max(bf16) - min(bf16)
    return {
        "bf16_mean": statistics.mean(bf16),
        "bf16_spread": spread,
        "arms": {
            arm: {
                "losses": losses,
                "mean_gap_to_bf16": statistics.mean(losses) - statistics.mean(bf16),
                "inside_bf16_spread": min(bf16) <= statistics.mean(losses) <= max(bf16),
            }
            for arm, losses in by_arm.items()
        },
    }


def main() -> None:
    """Run all arms and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--data", required=True, help="GSM8K's training problems as jsonl in OpenMathInstruct-2's columns")
    parser.add_argument("--output", required=True, help="JSON file to write")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated seeds of every arm (default 1,2,3)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the text (default 4)")
    parser.add_argument("--eval_every", type=int, default=25, help="optimizer steps between evaluations (default 25)")
    parser.add_argument("--parallel", type=int, default=4, help="runs at a time on the GPU (default 4)")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        write_model_folder(model)
        jobs = [(arm, seed) for seed in seeds for arm in ARMS]
        with ThreadPoolExecutor(options.parallel) as pool:
            runs = list(pool.map(lambda job: run_one(*job, model, options, Path(scratch) / f"{job[0]}-{job[1]}"), jobs))
    comparison = compare(runs)
    write_json_atomic(Path(options.output), {"provenance": collect_provenance(sys.argv), "comparison": comparison, "runs": runs})
    print(json.dumps(comparison, indent=2))


if __name__ == "__main__":
    main()
