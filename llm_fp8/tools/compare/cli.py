"""Is fp8 worth it here? Trains bf16 and fp8 runs that differ in nothing else, or reads finished ones, and says so with
its figures.

`llm-fp8 compare` and scripts/compare_performance.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from llm_fp8.observability.provenance import visible_gpus
from llm_fp8.tools.compare.launch import Interrupted, claim_folder, default_folder, launch, make_slots, plan_runs
from llm_fp8.tools.compare.page import render_page
from llm_fp8.tools.compare.report import Failure, compare, print_comparison
from llm_fp8.tools.compare.run_record import RunRecord, read_run_folder, read_wandb
from llm_fp8.tools.compare.variants import REFERENCE, parse_variants, variants
from llm_fp8.tools.compare.verdict import QUALITY_MARGIN
from llm_fp8.train.graceful_stop import exit_code
from llm_fp8.utils.errors import OneSentenceParser, UserError
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.packages import REPOSITORY

EXIT_RUN_FAILED = 1
PAIR = tuple(REPOSITORY / "runs" / name for name in ("train_bf16", "train_fp8"))
"""What scripts/train_bf16.sh and scripts/train_fp8.sh write: compared where nothing else is named."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--train", metavar="OPTIONS", help="train: options of the training script that all runs share, in quotes"
    )
    parser.add_argument(
        "--runs", type=Path, nargs="+", metavar="FOLDER", help="read the output folders of finished runs"
    )
    parser.add_argument("--wandb", nargs="+", metavar="RUN", help="read runs of W&B's server: ENTITY/PROJECT/RUNID")
    parser.add_argument("--arms", help=f"with --train: comma-separated, of {', '.join(variants())} (default: bf16,fp8)")
    parser.add_argument("--seeds", type=int, help="with --train: runs of each, with seeds 1, 2, ... (default: 3)")
    parser.add_argument(
        "--num_gpus", type=int, help="with --train: GPUs of each run; above 1 torchrun train_multi_gpu.py (default: 1)"
    )
    parser.add_argument(
        "--gpus", help="with --train: numbers of the GPUs to use, as 0,1 (default: all that are visible)"
    )
    parser.add_argument(
        "--parallel", type=int, help="with --train: runs at a time, each on GPUs of its own (default: 1)"
    )
    parser.add_argument(
        "--share_gpus", action="store_true", help="with --parallel: let runs share GPUs; their speed is flagged then"
    )
    parser.add_argument(
        "--quality_margin",
        type=float,
        default=QUALITY_MARGIN,
        help=f"nats of eval loss by which a variant may be worse and still pass for as good (default {QUALITY_MARGIN})",
    )
    parser.add_argument(
        "--output", type=Path, help="folder for the results (default: with --train runs/compare-*, else comparison)"
    )
    # argparse takes a single word of options ('--use_te') for an option of its own unless it is joined to --train.
    words = list(argv)
    if "--train" in words[:-1]:
        at = words.index("--train")
        words[at : at + 2] = [f"--train={words[at + 1]}"]
    return parser.parse_args(words)


def check(options: argparse.Namespace) -> None:
    """Fill in what is compared where nothing is named. Raise `UserError` for options that exclude or need each
    other.
    """
    if options.train is None and not options.runs and not options.wandb:
        if missing := [folder.name for folder in PAIR if not (folder / "summary.json").is_file()]:
            scripts = " and ".join(f"scripts/{name}.sh" for name in missing)
            raise UserError(
                "give --train OPTIONS to train the variants, --runs or --wandb to compare runs that exist, or run "
                f"{scripts} first, whose runs are compared where nothing is named."
            )
        options.runs = list(PAIR)
        options.output = options.output or PAIR[0].with_name("compare_train")
    if options.train is not None and (options.runs or options.wandb):
        raise UserError("--train trains the runs that it compares; give it without --runs and --wandb.")
    if options.train is None:
        for name in ("arms", "seeds", "num_gpus", "gpus", "parallel", "share_gpus"):
            if getattr(options, name):
                raise UserError(f"--{name} belongs to --train and has no effect without it; drop it.")
    if not 0 <= options.quality_margin < math.inf:
        raise UserError(f"--quality_margin must be a number of at least 0, not {options.quality_margin}.")
    for name in ("seeds", "num_gpus", "parallel"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}.")
    if options.share_gpus and (options.parallel or 1) == 1:
        raise UserError("--share_gpus has no effect without --parallel 2 or more; add that, or drop it.")


