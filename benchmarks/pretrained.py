#!/usr/bin/env python
"""Fine-tune pretrained weights in every precision and measure by how much fp8 raises the eval loss.

    python benchmarks/pretrained.py --model FOLDER --data gsm8k_train.jsonl --output benchmarks/results/pretrained.json

Every run has the same held-out split. Each GPU executes --parallel runs at a time. The seed changes the order of the
data. Each run is paired with the run of a reference variant that has the same seed and learning rate. Each model is
evaluated on the held-out rows twice: by the run itself in its own precision, and after its export by plain transformers
in bf16. The difference between the two losses is the cost of evaluating in fp8. The loss of the export minus that of
the reference's export is the cost of training in fp8. Seed 0 evaluates the untrained model.

`equal_loss_steps` is the share of the reference's steps after which the reference reached the loss of the variant's
export, interpolated between evaluations. The reference's learning rate had not decayed by then, so a shorter schedule
would reach this loss sooner.

`NAME/LENGTH` is a variant with a schedule of LENGTH times --steps. For example, bf16/0.7 shows the loss that bf16
reaches in the time of a variant that is 1 / 0.7 times as fast.

With `--exact_match N` every export answers N held-out problems. After `--deadline_s` seconds no further run starts.
Repeating the command continues from its --output. The median step time is recorded with `--parallel 1` only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpus import visible_gpus
from llm_fp8 import fine_tune
from llm_fp8.config.options import Config
from llm_fp8.config.recipes import precision_name
from llm_fp8.data.collate import Batch
from llm_fp8.data.prepare import prepare_data
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.tools.compare.figures import t_interval
from llm_fp8.tools.script import run_script, writable
from llm_fp8.utils.errors import OneSentenceParser, UserError
from llm_fp8.utils.json_files import read_json, read_jsonl, write_json_atomic
from llm_fp8.utils.packages import REPOSITORY

_BF16, _FP8 = {"use_te": True, "mixed_precision": "bf16"}, {"use_te": True, "mixed_precision": "fp8"}
_DELAYED, _CURRENT, _BLOCK = ({**_FP8, "fp8_scenario": name} for name in ("delayed", "current", "block"))
VARIANTS: dict[str, dict[str, Any]] = {
    "hf_bf16": {"mixed_precision": "bf16"},
    "bf16": _BF16,
    "delayed": _DELAYED,
    "current": _CURRENT,
    "block": _BLOCK,
    "backward": {**_FP8, "fp8_scenario": "backward"},
    "current_e4m3": {**_CURRENT, "fp8_format": "E4M3"},
    "delayed_ends_bf16": {**_DELAYED, "fp8_bf16_modules": "layers.0:2,layers.-4:"},
    "delayed_qkv_bf16": {**_DELAYED, "fp8_bf16_modules": "qkv"},
    "block_qkv_bf16": {**_BLOCK, "fp8_bf16_modules": "qkv"},
    "bf16_adamw_8bit": {**_BF16, "optimizer": "adamw_8bit"},
    "bf16_lora": {**_BF16, "lora_rank": 16},
    "delayed_lora": {**_DELAYED, "lora_rank": 16},
}
REFERENCES = {"hf_bf16": "hf_bf16", "bf16": "hf_bf16", "delayed_lora": "bf16_lora"}
"""Variant -> its reference. The reference of other variants is bf16."""
_VARIANT = re.compile(r"(?P<base>\w+)(?:/(?P<length>[\d.]+))?")
Row = dict[str, Any]
LEARNING_RATES = (1e-5, 3e-5, 1e-4, 3e-4)
SEQ_LENGTH = 1024
ROWS = 16  # rows of a micro-batch
WARMUP_STEPS = 20
EPOCHS = 2
EVAL_EVERY = 40
HELD_OUT = 0.1  # share of the problems
EVAL_ROWS = 16
MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class Job:
    """One training run or, if `seed` is 0, an evaluation of the untrained model."""

    variant: str
    learning_rate: float
    seed: int

    def options(self, settings: argparse.Namespace, folder: Path) -> dict[str, Any]:
        name = _VARIANT.fullmatch(self.variant)
        assert name is not None
        shared: dict[str, Any] = {
            "model_name": settings.model, "dataset_name": settings.data, "packing": True,
            "max_seq_length": SEQ_LENGTH, "batch_size": ROWS, "validation_fraction": HELD_OUT, "seed": self.seed,
            "output_dir": folder, "eval_every": EVAL_EVERY, **VARIANTS[name["base"]]
        }  # fmt: skip
        if self.seed == 0:
            return {**shared, "max_steps": 1, "learning_rate": 1e-30, "export": False}
        steps = round(float(name["length"] or 1) * settings.steps) if settings.steps else None
        return {
            **shared, "num_epochs": EPOCHS, "learning_rate": self.learning_rate, "num_warmup_steps": WARMUP_STEPS,
            "lr_scheduler": settings.lr_scheduler, "max_steps": steps
        }  # fmt: skip


def plan(settings: argparse.Namespace) -> list[Job]:
    """List untrained models first, then runs seed by seed, so that an early stop leaves whole seeds to compare."""
    variants = settings.variants.split(",")
    for name in variants:
        if (match := _VARIANT.fullmatch(name)) is None or match["base"] not in VARIANTS:
            choices = ", ".join(VARIANTS)
            raise UserError(f"--variants: '{name}' is unknown; choose from {choices}, also with /LENGTH after it.")
        if match["length"] and not settings.steps:
            raise UserError(f"--variants {name}: a length is a share of --steps.")
    rates = [float(rate) for rate in settings.learning_rates.split(",")]
    jobs = [Job(variant, 0.0, 0) for variant in variants if "lora" not in variant]
    for seed in range(1, max(settings.seeds, settings.main_seeds) + 1):
        for rate in sorted(rates, key=lambda rate: rate != settings.main_learning_rate):
            if seed <= (settings.main_seeds if rate == settings.main_learning_rate else settings.seeds):
                jobs += [Job(variant, rate, seed) for variant in variants]
    return jobs


def held_out_batches(settings: argparse.Namespace) -> list[Batch]:
    """Load the held-out rows, which all runs share, as padded batches on the CPU."""
    data = {"dataset_name": str(settings.data), "validation_fraction": HELD_OUT, "max_seq_length": SEQ_LENGTH}
    config = Config().with_options(model_name=str(settings.model), **data, batch_size=EVAL_ROWS, packing=False)
    loader = prepare_data(config, AutoTokenizer.from_pretrained(settings.model)).eval
    assert loader is not None
    return list(loader)


@torch.no_grad()
def plain_loss(model: Path, batches: list[Batch], device: str) -> float:
    """Load the model in the folder `model` with transformers in bf16. Return the mean loss per supervised token."""
    decoder: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    for batch in batches:
        batch = batch.to(device)
        logits = decoder(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum")
        count += batch.num_supervised_tokens
    return float(total) / count


def begin_worker(gpus: Queue[str]) -> None:
    """Take a GPU from `gpus` for this worker process, before CUDA reads CUDA_VISIBLE_DEVICES."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus.get()


