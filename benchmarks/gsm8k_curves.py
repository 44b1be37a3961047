#!/usr/bin/env python
"""Train a model from scratch on GSM8K's text in bf16 and each fp8 recipe, and compare the eval losses.

    python benchmarks/gsm8k_curves.py --data gsm8k_train.jsonl --output benchmarks/results/gsm8k_curves.json

The question is whether fp8 stays within the spread of bf16 over seeds. Every run is a process of `train_fp8.py` on the
same data with the same number of tokens per step. The seed changes the initial weights and the order of the data. Each
fp8 run has a bf16 run with the same seed. `benchmarks/plots.py curves` draws the result.

Results are written after each run, and repeating the command continues from its --output. Trainings run at the same
time on all visible GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpus import visible_gpus
from llm_fp8.config.recipes import precision_name
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.tools.programs import recipe_argv, training_command
from llm_fp8.tools.script import run_script, writable
from llm_fp8.utils.errors import FailedCheck, OneSentenceParser, UserError, positive, reading
from llm_fp8.utils.json_files import read_json, read_jsonl, write_json_atomic
from llm_fp8.utils.packages import REPOSITORY

VARIANTS = {"bf16": ("--mixed_precision", "bf16")}
VARIANTS |= {name: recipe_argv(name) for name in ("delayed", "current", "backward", "block")}
ROWS = 8  # rows of a micro-batch
MICRO_BATCHES = 2  # micro-batches of a step
MODEL = "Llama-57M"  # trains from scratch in a minute, but is large enough to learn from the text


@dataclass(frozen=True)
class Job:
    variant: str
    seed: int

    def options(self, folder: Path, settings: argparse.Namespace) -> list[str]:
        return [
            "--model_name", MODEL, "--random_init", "--use_te", "--dataset_name", settings.data,
            "--validation_fraction", "0.05", "--max_seq_length", "1024", "--batch_size", str(ROWS),
            "--gradient_accumulation_steps", str(MICRO_BATCHES), "--num_epochs", str(settings.epochs),
            "--learning_rate", "1e-3", "--weight_decay", "0.1", "--num_warmup_steps", "50", "--eval_every",
            str(settings.eval_every), "--seed", str(self.seed), "--output_dir", str(folder), "--no_export",
            *VARIANTS[self.variant]
        ]  # fmt: skip


def parse_seeds(text: str) -> list[int]:
    """Parse a comma-separated list of seeds. Raise `UserError` for a bad list."""
    seeds = text.split(",")
    if not all(seed.strip().isdecimal() for seed in seeds) or len({int(seed) for seed in seeds}) < len(seeds):
        raise UserError(f"--seeds {text}: give different whole numbers separated by commas, such as 1,2,3.")
    return [int(seed) for seed in seeds]


def parse_variants(text: str) -> list[str]:
    """Parse a comma-separated list of variants. Raise `UserError` for a bad list."""
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise UserError(f"--variants: '{unknown[0]}' is unknown; choose from {', '.join(VARIANTS)}.")
    if "bf16" not in names or len(set(names)) < len(names):
        raise UserError(f"--variants {text}: name bf16, the baseline, and each variant once.")
    return names


def plan(settings: argparse.Namespace) -> list[Job]:
    variants = parse_variants(settings.variants)
    return [Job(variant, seed) for seed in parse_seeds(settings.seeds) for variant in variants]


def run_job(job: Job, settings: argparse.Namespace, folder: Path, gpu: str) -> dict[str, Any]:
    """Train one job on the GPU `gpu`, in the run folder `folder`, and return its results."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    command = training_command(1, *job.options(folder, settings))
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise FailedCheck(f"{job.variant} with seed {job.seed} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    records = read_jsonl(folder / "metrics.jsonl")
    summary, run = read_json(folder / "summary.json"), read_json(folder / "run.json")
    return {
        "variant": job.variant,
        "seed": job.seed,
        "sharding_mode": run["effective"]["sharding_mode"],
        "num_gpus": run["effective"]["num_processes"],
        "global_batch_size": run["effective"]["global_batch_size"],
        "effective_precision": precision_name(run["precision"]["effective"], run["precision"]["effective_scenario"]),
        "fp8_linear_flop_share": run["precision"]["coverage"]["fp8_linear_flop_share"],
        "num_parameters": run["model"]["num_parameters"],
        "evaluations": evaluations(records),
        "train_loss": [[record["step"], round(record["loss"], 5)] for record in records if "loss" in record],
        "final_eval_loss": summary["last_evaluation"]["eval_loss"],
        "tokens_seen": summary["tokens_seen"],
        "wall_time_s": summary["wall_time_s"],
    }


def evaluations(records: list[dict[str, Any]]) -> list[list[float]]:
    """Return [step, tokens seen, eval loss] for each evaluation in `records`, the entries of metrics.jsonl."""
    tokens = {record["step"]: record["tokens_seen"] for record in records if "tokens_seen" in record}
    evaluated = [record for record in records if "eval_loss" in record]
    return [[record["step"], tokens[record["step"]], record["eval_loss"]] for record in evaluated]


def compare(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each variant's final eval losses and their mean difference from bf16, and bf16's spread over seeds."""
    by_variant: dict[str, list[float]] = {}
    for run in runs:
        by_variant.setdefault(run["variant"], []).append(run["final_eval_loss"])
    bf16, variants = by_variant["bf16"], {}
    for variant, losses in by_variant.items():
        mean = statistics.mean(losses)
        gaps = {"mean_gap_to_bf16": mean - statistics.mean(bf16), "inside_bf16_spread": min(bf16) <= mean <= max(bf16)}
        variants[variant] = {"losses": losses, **gaps}
    return {"bf16_mean": statistics.mean(bf16), "bf16_spread": max(bf16) - min(bf16), "variants": variants}


def finished_runs(settings: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[list[Any], list[Any]]:
    """Return the runs in --output and their provenance. Raise `UserError` if their options differ from `settings`."""
    output: Path = settings.output
    if not output.exists():
        return [], []
    with reading("--output", output, "the runs of this script", "Give another file."):
        record = read_json(output)
        script, *argv = record["provenance"]["command"]
        runs = record["runs"]
    if Path(script).name != Path(__file__).name:
        raise UserError(f"--output {output} was written by {script}; give another file.")
    earlier = parser.parse_args(argv)
    for name in ("data", "epochs", "eval_every"):
        if (value := getattr(earlier, name)) != getattr(settings, name):
            raise UserError(
                f"--output {output} holds runs with --{name} {value}; give another file or the same options."
            )
    return runs, [*record.get("earlier_provenance", []), record["provenance"]]


def make_parser() -> argparse.ArgumentParser:
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--data", required=True, help="GSM8K's training problems as jsonl in OpenMathInstruct-2's columns")
    add("--output", required=True, type=writable, help="JSON file to write")
    add("--seeds", default="1,2,3", help="comma-separated seeds of every variant (default %(default)s)")
    add("--variants", default=",".join(VARIANTS), help="separated by commas (default %(default)s)")
    add("--epochs", type=positive, default=4, help="passes over the text (default %(default)s)")
    add("--eval_every", type=positive, default=25, help="optimizer steps between evaluations (default %(default)s)")
    add("--parallel", type=positive, default=4, help="trainings at a time (default %(default)s)")
    return parser


def main() -> int:
    parser = make_parser()
    settings = parser.parse_args()
    if not Path(settings.data).is_file():
        raise UserError(f"--data {settings.data}: no such file; give GSM8K's training problems as jsonl.")
    jobs = plan(settings)
    order = [(job.variant, job.seed) for job in jobs]
    runs, earlier_provenance = finished_runs(settings, parser)
    done = {(run["variant"], run["seed"]) for run in runs}
    if unplanned := done - set(order):
        extra = "a run of {} with seed {}".format(*min(unplanned))
        raise UserError(f"--output {settings.output} contains {extra}; add both to --variants and --seeds.")
    if not torch.cuda.is_available():
        raise UserError("no NVIDIA GPU is found; this script trains on GPUs only.")

    def write(comparison: dict[str, Any] | None) -> None:
        runs.sort(key=lambda run: order.index((run["variant"], run["seed"])))
        origin = {"provenance": collect_provenance(sys.argv), "earlier_provenance": earlier_provenance}
        write_json_atomic(settings.output, {**origin, "comparison": comparison, "runs": runs})

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(settings.parallel) as pool:
        missing = [job for job in jobs if (job.variant, job.seed) not in done]
        gpus = visible_gpus()
        futures = [
            pool.submit(run_job, job, settings, Path(scratch) / str(number), gpus[number % len(gpus)])
            for number, job in enumerate(missing)
        ]
        try:
            for future in as_completed(futures):
                runs.append(future.result())
                print(f"{runs[-1]['variant']}, seed {runs[-1]['seed']}: {runs[-1]['wall_time_s']:.0f} s", flush=True)
                write(None)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # the other runs would fail in the same way
            raise
    comparison = compare(runs)
    write(comparison)
    print(json.dumps(comparison, indent=2))
    return 0


if __name__ == "__main__":
    run_script(main)
