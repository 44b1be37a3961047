#!/usr/bin/env python
"""Speed and memory of transformers' Trainer in bf16 and in Accelerate's fp8, and of train_fp8.py on the same rows, in
one run on one GPU.

    python benchmarks/hf_trainer.py --workload Llama-3.1-8B:4x1024x4 --output benchmarks/results/hf_trainer_8b.json

Random weights of a bundled architecture (or of a folder with a config.json). Every row of the data fills the whole
sequence, so that each variant computes the same number of real tokens in a step. Variants, each a process of its own,
taking turns --rounds times:

    trainer_bf16   accelerate launch --config_file configs/accelerate_bf16.yaml examples/hf_trainer_fp8.py ...
    trainer_fp8    accelerate launch --config_file configs/accelerate_fp8.yaml examples/hf_trainer_fp8.py ...
    train_fp8      train_fp8.py --use_te --mixed_precision fp8 ..., unpacked
    train_bf16     train_fp8.py --use_te --mixed_precision bf16 ..., unpacked; not among the default ones

A step's time is what lies between two logged steps, which every variant logs one by one; the first --warmup steps are
left out, the recorded step of the certificate among them. A variant that fails, a failed certificate too, is a row that
says so. See docs/multi_gpu.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoTokenizer

from benchmarks.other_trainers import drop_launcher_variables, started_by
from llm_fp8.data.embedded import DATASET_DIR, MODEL_DIR
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.tools.bench.measure import speed
from llm_fp8.tools.bench.worker import add_measuring_options, check_measuring_options
from llm_fp8.tools.bench.workload import Workload
from llm_fp8.tools.verify.processes import Started
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import read_json, read_jsonl, read_metrics, write_json_atomic, write_jsonl_atomic

TRAINER_VARIANTS = {"trainer_bf16": "bf16", "trainer_fp8": "fp8"}
OUR_VARIANTS = {"train_fp8": "fp8", "train_bf16": "bf16"}
RECORDED_STEP = 5
"""That of the certificate, in both scripts."""
COMPARED = (("trainer_fp8", "trainer_bf16"), ("train_fp8", "trainer_fp8"), ("train_fp8", "train_bf16"))


def write_model_structure(work: Workload, folder: Path) -> None:
    """A folder with the config of the workload's model and the embedded tokenizer, without weights."""
    work.hf_config().save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(folder)


def write_full_rows(path: Path, num_rows: int, seq_length: int) -> None:
    """Rows whose solutions alone are longer than `seq_length` tokens, made of the embedded dataset's solutions one
    after the other.
    """
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    problems = itertools.cycle(read_jsonl(DATASET_DIR / "data" / "train-00000-of-00004.jsonl"))
    rows = []
    for number in range(num_rows):
        solution = ""
        # Counted as a whole: tokens of joined texts are fewer than those of its parts.
        while len(tokenizer(solution)["input_ids"]) <= seq_length:
            solution += next(problems)["generated_solution"] + "\n"
        rows.append({"problem": f"Number {number}.", "generated_solution": solution})
    write_jsonl_atomic(path, rows)


def command_of(variant: str, work: Workload, model: Path, rows: Path, folder: Path, weights_dtype: str) -> list[str]:
    """The training of a variant."""
    shared = [
        *("--model_name", str(model), "--dataset_name", str(rows), "--max_seq_length", str(work.seq_length)),
        *("--max_steps", str(work.num_steps), "--gradient_accumulation_steps", str(work.micro_batches)),
        *("--learning_rate", "1e-5", "--output_dir", str(folder)),
    ]
    if variant in TRAINER_VARIANTS:
        launch = ("--config_file", f"configs/accelerate_{TRAINER_VARIANTS[variant]}.yaml")
        own = [
            *("--random_init", "true", "--weights_dtype", weights_dtype),
            *("--per_device_train_batch_size", str(work.batch_size), "--logging_steps", "1"),
            *("--save_strategy", "no", "--report_to", "none", "--lr_scheduler_type", "constant"),
        ]
        return started_by(launch, ["examples/hf_trainer_fp8.py", *shared, *own])
    own = [
        *("--random_init", "--use_te", "--mixed_precision", OUR_VARIANTS[variant]),
        *("--batch_size", str(work.batch_size), "--no_packing", "--overlong", "truncate", "--train_on_prompt"),
        *("--validation_fraction", "0", "--log_every", "1", "--no_export"),
        *("--lr_scheduler", "constant", "--num_warmup_steps", "0"),
    ]
    return [sys.executable, "train_fp8.py", *shared, *own]


