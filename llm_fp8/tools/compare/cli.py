"""Is fp8 worth it here? Trains bf16 and fp8 runs that differ in nothing else, or reads finished ones, and says so with
its figures.

`llm-fp8 compare` and scripts/compare_performance.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from llm_fp8.tools.compare.launch import Failure, plan_runs, run_all
from llm_fp8.tools.compare.page import render_page
from llm_fp8.tools.compare.report import compare, print_comparison
from llm_fp8.tools.compare.run_record import read_run_folder, read_wandb
from llm_fp8.tools.compare.variants import parse_variants, variants
from llm_fp8.tools.compare.verdict import QUALITY_MARGIN
from llm_fp8.utils.errors import EXIT_FAILED_CHECK, OneSentenceParser, UserError
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.packages import REPOSITORY

PAIR = tuple(REPOSITORY / "runs" / name for name in ("train_bf16", "train_fp8"))
"""What scripts/train_bf16.sh and scripts/train_fp8.sh write: compared where nothing else is named."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--train", metavar="OPTIONS", help="train: options that all runs share, in quotes")
    source.add_argument("--runs", type=Path, nargs="+", metavar="FOLDER", help="read output folders of finished runs")
    source.add_argument("--wandb", nargs="+", metavar="RUN", help="read runs of W&B's server: ENTITY/PROJECT/RUNID")
    names = ", ".join(variants())
    parser.add_argument("--variants", default="bf16,fp8", help=f"of a --train, of {names} (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each with --train, seeds 1, 2, ... (default: 3)")
    parser.add_argument("--num_gpus", type=int, default=1, help="GPUs of each run with --train (default: 1)")
    margin = "nats of eval loss by which a variant may be worse and pass for as good (default: %(default)s)"
    parser.add_argument("--quality_margin", type=float, default=QUALITY_MARGIN, help=margin)
    parser.add_argument("--output", type=Path, help="folder for the results (default: runs/compare or comparison)")
    words = list(argv)
    if "--train" in words[:-1]:  # argparse takes a single word of options ('--use_te') for an option of its own
        at = words.index("--train")
        words[at : at + 2] = [f"--train={words[at + 1]}"]
    options = parser.parse_args(words)
    for name in ("seeds", "num_gpus"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} must be at least 1, not {getattr(options, name)}.")
    return options


def main() -> int:
    """Train or read, compare, report. Exit code 1 where a run failed."""
    options = parse(sys.argv[1:])
    console = Console(soft_wrap=True, markup=False, highlight=False)
    folder: Path = options.output or Path("comparison")
    failures: list[Failure] = []
    if options.train is not None:
        names, num_gpus = parse_variants(options.variants), options.num_gpus
        folder = options.output or Path("runs") / "compare"
        plan = plan_runs(options.train, names, options.seeds, num_gpus, folder)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # the run of the moment saves and stops first
        failures = run_all(plan, num_gpus, console.print)
        failed = {(failure.variant, failure.seed) for failure in failures}
        records = [read_run_folder(run.folder, "--train") for run in plan if (run.variant, run.seed) not in failed]
    elif options.wandb:
        records = [read_wandb(run) for run in options.wandb]
    else:
        records = [read_run_folder(run) for run in options.runs or PAIR]
    if not records:
        console.print("every run failed, so there is nothing to compare")
        return EXIT_FAILED_CHECK
    comparison = compare(records, failures, options.quality_margin)
    print_comparison(comparison, console)
    write_json_atomic(folder / "comparison.json", dataclasses.asdict(comparison))
    (folder / "comparison.html").write_text(render_page(comparison), encoding="utf-8")
    console.print(f"\n{folder / 'comparison.html'}\n{folder / 'comparison.json'}")
    return EXIT_FAILED_CHECK if failures else 0
