"""Measure the training throughput of variants, which run in turn. A variant is a set of training options.

Each measurement runs train_fp8.py or train_multi_gpu.py from random weights. A variant that begins with 'baseline NAME'
runs benchmarks/baselines.py NAME instead, on the same data. Without --dataset the rows are random tokens, and each row
is one document of --length tokens. The first --warmup steps and the step whose kernels are recorded are not timed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from llm_fp8.config.parser import parse_config
from llm_fp8.config.recipes import RECIPES
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.observability.metrics import RECORDED_STEP
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.tools.programs import run_program, torchrun, training_command
from llm_fp8.tools.script import EXIT_FAILED_CHECK, writable
from llm_fp8.utils.errors import OneSentenceParser, UserError, number, positive
from llm_fp8.utils.json_files import json_line, read_json, read_jsonl, write_json_atomic
from llm_fp8.utils.packages import REPOSITORY

OTHER_RECIPES = tuple(f"{recipe.backend}_{name}" for name, recipe in RECIPES.items() if recipe.backend != "te")
BASELINES = ("hf_bf16", "hf_bf16_compiled", "accelerate_te", *OTHER_RECIPES)
VARIANTS = "hf_bf16: baseline hf_bf16; bf16: --use_te --mixed_precision bf16; fp8: --use_te --mixed_precision fp8"
MIN_WARMUP = 8  # the kernels of the fifth step are recorded, and graphs may be captured after it
SPEEDS = ("tokens_per_s", "real_tokens_per_s", "model_tflops")


@dataclass(frozen=True)
class Workload:
    model: str  # bundled architecture or folder, or only a name
    batch_size: int
    seq_length: int
    micro_batches: int
    num_gpus: int = 1
    dataset: str | None = None  # None: random tokens
    config: dict[str, Any] | None = None  # the model's config.json, if `model` is only its name

    @property
    def name(self) -> str:
        shape = f"{self.model}:{self.batch_size}x{self.seq_length}x{self.micro_batches}"
        return shape + (f"@{self.dataset}" if self.dataset else "")

    def argv(self, dataset: str, num_steps: int) -> list[str]:
        """Return the training options that all variants share. `dataset` is a value of --dataset_name."""
        return shlex.split(
            f"--random_init --max_seq_length {self.seq_length} --batch_size {self.batch_size} --overlong truncate "
            f"--gradient_accumulation_steps {self.micro_batches} --max_steps {num_steps} --validation_fraction 0 "
            "--learning_rate 1e-5 --lr_scheduler constant --num_warmup_steps 0 --save_every 0 --no-export "
            "--no-merge-micro-batches"
        ) + ["--model_name", self.model, "--dataset_name", dataset]


@dataclass(frozen=True)
class Variant:
    name: str
    argv: tuple[str, ...]  # options of the training scripts or of a baseline
    baseline: str | None = None

    def command(self, num_gpus: int, argv: Sequence[str]) -> list[str]:
        """Return the command that trains this variant. The variant's own options override those in `argv`."""
        if self.baseline is None:
            return training_command(num_gpus, *argv, *self.argv)
        command = [str(REPOSITORY / "benchmarks" / "baselines.py"), self.baseline, *argv, *self.argv]
        return [sys.executable, *command] if num_gpus == 1 else torchrun(num_gpus, *command)


def parse_variants(text: str, num_gpus: int = 1) -> list[Variant]:
    """Parse 'NAME: OPTIONS; NAME: baseline BASELINE OPTIONS' for runs on `num_gpus` GPUs, or raise `UserError`."""
    variants: dict[str, Variant] = {}
    for line in filter(None, map(str.strip, text.split(";"))):
        name, _, options = map(str.strip, line.partition(":"))
        if ":" not in line or not name or name in variants:
            raise UserError(f"--variants {line!r}: write NAME: OPTIONS, each name once.")
        argv, baseline = shlex.split(options), None
        if argv[:1] == ["baseline"]:
            baseline, argv = "".join(argv[1:2]), argv[2:]
            if baseline not in BASELINES:
                raise UserError(f"--variants {line!r}: the baselines are {', '.join(BASELINES)}.")
        parse_config(argv, parallel=num_gpus > 1)
        variants[name] = Variant(name, tuple(argv), baseline)
    if not variants:
        raise UserError("--variants names none; write NAME: OPTIONS, separated by semicolons.")
    return list(variants.values())