def read_trainer(folder: Path, work: Workload, warmup: int) -> dict[str, Any]:
    """What trainer_state.json holds of the steps behind `warmup`: their times and losses, and the peak of memory.

    Raises ValueError where a step did not compute as many tokens as the workload says.
    """
    history = read_json(folder / "trainer_state.json")["log_history"]
    steps = [record for record in history if "loss" in record]
    tokens = [later["num_input_tokens_seen"] - one["num_input_tokens_seen"] for one, later in itertools.pairwise(steps)]
    if any(counted != work.tokens_per_step for counted in tokens):
        raise ValueError(f"the steps computed {sorted(set(tokens))} tokens and not {work.tokens_per_step}")
    times = [later["train_runtime"] - one["train_runtime"] for one, later in itertools.pairwise(steps)]
    peaks = [record["peak_memory_gib"] for record in history if "peak_memory_gib" in record]
    return {
        "step_times_s": times[warmup - 1 :],
        "losses": [record["loss"] for record in steps],
        "peak_memory_gib": peaks[-1] if peaks else None,
    }


def read_ours(folder: Path, work: Workload, warmup: int) -> dict[str, Any]:
    """The same from metrics.jsonl. Raises ValueError where a step did not compute as many real tokens as the
    workload says.
    """
    steps = [record for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
    tokens = [round(record["real_tokens_per_s"] * record["step_time_s"]) for record in steps]
    if any(counted != work.tokens_per_step for counted in tokens):
        raise ValueError(f"the steps computed {sorted(set(tokens))} real tokens and not {work.tokens_per_step}")
    return {
        "step_times_s": [record["step_time_s"] for record in steps[warmup:]],
        "losses": [record["loss"] for record in steps],
        "peak_memory_gib": max(
            (record["peak_memory_gib"] for record in steps if "peak_memory_gib" in record), default=None
        ),
    }


def measure(
    variant: str, command: list[str], work: Workload, folder: Path, warmup: int, timeout_s: float
) -> dict[str, Any]:
    """Run a training and read what it left: figures, or under `failed` why there are none; the certificate where
    there is one.
    """
    # As train_fp8.py sets it for itself, for the other variants too.
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # With several GPUs to see the Trainer would take nn.DataParallel.
    one_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    variables = {"PYTORCH_CUDA_ALLOC_CONF": allocator, "CUDA_VISIBLE_DEVICES": one_gpu}
    ended = Started(command, folder.with_suffix(".log"), variables).wait(timeout_s)
    certificate = folder / "certificate.json"
    found: dict[str, Any] = {"certificate": read_json(certificate) if certificate.exists() else None}
    if ended.code != 0:
        return {**found, "failed": ended.why()}
    try:
        figures = (read_trainer if variant in TRAINER_VARIANTS else read_ours)(folder, work, warmup)
    except (ValueError, UserError) as error:
        return {**found, "failed": str(error)}
    return {**found, "failed": None, **figures}


def summarise(variant: str, work: Workload, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a variant: figures over all timed steps of all rounds."""
    row: dict[str, Any] = {"arm": variant}
    measured = [found for found in rounds if found["failed"] is None]
    if not measured:
        return {**row, "failed": rounds[0]["failed"], "rounds": rounds}
    row.update(speed(work, [time_s for found in measured for time_s in found["step_times_s"]]))
    peaks = [found["peak_memory_gib"] for found in measured if found["peak_memory_gib"] is not None]
    return {**row, "peak_memory_gib": max(peaks, default=None), "rounds": rounds}


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Speed and memory of one variant over another's, for the pairs of `COMPARED` that were measured."""
    measured = {row["arm"]: row for row in rows if "tokens_per_s" in row}
    found = []
    for first, second in COMPARED:
        if first in measured and second in measured:
            one, other = measured[first], measured[second]
            has_memory = one["peak_memory_gib"] is not None and other["peak_memory_gib"] is not None
            found.append(
                {
                    "arms": [first, second],
                    "speed_ratio": one["tokens_per_s"] / other["tokens_per_s"],
                    "peak_memory_ratio": one["peak_memory_gib"] / other["peak_memory_gib"] if has_memory else None,
                }
            )
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--workload", default="Llama-3.1-8B:4x1024x4", help="MODEL:ROWSxLENGTHxMICRO_BATCHES (default %(default)s)"
    )
    parser.add_argument(
        "--arms", default="trainer_bf16,trainer_fp8,train_fp8", help="comma-separated (default %(default)s)"
    )
    add_measuring_options(parser, steps=20, warmup=8, rounds=2, arm_timeout_s=500)
    parser.add_argument(
        "--weights_dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="the Trainer's weights: bfloat16 is the lighter set-up without master weights, float32 has them (default "
        "%(default)s)",
    )
    options = parser.parse_args(argv)
    options.arms = options.arms.split(",")
    known = [*TRAINER_VARIANTS, *OUR_VARIANTS]
    if unknown := [variant for variant in options.arms if variant not in known]:
        raise UserError(f"--arms names {unknown[0]}, which is none of {', '.join(known)}.")
    check_measuring_options(options, RECORDED_STEP)
    return options


def main() -> int:
    """Measure every variant, round by round, and keep the results as JSON."""
    options = parse(sys.argv[1:])
    work = Workload.parse(options.workload, options.steps, "--workload")
    if work.text is not None:
        raise UserError(f"--workload {work.name}: this trains on full rows of its own; drop @{work.text}.")
    if not torch.cuda.is_available():
        raise UserError("this measures an NVIDIA GPU, and none is found.")
    drop_launcher_variables()
    provenance = collect_provenance(sys.argv)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model, data = Path(scratch, "model"), Path(scratch, "rows.jsonl")
        write_model_structure(work, model)
        write_full_rows(data, work.num_steps * work.micro_batches * work.batch_size, work.seq_length)
        rounds: dict[str, list[dict[str, Any]]] = {variant: [] for variant in options.arms}
        for number in range(options.rounds):
            for variant in options.arms:
                folder = Path(scratch, f"{variant}-{number}")
                command = command_of(variant, work, model, data, folder, options.weights_dtype)
                found = measure(variant, command, work, folder, options.warmup, options.arm_timeout_s)
                rounds[variant].append({"command": command[1:], **found})
                rows = [summarise(known, work, done) for known, done in rounds.items() if done]
                record = {
                    "provenance": provenance,
                    "workload": work.name,
                    **work.to_dict(),
                    "weights_dtype_of_trainer": options.weights_dtype,
                    "warmup": options.warmup,
                    "rows": rows,
                    "claims": compare(rows),
                }
                write_json_atomic(options.output, record)
                print(f"round {number + 1}  {variant:13} {found['failed'] or 'measured'}", flush=True)
    for row in rows:
        if "tokens_per_s" not in row:
            print(f"{row['arm']:13} not measured: {row['failed']}")
            continue
        memory = "" if row["peak_memory_gib"] is None else f"  {row['peak_memory_gib']:.1f} GiB"
        certificate = row["rounds"][0]["certificate"]
        verdict = "no certificate" if certificate is None else f"{certificate['verdict']} {certificate['precision']}"
        print(f"{row['arm']:13} {row['tokens_per_s']:9,.0f} tokens/s{memory}  {verdict}")
    for found in compare(rows):
        memory = "" if found["peak_memory_ratio"] is None else f", peak memory x {found['peak_memory_ratio']:.2f}"
        print(f"{found['arms'][0]} over {found['arms'][1]}: speed x {found['speed_ratio']:.2f}{memory}")
    return 0 if all("tokens_per_s" in row for row in rows) else 1


if __name__ == "__main__":
    run_script(main)
