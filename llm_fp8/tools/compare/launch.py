"""The runs of a comparison, one after the other: OUTPUT/runs/VARIANT-seedN, with logs in OUTPUT/logs.

The variants take turns within each seed, so that a machine that slows down slows all of them. The same command again
goes on: a finished run is taken as it is, an interrupted one continues from its last checkpoint.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_fp8.config.parser import parse_config
from llm_fp8.tools.compare.run_record import why_unfinished
from llm_fp8.tools.compare.variants import VARIANT_FIELDS, variant_words
from llm_fp8.train.checkpoint import has_checkpoint
from llm_fp8.utils.errors import UserError, reading
from llm_fp8.utils.json_files import read_json, write_json_atomic
from llm_fp8.utils.packages import REPOSITORY
from llm_fp8.utils.subprocesses import run_program, torchrun

_SET_HERE = (*VARIANT_FIELDS, "seed", "output_dir", "resume_from", "wandb_run_name")


@dataclass(frozen=True)
class PlannedRun:
    variant: str
    seed: int
    folder: Path
    log: Path
    words: tuple[str, ...]
    """Options of the training script."""


@dataclass(frozen=True)
class Failure:
    """A run that did not finish."""

    variant: str
    seed: int
    reason: str
    log: str


def plan_runs(train: str, variants: Sequence[str], num_seeds: int, num_gpus: int, folder: Path) -> list[PlannedRun]:
    """The runs of a comparison in `folder`, seed by seed. Raises `UserError` for options that a variant cannot run with
    or that are set here, and for a folder of another comparison.
    """
    with reading("--train", repr(train), "the options"):
        words = [re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), w) for w in shlex.split(train)]
    given = {word.partition("=")[0].removeprefix("--") for word in words}
    if taken := given.intersection(_SET_HERE):
        raise UserError(f"--train: --{min(taken)} is set by --variants, --seeds or --output; leave it out.")
    runs = []
    for seed in range(1, num_seeds + 1):
        for variant in variants:
            name = f"{variant}-seed{seed}"
            own = [*variant_words(variant, words), "--seed", str(seed), "--output_dir", str(folder / "runs" / name)]
            if parse_config(own, parallel=num_gpus > 1).run.use_wandb:
                own += ["--wandb_run_name", name]
            runs.append(PlannedRun(variant, seed, folder / "runs" / name, folder / "logs" / f"{name}.log", tuple(own)))
    plan, shared = folder / "plan.json", {"train": words, "num_gpus": num_gpus}
    if plan.is_file() and read_json(plan) != shared:
        raise UserError(f"--output {folder} holds a comparison with other options ({plan}); choose another folder.")
    write_json_atomic(plan, shared)
    return runs


def run_all(runs: Sequence[PlannedRun], num_gpus: int, say: Callable[[str], None]) -> list[Failure]:
    """Run what has not finished yet; a run that fails does not stop the others. Returns the failures."""
    return [failure for run in runs if (failure := _run(run, num_gpus, say))]


def _run(run: PlannedRun, num_gpus: int, say: Callable[[str], None]) -> Failure | None:
    name, summary = run.folder.name, run.folder / "summary.json"
    if summary.is_file() and why_unfinished(read_json(summary)) is None:
        say(f"{name}: finished earlier, taken as it is ({run.folder})")
        return None
    words = list(run.words)
    if has_checkpoint(run.folder):
        words += ["--resume_from", "latest"]
    elif run.folder.exists():  # interrupted before its first checkpoint
        run.folder.rename(run.folder.with_name(f"{name}.unfinished-{time.strftime('%Y%m%d-%H%M%S')}"))
    command = [sys.executable, str(REPOSITORY / "train_fp8.py"), *words]
    if num_gpus > 1:
        command = torchrun(num_gpus, str(REPOSITORY / "train_multi_gpu.py"), *words)
    say(f"{name}: started, log in {run.log}")
    run.log.parent.mkdir(parents=True, exist_ok=True)
    group = run.folder.parent.parent.resolve().name
    ended = run_program(command, log=run.log, environ={"WANDB_RUN_GROUP": group, **os.environ})
    say(f"{name}: {f'FAILED: {ended.failure}' if ended.failure else 'done'} after {ended.wall_s:.0f} s ({run.log})")
    return Failure(run.variant, run.seed, ended.failure, str(run.log)) if ended.failure else None
