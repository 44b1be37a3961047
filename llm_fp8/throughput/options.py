"""The options that all benches of training share: how many steps are timed, how often, for how long at most, and where the results go."""

from __future__ import annotations

import argparse
from pathlib import Path

from llm_fp8.errors import UserError
from llm_fp8.json_files import require_writable


def add_measuring_options(
    parser: argparse.ArgumentParser,
    *,
    steps: int,
    warmup: int,
    arm_timeout_s: float,
    rounds: int | None = None,
    output_required: bool = True,
) -> None:
    """Declare them with these defaults; without `rounds` each arm is measured once, and there is no --rounds."""
    parser.add_argument(
        "--steps",
        type=int,
        default=steps,
        help="optimizer steps of a measurement, the left-out ones included (default %(default)s)",
    )
    parser.add_argument("--warmup", type=int, default=warmup, help="first steps of a measurement, left out (default %(default)s)")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="how often the arms take turns (default %(default)s)")
    parser.add_argument(
        "--arm_timeout_s",
        type=float,
        default=arm_timeout_s,
        help="a measurement that takes longer has failed (default %(default)s)",
    )
    parser.add_argument("--output", type=Path, required=output_required, help="JSON file for the results")


def add_resuming_option(parser: argparse.ArgumentParser) -> None:
    """Declare --resume, of the benches whose file is written after every measurement."""
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what --output holds and measure the rounds and arms that it lacks, or that failed; same code, packages and kind of GPU only",
    )


def check_measuring_options(options: argparse.Namespace, recorded_step: int = 0) -> None:
    """Raise `UserError` on values that measure nothing, or where nothing can be written.

    `recorded_step`: one whose kernels are recorded, which must be among those left out.
    """
    if not 0 <= options.warmup < options.steps:
        raise UserError(f"--warmup {options.warmup} must leave some of the {options.steps} --steps to be timed.")
    if recorded_step and options.warmup <= recorded_step:
        raise UserError(f"--warmup {options.warmup} must be more than {recorded_step}, the step whose kernels are recorded.")
    if "rounds" in options and options.rounds < 1:
        raise UserError(f"--rounds {options.rounds} measures nothing; give 1 or more.")
    if not options.arm_timeout_s > 0:
        raise UserError(f"--arm_timeout_s {options.arm_timeout_s:g} leaves no time to measure in; give seconds, more than 0.")
    if options.output is None and "resume" in options and options.resume:
        raise UserError("--resume goes on from the file of --output, and none is named.")
    if options.output is not None:
        require_writable("--output", options.output)
