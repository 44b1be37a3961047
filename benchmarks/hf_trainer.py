#!/usr/bin/env python
"""Measure speed and memory of transformers' Trainer in bf16 and fp8, and of train_fp8.py on the same rows.

    python benchmarks/hf_trainer.py --model Llama-3.1-8B --rows 4 --length 1024 --micro_batches 4 --output out.json

--model is a bundled architecture, which trains from random weights. Every row of the data fills the whole sequence, so
that each variant computes the same number of real tokens in a step. In each of --rounds rounds, every variant runs
once, in its own process on one GPU (the fp8 of the Trainer is that of Accelerate):

    trainer_bf16   accelerate launch --config_file configs/accelerate_bf16.yaml examples/hf_trainer_fp8.py ...
    trainer_fp8    accelerate launch --config_file configs/accelerate_fp8.yaml examples/hf_trainer_fp8.py ...
    train_fp8      train_fp8.py --use_te --mixed_precision fp8 ..., unpacked
    train_bf16     train_fp8.py --use_te --mixed_precision bf16 ..., unpacked

The time of a step is the time between two log entries, since every variant writes one per step. The first --warmup
steps are not timed. One of them is the step whose kernels the certificate records. See docs/multi_gpu.md.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import AutoTokenizer

from benchmarks.bench import Workload, add_measuring_options, measuring_plan
from llm_fp8.config.options import ModelConfig
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.models.source import load_config, resolve_source
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.tools.programs import run_program, training_command
from llm_fp8.tools.script import EXIT_FAILED_CHECK, run_script
from llm_fp8.utils.errors import OneSentenceParser, UserError
from llm_fp8.utils.json_files import json_line, read_json, read_jsonl, write_json_atomic, write_text_atomic
from llm_fp8.utils.packages import REPOSITORY

TRAINER_VARIANTS = {"trainer_bf16": "bf16", "trainer_fp8": "fp8"}
OUR_VARIANTS = {"train_fp8": "fp8", "train_bf16": "bf16"}


def write_inputs(work: Workload, folder: Path, num_steps: int) -> tuple[Path, Path]:
    """Write a model (config and tokenizer) and a file of full-length rows to `folder`. Return the paths of both."""
    model, rows, numbers = folder / "model", folder / "rows.jsonl", random.Random(0)
    load_config(resolve_source(ModelConfig(model_name=work.model, random_init=True))).save_pretrained(model)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(model)
    lines = []
    for number in range(num_steps * work.micro_batches * work.batch_size):
        # Each number has at least one token, so the solution alone fills the sequence.
        solution = " ".join(str(numbers.randrange(1000)) for _ in range(work.seq_length))
        lines.append(json_line({"problem": f"Number {number}.", "generated_solution": solution}))
    write_text_atomic(rows, "".join(lines))
    return model, rows


def command_of(variant: str, work: Workload, model: Path, rows: Path, folder: Path, num_steps: int) -> list[str]:
    """Return the command by which `variant` (trainer and precision) trains `model` on `rows` and writes to `folder`."""
    shared = [
        f"--model_name={model}", f"--dataset_name={rows}", f"--max_seq_length={work.seq_length}",
        f"--max_steps={num_steps}", f"--gradient_accumulation_steps={work.micro_batches}", "--learning_rate=1e-5",
        f"--per_device_train_batch_size={work.batch_size}", "--lr_scheduler_type=constant", "--logging_steps=1",
        f"--output_dir={folder}"
    ]  # fmt: skip
    if variant in TRAINER_VARIANTS:
        config = f"configs/accelerate_{TRAINER_VARIANTS[variant]}.yaml"
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
        settings = ["--random_init=true", "--weights_dtype=bfloat16", "--save_strategy=no", "--report_to=none"]
        return [*launch, "examples/hf_trainer_fp8.py", *shared, *settings]
    precision = f"--mixed_precision={OUR_VARIANTS[variant]}"
    data = ["--no-packing", "--overlong=truncate", "--train_on_prompt", "--validation_fraction=0"]
    settings = ["--random_init", "--use_te", precision, *data, "--no-export", "--num_warmup_steps=0"]
    return training_command(1, *shared, *settings)


def figures(folder: Path, warmup: int) -> dict[str, Any]:
    """Return the tokens/s of each step after the first `warmup` steps, the losses and the peak memory. Read them from
    our metrics.jsonl or the Trainer's trainer_state.json, which counts tokens and seconds since training began.
    """
    state = folder / "trainer_state.json"
    history = read_json(state)["log_history"] if state.is_file() else read_jsonl(folder / "metrics.jsonl")
    steps = [record for record in history if "loss" in record]
    speeds = [step.get("real_tokens_per_s") for step in steps[warmup:]]
    if state.is_file():
        counted = [(step["num_input_tokens_seen"], step["train_runtime"]) for step in steps[warmup - 1 :]]
        speeds = [(after[0] - before[0]) / (after[1] - before[1]) for before, after in itertools.pairwise(counted)]
    peaks = [record["peak_memory_gib"] for record in history if "peak_memory_gib" in record]
    losses = [step["loss"] for step in steps]
    return {"tokens_per_s": speeds, "losses": losses, "peak_memory_gib": max(peaks, default=0)}


def summarise(variant: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine a variant's results, one per round, into a table row. The speed is the median over all timed steps."""
    measured = [result for result in rounds if result["failed"] is None]
    if not measured:
        return {"variant": variant, "failed": rounds[0]["failed"]}
    return {
        "variant": variant,
        "tokens_per_s": statistics.median(speed for result in measured for speed in result["tokens_per_s"]),
        "peak_memory_gib": max(result["peak_memory_gib"] for result in measured),
        "losses": measured[0]["losses"],
        "certificate": measured[0]["certificate"],
    }