def write_random_rows(path: Path, num_rows: int, length: int) -> None:
    """Write `num_rows` documents of random numbers as JSON lines. Each has `length` or more tokens in any tokenizer."""
    numbers = random.Random(0)
    with path.open("w") as file:
        for _ in range(num_rows):
            text = " ".join(str(numbers.randrange(1000)) for _ in range(length))
            file.write(json_line({"text": text}))


def write_config(folder: Path, entries: dict[str, Any]) -> None:
    """Write the config of a model without weights, and the embedded tokenizer, to `folder`. Entries that are missing in
    `entries` are the defaults of transformers' config class for the `model_type`.
    """
    from transformers import AutoConfig, AutoTokenizer

    AutoConfig.for_model(**entries).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(folder)


class Plan(NamedTuple):
    num_steps: int
    warmup: int  # number of first steps, which are not timed
    num_rounds: int  # number of measurements of each variant
    timeout_s: float


def measure(work: Workload, variant: Variant, dataset: str, plan: Plan) -> dict[str, Any]:
    """Train `variant` on `dataset` once. Return timed steps, all losses, one step's kernels, or {"failed": reason}."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    with tempfile.TemporaryDirectory() as scratch:
        folder, model = Path(scratch, "run"), Path(scratch, "model")
        argv = [*work.argv(dataset, plan.num_steps), "--output_dir", str(folder)]
        if work.config is not None:
            write_config(model, work.config)
            argv += ["--model_name", str(model)]
        command = variant.command(work.num_gpus, argv)
        outcome = run_program(command, log=Path(scratch, "log"), environ=environ, timeout_s=plan.timeout_s)
        if outcome.failure is not None:
            return {"failed": outcome.failure}
        steps = read_jsonl(folder / "metrics.jsonl")
        summary = read_json(folder / "summary.json")
    timed = [step for step in steps[plan.warmup :] if RECORDED_STEP not in step]
    losses = [step["loss"] for step in steps]
    return {"failed": None, "steps": timed, "losses": losses, "recorded_step": summary.get("recorded_step")}


def summarise(work: Workload, variant: Variant, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a variant's table row from results of `measure`: options, quantiles of each speed, losses, peak memory."""
    row: dict[str, Any] = {"workload": work.name, **asdict(work), "variant": variant.name, "baseline": variant.baseline}
    row["options"] = shlex.join(variant.argv)
    measured = [result for result in rounds if result["failed"] is None]
    if not measured:
        return row | {"failed": rounds[0]["failed"]}
    steps = [step for result in measured for step in result["steps"]]
    for name in SPEEDS:
        low, median, high = np.quantile([step[name] for step in steps], (0.1, 0.5, 0.9)).tolist()
        row |= {name: median, f"{name}_p10": low, f"{name}_p90": high}
    row |= {"num_rounds": len(measured), "num_timed_steps": len(steps), "losses": measured[0]["losses"]}
    names = ("peak_memory_gib_max_rank", "peak_memory_gib")
    if peaks := [step[name] for step in steps for name in names if name in step]:
        row["peak_memory_gib"] = max(peaks)
    return row | {"recorded_step": measured[-1].get("recorded_step")}