def usable_gpus(given: str | None) -> list[str]:
    """GPU numbers, or UUIDs, as CUDA_VISIBLE_DEVICES takes them: those of --gpus, else all that this process sees;
    empty without a GPU.
    """
    known = visible_gpus()
    if given is None:
        return known
    wanted = [word.strip() for word in given.split(",") if word.strip()]
    if unknown := [gpu for gpu in wanted if gpu not in known]:
        raise UserError(
            f"--gpus {given}: {', '.join(unknown)} is not among the GPUs of this machine "
            f"({', '.join(known) or 'none'})."
        )
    if not wanted or len(set(wanted)) < len(wanted):
        raise UserError(f"--gpus {given}: name each GPU once, separated by commas.")
    return wanted


def trained(
    options: argparse.Namespace, folder: Path, console: Console
) -> tuple[list[RunRecord], list[Failure], list[tuple[str, str]]]:
    """Run the variants; the records of those that finished, the failures, and the pairs that shared hardware."""
    names, num_gpus = parse_variants("bf16,fp8" if options.arms is None else options.arms), options.num_gpus or 1
    plan = plan_runs(options.train, names, range(1, (options.seeds or 3) + 1), num_gpus, folder)
    slots = make_slots(usable_gpus(options.gpus), num_gpus, options.parallel or 1, options.share_gpus)
    with named_if_unwritable(folder):
        claim_folder(plan)
    console.print(f"{len(plan.runs)} runs ({', '.join(names)}) in {folder}")
    if REFERENCE not in names and not (folder / "runs").exists():
        console.print(f"no variant is {REFERENCE}, so the variants get figures and no verdict")
    failures, overlaps = launch(plan, slots, console.print)
    failed = {(failure.arm, failure.seed) for failure in failures}
    records = [
        read_run_folder(plan.run_folder(run), "--train") for run in plan.runs if (run.variant, run.seed) not in failed
    ]
    return records, failures, overlaps


@contextmanager
def named_if_unwritable(folder: Path) -> Iterator[None]:
    """Turn the error of a folder that cannot be written to into a `UserError` that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--output {folder} cannot be written to ({error}); choose another folder.") from error


def main() -> int:
    """Train or read, compare, report."""
    options = parse(sys.argv[1:])
    check(options)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if options.train is not None:
        folder = options.output or default_folder(options.train, options.num_gpus or 1)
        try:
            records, failures, overlaps = trained(options, folder, console)
        except Interrupted as signal_name:
            console.print(f"stopped by {signal_name}; the same command again goes on from here")
            return exit_code(str(signal_name))
    else:
        folder = options.output or Path("comparison")
        records = [read_run_folder(run) for run in options.runs or []] + [
            read_wandb(run) for run in options.wandb or []
        ]
        failures, overlaps = [], []
    order = list(variants()) if options.arms is None else parse_variants(options.arms)
    if not records:
        console.print("every run failed, so there is nothing to compare")
        return EXIT_RUN_FAILED
    comparison = compare(records, failures, overlaps, order, options.quality_margin)
    print_comparison(comparison, console)
    with named_if_unwritable(folder):
        write_json_atomic(folder / "comparison.json", dataclasses.asdict(comparison))
        (folder / "comparison.html").write_text(render_page(comparison), encoding="utf-8")
    console.print(f"\n{folder / 'comparison.html'}\n{folder / 'comparison.json'}")
    return EXIT_RUN_FAILED if failures else 0