def main() -> int:
    known = [*TRAINER_VARIANTS, *OUR_VARIANTS]
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="Llama-3.1-8B", help="a bundled architecture (default %(default)s)")
    parser.add_argument("--rows", type=int, default=4, help="rows of a micro-batch (default %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row (default %(default)s)")
    parser.add_argument("--micro_batches", type=int, default=4, help="micro-batches of a step (default %(default)s)")
    parser.add_argument("--variants", default=",".join(known[:3]), help="comma-separated (default %(default)s)")
    add_measuring_options(parser)
    options = parser.parse_args()
    plan = measuring_plan(options)
    variants = options.variants.split(",")
    for variant in variants:
        if variant not in known:
            raise UserError(f"--variants names {variant}; choose from {', '.join(known)}.")
    work = Workload(options.model, options.rows, options.length, options.micro_batches)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    # train_fp8.py sets the allocator itself. With several visible GPUs the Trainer would use nn.DataParallel.
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_VISIBLE_DEVICES": "0", **environ}
    rounds: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    with tempfile.TemporaryDirectory() as scratch:
        model, rows = write_inputs(work, Path(scratch), plan.num_steps)
        for number, variant in itertools.product(range(plan.num_rounds), variants):
            folder = Path(scratch, f"{variant}-{number}")
            log = Path(scratch, f"{variant}.log")
            command = command_of(variant, work, model, rows, folder, plan.num_steps)
            outcome = run_program(command, log=log, environ=environ, cwd=REPOSITORY, timeout_s=plan.timeout_s)
            certificate = folder / "certificate.json"
            result: dict[str, Any] = {"failed": outcome.failure}
            result["certificate"] = read_json(certificate)["verdict"] if certificate.exists() else None
            if outcome.failure is None:
                result |= figures(folder, plan.warmup)
            rounds[variant].append(result)
            print(f"round {number + 1}  {variant:13} {outcome.failure or 'measured'}", flush=True)
    table = [summarise(variant, results) for variant, results in rounds.items()]
    for row in table:
        outcome = row.get("failed") or f"{row['tokens_per_s']:9,.0f} tokens/s  {row['peak_memory_gib']:.1f} GiB"
        print(f"{row['variant']:13} {outcome}")
    if options.output is not None:
        record = {"provenance": collect_provenance(sys.argv), "workload": work.name, **asdict(work), "rows": table}
        write_json_atomic(options.output, record)
    return EXIT_FAILED_CHECK if any("failed" in row for row in table) else 0


if __name__ == "__main__":
    run_script(main)
