"""The command line of scripts/verify_fp8.py and its exit code."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from llm_fp8.environment import is_left_over
from llm_fp8.errors import EXIT_FAILED_CHECK, EXIT_NO_GPU, EXIT_USER_ERROR, UserError
from llm_fp8.json_files import write_json_atomic
from llm_fp8.verify.output import closing_line, print_rows, record
from llm_fp8.verify.output_folder import try_to_write
from llm_fp8.verify.registry import CHECKS, Check
from llm_fp8.verify.runner import Row, run_checks
from llm_fp8.verify.setup import Setup, model_config

ENGINES = ("ddp", "fsdp_full", "deepspeed_3")
"""Sharding modes that are tried where --engines does not say."""


def exit_code(rows: list[Row], has_gpu: bool) -> int:
    """1 where a check failed, else 3 without a GPU, else 0."""
    if any(row.result.status == "failed" for row in rows):
        return EXIT_FAILED_CHECK
    return 0 if has_gpu else EXIT_NO_GPU


class _Parser(argparse.ArgumentParser):
    """Mistakes in one sentence."""

    def error(self, message: str) -> Any:
        self.exit(EXIT_USER_ERROR, f"error: {message}; '{self.prog} --help' lists the options.\n")


def parse(argv: Sequence[str], description: str) -> argparse.Namespace:
    """The options, checked. Raises `UserError`."""
    parser = _Parser(prog="verify_fp8.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model_name",
        default="meta-llama/Llama-3.2-1B",
        help="whose attention is checked (default %(default)s; no weights are read)",
    )
    parser.add_argument("--max_seq_length", type=int, default=1024, help="tokens of a row (default %(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="rows of a micro-batch (default %(default)s)")
    parser.add_argument("--no_packing", action="store_true", help="padded rows instead of packed ones")
    parser.add_argument("--output_dir", type=Path, default=Path("runs"), help="where runs will write (default %(default)s)")
    parser.add_argument(
        "--engines", default=",".join(ENGINES), help="comma-separated sharding modes to train in (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="leave out rates, exchanges and training runs")
    parser.add_argument("--only", help=f"comma-separated checks to run, of {', '.join(check.name for check in CHECKS)}")
    parser.add_argument("--verbose", action="store_true", help="print the details of checks that passed too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    options = parser.parse_args(argv)
    for name in ("max_seq_length", "batch_size"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)}: give 1 or more.")
    if options.json is not None and (options.json.is_dir() or try_to_write(options.json.parent) is not None):
        raise UserError(f"--json {options.json} cannot be written; give a file in a folder that you may write to.")
    known = {check.name for check in CHECKS}
    if options.only is not None and (unknown := [name for name in options.only.split(",") if name not in known]):
        raise UserError(f"--only {options.only}: {', '.join(unknown)} is unknown; choose from {', '.join(sorted(known))}.")
    return options


def chosen_checks(options: argparse.Namespace) -> list[Check]:
    """What --quick and --only leave."""
    if options.only is not None:
        return [check for check in CHECKS if check.name in options.only.split(",")]
    return [check for check in CHECKS if check.quick or not options.quick]


def _check_engines(modes: Sequence[str]) -> None:
    """Raise `UserError` for a mode that cannot be tried by itself."""
    from llm_fp8.config import SHARDING_MODES

    possible = [mode for mode in SHARDING_MODES if mode not in ("auto", "fsdp_hybrid")]
    if unknown := [mode for mode in modes if mode not in possible]:
        raise UserError(f"--engines: '{', '.join(unknown)}' cannot be tried; choose from {', '.join(possible)}.")


def main(argv: Sequence[str], description: str = "") -> int:
    """Run the checks; returns the exit code.

    The process's environment is cleaned of what launchers leave in a shell, of which the check of the variables speaks, and which would make
    the other checks take themselves for processes of a launch.
    """
    environ = dict(os.environ)
    options = parse(argv, description)
    if "TORCHELASTIC_RUN_ID" in environ:
        raise UserError("verify_fp8.py starts the processes that it needs; run it once, without torchrun or accelerate launch.")
    for name in [name for name in os.environ if is_left_over(name)]:
        del os.environ[name]
    os.environ.setdefault(
        "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
    )  # as in the training scripts; torch is not loaded yet
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    checks = chosen_checks(options)
    setup = Setup(
        model_name=options.model_name,
        max_seq_length=options.max_seq_length,
        batch_size=options.batch_size,
        packing=not options.no_packing,
        output_dir=options.output_dir,
        engines=tuple(options.engines.split(",")),
        environ=environ,
    )
    try:
        num_gpus = _prepare(setup, checks)
        if sys.stdout.isatty():
            with console.status("...") as status:
                rows = run_checks(checks, setup, num_gpus, lambda check: status.update(f"{check.title} ..."))
        else:
            rows = run_checks(checks, setup, num_gpus, lambda check: print(f"{check.title} ...", file=sys.stderr, flush=True))
    finally:
        for probe in setup.probes.values():
            probe.kill()
        shutil.rmtree(setup.scratch, ignore_errors=True)
    code = exit_code(rows, has_gpu=num_gpus > 0)
    print_rows(rows, console, verbose=options.verbose)
    console.print(f"\n{closing_line(rows, has_gpu=num_gpus > 0)}")
    if options.json is not None:
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        write_json_atomic(options.json, record(rows, code, plain, _provenance()))
    return code


def _prepare(setup: Setup, checks: list[Check]) -> int:
    """Find the user's mistakes and start what takes long; returns the number of GPUs.

    A package that does not load is left for the checks to say.
    """
    try:
        num_gpus = setup.num_gpus
        from llm_fp8.quiet import quiet_libraries

        quiet_libraries()
        _check_engines(setup.engines)
        model_config(setup.model_name)  # a name that cannot be read is the user's mistake, found before anything is run
        names = {check.name for check in checks}
        if num_gpus and names & {"attention", "cudnn"}:
            from llm_fp8.verify import attention

            setup.probes["attention"] = attention.start(setup)
        if num_gpus and "steps" in names:
            from llm_fp8.verify import steps

            setup.probes["steps"] = steps.start(setup)
    except UserError:
        raise
    except Exception:  # whatever a broken package raises, the check that needs it says
        return setup.num_gpus
    return num_gpus


def _provenance() -> dict[str, Any] | None:
    try:
        from llm_fp8.provenance import collect_provenance

        return collect_provenance(sys.argv)
    except Exception:  # the file is wanted most where something does not load
        return None
