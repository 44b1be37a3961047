"""Is fp8 worth it here? Train runs that differ only in precision, or read finished runs, and compare them.

Runs are in OUTPUT/runs/VARIANT-seedN, their logs in OUTPUT/logs. All variants run with one seed before the next seed
begins, so that a slow machine affects all variants. Repeating the command keeps finished runs and resumes others.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from llm_fp8.config.parser import parse_config, with_underscores
from llm_fp8.tools.compare import run_record
from llm_fp8.tools.compare.report import Failure, compare, print_comparison, render_page
from llm_fp8.tools.compare.verdict import QUALITY_MARGIN
from llm_fp8.tools.programs import run_program, training_command, wide_console
from llm_fp8.tools.script import EXIT_FAILED_CHECK, writable
from llm_fp8.utils.errors import OneSentenceParser, UserError, number, positive, reading
from llm_fp8.utils.json_files import read_json, write_json_atomic
from llm_fp8.utils.packages import REPOSITORY

PAIR = tuple(REPOSITORY / "runs" / name for name in ("train_bf16", "train_fp8"))
"""Default runs to compare: the outputs of scripts/train_bf16.sh and scripts/train_fp8.sh."""

_SET_HERE = (*run_record.VARIANT_FIELDS, "seed", "output_dir", "resume_from", "wandb_run_name")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--train", metavar="OPTIONS", help="train runs with these shared options, in quotes")
    source.add_argument("--runs", type=Path, nargs="+", metavar="FOLDER", help="read output folders of finished runs")
    source.add_argument("--wandb", nargs="+", metavar="RUN", help="read runs from W&B's server: ENTITY/PROJECT/RUNID")
    names = ", ".join(run_record.variants())
    add("--variants", default="bf16,fp8", help=f"variants to train, from {names} (default: %(default)s)")
    add("--seeds", type=positive, default=3, help="runs of each variant with --train, seeds 1, 2, ... (default: 3)")
    add("--num_gpus", type=positive, default=1, help="GPUs of each run with --train (default: 1)")
    margin_help = "nats of eval loss by which a variant may be worse and still count as good (default: %(default)s)"
    add("--quality_margin", type=number(float, at_least=0), default=QUALITY_MARGIN, help=margin_help)
    results, output_help = Path("runs/compare"), "folder for the results (default: %(default)s)"
    add("--output", type=lambda word: writable(f"{word}/comparison.json").parent, default=results, help=output_help)
    arguments = list(argv)
    if "--train" in arguments[:-1]:  # argparse would parse a single quoted option ('--use_te') as its own
        index = arguments.index("--train")
        arguments[index : index + 2] = [f"--train={arguments[index + 1]}"]
    return parser.parse_args(arguments)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    variant: str
    seed: int
    folder: Path
    argv: tuple[str, ...]  # the options for the training script


def plan_runs(train: str, variants: Sequence[str], num_seeds: int, num_gpus: int, folder: Path) -> list[PlannedRun]:
    """Plan a run per seed and variant, below `folder`. Raise `UserError` if the shared options `train` are unusable."""
    with reading("--train", repr(train), "the options"):
        argv = [with_underscores(word) for word in shlex.split(train)]
    if reserved := {word.partition("=")[0].removeprefix("--") for word in argv}.intersection(_SET_HERE):
        raise UserError(f"--train: --{min(reserved)} is set by --variants, --seeds or --output; leave it out.")
    runs = []
    for seed in range(1, num_seeds + 1):
        for variant in variants:
            run_folder = folder / "runs" / f"{variant}-seed{seed}"
            options = [*run_record.variant_argv(variant, argv), "--seed", str(seed), "--output_dir", str(run_folder)]
            if parse_config(options, parallel=num_gpus > 1).run.trackers:
                options += ["--wandb_run_name", run_folder.name]
            runs.append(PlannedRun(variant, seed, run_folder, tuple(options)))
    plan, shared = folder / "plan.json", {"train": argv, "num_gpus": num_gpus}
    if plan.is_file() and read_json(plan) != shared:
        raise UserError(f"--output {folder} holds a comparison with other options ({plan}); choose another folder.")
    write_json_atomic(plan, shared)
    return runs


def _run(run: PlannedRun, num_gpus: int, console: Console) -> Failure | None:
    """Start or resume a planned run, unless it has finished already. Return the failure, if any."""
    name, summary = run.folder.name, run.folder / "summary.json"
    if summary.is_file() and run_record.why_unfinished(read_json(summary)) is None:
        console.print(f"{name}: finished earlier ({run.folder})")
        return None
    resuming = ["--resume_from", "latest"] if run.folder.exists() else []  # without a checkpoint the run starts over
    output = run.folder.parent.parent
    log = output / "logs" / f"{name}.log"
    console.print(f"{name}: started, log in {log}")
    log.parent.mkdir(parents=True, exist_ok=True)
    environ = {"WANDB_RUN_GROUP": output.resolve().name, **os.environ}
    outcome = run_program(training_command(num_gpus, *run.argv, *resuming), log=log, environ=environ)
    console.print(f"{name}: {f'FAILED: {outcome.failure}' if outcome.failure else 'done'} after {outcome.wall_s:.0f} s")
    return Failure(run.variant, run.seed, outcome.failure, str(log)) if outcome.failure else None


def main() -> int:
    """Train or read runs, then compare and report them. If a run fails, continue with the others and return 1."""
    options, console = parse(sys.argv[1:]), wide_console(soft_wrap=True, markup=False)
    folder, num_gpus, failures = options.output, options.num_gpus, list[Failure]()
    if options.train is not None:
        plan = plan_runs(options.train, run_record.parse_variants(options.variants), options.seeds, num_gpus, folder)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # lets the current run save and stop first
        outcomes = [(run, _run(run, num_gpus, console)) for run in plan]
        failures = [failure for _, failure in outcomes if failure]
        records = [run_record.read_run_folder(run.folder, "--train") for run, failure in outcomes if not failure]
    elif options.wandb:
        records = [run_record.read_wandb(run) for run in options.wandb]
    else:
        records = [run_record.read_run_folder(run) for run in options.runs or PAIR]
    if not records:
        console.print("every run failed, so there is nothing to compare")
        return EXIT_FAILED_CHECK
    comparison = compare(records, failures, options.quality_margin)
    write_json_atomic(folder / "comparison.json", dataclasses.asdict(comparison))
    (folder / "comparison.html").write_text(render_page(comparison), encoding="utf-8")
    print_comparison(comparison, console)  # last, since `| head` ends the program here
    console.print(f"\n{folder / 'comparison.html'}\n{folder / 'comparison.json'}")
    return EXIT_FAILED_CHECK if failures else 0