def run_job(job: Job, settings: argparse.Namespace, batches: list[Batch], scratch: Path, began: float) -> Row | None:
    """Train, evaluate the export on `batches` and return results, or None if --deadline_s passed since `began`."""
    if time.time() - began > settings.deadline_s:
        return None
    folder = scratch / f"{job.variant.replace('/', ':')}-{job.learning_rate}-{job.seed}"
    result: Row = {"variant": job.variant, "learning_rate": job.learning_rate, "seed": job.seed}
    result["lr_scheduler"] = settings.lr_scheduler
    try:
        with open(os.devnull, "w") as silent, contextlib.redirect_stdout(silent):
            summary = fine_tune(**job.options(settings, folder))
    except Exception as error:
        return {**result, "failed": f"{type(error).__name__}: {error}"}
    metrics = read_jsonl(folder / "metrics.jsonl")
    precision = read_json(folder / "run.json")["precision"]
    exported = settings.model if job.seed == 0 else folder / "final"
    result |= {
        "precision": precision_name(precision["effective"], precision["effective_scenario"]),
        "certificate": (summary.get("certificate") or {}).get("verdict"),
        "evaluations": [[record["step"], record["eval_loss"]] for record in metrics if "eval_loss" in record],
        "eval_loss": summary["last_evaluation"]["eval_loss"],
        "bf16_eval_loss": plain_loss(exported, batches, "cuda" if torch.cuda.is_available() else "cpu"),
        "tokens_seen": summary["tokens_seen"],
    }
    if settings.parallel == 1:
        result["step_time_s"] = statistics.median(line["step_time_s"] for line in metrics if "step_time_s" in line)
    if settings.exact_match:
        output = folder / "exact_match.json"
        command = [
            sys.executable, "scripts/evaluate.py", f"--model_name={exported}", f"--num_problems={settings.exact_match}",
            f"--max_new_tokens={MAX_NEW_TOKENS}", f"--output={output}", f"--dataset_name={settings.data}",
            f"--validation_fraction={HELD_OUT}"
        ]  # fmt: skip
        subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        result["exact_match"] = read_json(output)["exact_match"]
    shutil.rmtree(folder)
    torch.cuda.empty_cache()  # for the GPU's other processes
    return result


def interval(differences: list[float]) -> dict[str, Any]:
    """Return the mean of paired differences and half the width of its 95% interval (Student's t; None below three)."""
    mean = t_interval(differences)
    half = None if mean.low is None else mean.value - mean.low
    return {"num_pairs": len(differences), "mean": mean.value, "half_width": half, "differences": differences}