def write_rows(output: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    write_json_atomic(output, {"provenance": collect_provenance(sys.argv), "rows": rows})


def measure_all(
    work: Workload, variants: Sequence[Variant], plan: Plan, save: Callable[[list[dict[str, Any]]], None] | None = None
) -> list[dict[str, Any]]:
    """Measure each variant once per round. Return a table row per variant. Pass them to `save` whenever they change."""
    rounds: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in variants}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        dataset = work.dataset or f"{scratch}/rows.jsonl"
        if work.dataset is None:
            num_rows = work.batch_size * work.micro_batches * work.num_gpus * plan.num_steps
            write_random_rows(Path(dataset), num_rows, work.seq_length)
        for number, variant in itertools.product(range(plan.num_rounds), variants):
            if any(result["failed"] for result in rounds[variant.name]):
                continue  # it would fail again
            result = measure(work, variant, dataset, plan)
            rounds[variant.name].append(result)
            speed = result["failed"]
            if speed is None:
                speed = f"{statistics.median(step['tokens_per_s'] for step in result['steps']):,.0f} tokens/s"
            print(f"round {number + 1}  {work.name}  {variant.name}: {speed}", flush=True)
            rows = [summarise(work, each, rounds[each.name]) for each in variants if rounds[each.name]]
            if save is not None:
                save(rows)
    return rows


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line per variant: speed, its ratio to that of the first measured variant, TFLOP/s, memory, losses."""
    kind = "real_tokens_per_s" if rows[0]["dataset"] else "tokens_per_s"
    first = next((row for row in rows if kind in row), {})
    title = kind.replace("_per_", "/").replace("_", " ")
    print(f"\n{rows[0]['workload']}: {title}, median over steps, and 10th to 90th percentile")
    for row in rows:
        if kind not in row:
            print(f"  {row['variant']:20} not measured: {row['failed']}")
            continue
        print(
            f"  {row['variant']:20} {row[kind]:10,.0f}  {row[f'{kind}_p10']:10,.0f} to {row[f'{kind}_p90']:10,.0f}  "
            f"{row[kind] / first[kind]:5.2f} x {first['variant']}  {row['model_tflops']:6.1f} TFLOP/s  "
            f"{row.get('peak_memory_gib', 0.0):6.1f} GiB  loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}"
        )


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=positive, default=16, help="optimizer steps of a run (default %(default)s)")
    add("--warmup", type=positive, default=MIN_WARMUP, help="first steps, which are not timed (default %(default)s)")
    add("--rounds", type=positive, default=3, help="measurements of each variant (default %(default)s)")
    add("--timeout_s", type=number(float, above=0), default=600, help="a longer run fails (default %(default)s)")
    add("--output", type=writable, help="JSON file for the results")


def measuring_plan(options: argparse.Namespace) -> Plan:
    """Return the `Plan` that the command line's `options` describe. Raise `UserError` for a wrong --warmup."""
    if not MIN_WARMUP <= options.warmup < options.steps:
        raise UserError(f"--warmup must be from {MIN_WARMUP} to less than --steps {options.steps}.")
    return Plan(options.steps, options.warmup, options.rounds, options.timeout_s)


def main() -> int:
    """Measure the variants of the command line and print the table. The exit code is 1 if every variant failed."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="Llama-3.2-1B", help="bundled name or folder (default %(default)s)")
    add("--rows", type=positive, default=8, help="rows of a micro-batch per GPU (default %(default)s)")
    add("--length", type=positive, default=1024, help="tokens of a row (default %(default)s)")
    add("--micro_batches", type=positive, default=4, help="micro-batches of a step (default %(default)s)")
    add("--num_gpus", type=positive, default=1, help="GPUs of this host (default %(default)s)")
    add("--dataset", help="real documents, as --dataset_name takes them (default: random tokens)")
    add("--variants", default=VARIANTS, help="NAME: OPTIONS; NAME: baseline NAME OPTIONS (default %(default)s)")
    add_measuring_options(parser)
    args = parser.parse_args()
    plan = measuring_plan(args)
    work = Workload(args.model, args.rows, args.length, args.micro_batches, args.num_gpus, args.dataset)
    save = functools.partial(write_rows, args.output) if args.output else None
    rows = measure_all(work, parse_variants(args.variants, args.num_gpus), plan, save)
    print_table(rows)
    return EXIT_FAILED_CHECK if all("failed" in row for row in rows) else 0