def equal_loss_steps(run: Row, reference: Row) -> float:
    """Return the share of its steps that the reference took to reach the loss of `run`'s export, or 1 if it did not."""
    steps, losses = zip(*reference["evaluations"], strict=True)
    best = np.minimum.accumulate(losses)
    return float(np.interp(-run["bf16_eval_loss"], -best, steps)) / steps[-1]


def compare(runs: list[Row]) -> list[Row]:
    """Return an entry per variant and learning rate (0: untrained): its runs' differences from the reference's runs."""
    losses = {(run["variant"], run["learning_rate"], run["seed"]): run for run in runs if "eval_loss" in run}
    comparisons = []
    for variant in dict.fromkeys(run["variant"] for run in runs):
        reference = REFERENCES.get(variant, "bf16")
        for rate in (0.0, *LEARNING_RATES):
            pairs = [
                (run, losses[reference, rate, seed])
                for (name, run_rate, seed), run in sorted(losses.items())
                if (name, run_rate) == (variant, rate) and (reference, rate, seed) in losses
            ]
            if not pairs or variant == reference:
                continue
            entry: Row = {"variant": variant, "reference": reference, "learning_rate": rate}
            for name in ("eval_loss", "bf16_eval_loss", "exact_match"):
                if all(name in run for pair in pairs for run in pair):
                    entry[name] = interval([run[name] - other[name] for run, other in pairs])
                    entry[f"reference_{name}"] = statistics.fmean(other[name] for _, other in pairs)
            # Some recorded runs lack intermediate evaluations.
            if evaluated := [(run, other) for run, other in pairs if rate and "evaluations" in other]:
                entry["equal_loss_steps"] = statistics.fmean(equal_loss_steps(*pair) for pair in evaluated)
            comparisons.append(entry)
    return comparisons


def make_parser() -> argparse.ArgumentParser:
    parser = OneSentenceParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with pretrained weights")
    parser.add_argument("--data", type=Path, required=True, help="JSONL file in OpenMathInstruct-2's columns")
    parser.add_argument("--output", type=writable, required=True)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--learning_rates", default=",".join(map(str, LEARNING_RATES)))
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each learning rate except the main one")
    parser.add_argument("--main_learning_rate", type=float, default=3e-5)
    parser.add_argument("--main_seeds", type=int, default=5)
    parser.add_argument("--lr_scheduler", default="cosine", choices=["cosine", "linear", "constant"])
    parser.add_argument("--steps", type=int, help=f"optimizer steps of a whole run (default: {EPOCHS} epochs)")
    parser.add_argument("--exact_match", type=int, default=0, help="held-out problems that every export answers")
    parser.add_argument("--parallel", type=int, default=5, help="trainings at a time on each GPU")
    parser.add_argument("--deadline_s", type=float, default=math.inf)
    return parser


def main() -> int:
    began = time.time()
    settings = make_parser().parse_args()
    runs: list[Row] = []
    if settings.output.exists():
        runs = [run for run in read_json(settings.output)["runs"] if "failed" not in run]
    done = {(run["variant"], run["learning_rate"], run["seed"]) for run in runs}
    missing_jobs = [job for job in plan(settings) if (job.variant, job.learning_rate, job.seed) not in done]
    batches = held_out_batches(settings)
    provenance = collect_provenance(sys.argv)
    origin = {"commit": provenance["git"]["commit"], "gpu": next((gpu["name"] for gpu in provenance["gpus"]), None)}
    spawn = get_context("spawn")
    gpus, names_of_gpus = spawn.Queue(), (visible_gpus() or [""]) * settings.parallel
    for name in names_of_gpus:
        gpus.put(name)
    workers = ProcessPoolExecutor(len(names_of_gpus), spawn, begin_worker, (gpus,))
    with tempfile.TemporaryDirectory() as scratch, workers as pool:
        futures = [pool.submit(run_job, job, settings, batches, Path(scratch), began) for job in missing_jobs]
        for future in as_completed(futures):
            if (result := future.result()) is None:
                continue
            runs.append(result | origin)
            runs.sort(key=lambda run: (run["variant"], run["learning_rate"], run["seed"]))
            write_json_atomic(settings.output, {"provenance": provenance, "comparisons": compare(runs), "runs": runs})
            names = ("variant", "learning_rate", "seed", "eval_loss", "bf16_eval_loss", "exact_match", "failed")
            print(json.dumps({name: result[name] for name in names if name in result}), flush=True)
    missing = len(plan(settings)) - sum("failed" not in run for run in runs)
    print(f"{len(runs)} runs, {missing} of the plan are missing, {time.time() - began:.0f} s")
    return 0


if __name__ == "__main__":
    run_script(main)
