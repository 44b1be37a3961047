"""The command line of scripts/verify_fp8.py and its exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llm_fp8.tools.verify.configs import required_kind
from llm_fp8.tools.verify.environment_rules import is_left_over
from llm_fp8.tools.verify.output_folder import try_to_write
from llm_fp8.tools.verify.result import STATUSES
from llm_fp8.tools.verify.runner import CHECKS, Check, NoEnd, Row, is_hanging, run_checks, within
from llm_fp8.tools.verify.setup import Setup, model_config
from llm_fp8.utils.cuda_environment import CUDA_DEFAULTS
from llm_fp8.utils.errors import EXIT_FAILED_CHECK, EXIT_NO_GPU, FailedCheck, OneSentenceParser, UserError
from llm_fp8.utils.json_files import write_json_atomic

ENGINES = ("ddp", "fsdp_full", "deepspeed_3")
"""Sharding modes that are tried where --engines does not say."""
PREPARE_LIMIT_S = 180.0


def exit_code(rows: list[Row], has_gpu: bool) -> int:
    """1 where a check failed, else 3 without a GPU, else 0."""
    if any(row.result.status == "failed" for row in rows):
        return EXIT_FAILED_CHECK
    return 0 if has_gpu else EXIT_NO_GPU


def parse(argv: Sequence[str], description: str) -> argparse.Namespace:
    """The options, checked. Raises `UserError`."""
    parser = OneSentenceParser(
        prog="verify_fp8.py", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model_name",
        default="meta-llama/Llama-3.2-1B",
        help="whose attention is checked (default %(default)s; no weights are read)",
    )
    parser.add_argument("--max_seq_length", type=int, default=1024, help="tokens of a row (default %(default)s)")
    parser.add_argument("--batch_size", type=int, default=8, help="rows of a micro-batch (default %(default)s)")
    parser.add_argument("--no_packing", action="store_true", help="padded rows instead of packed ones")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs"), help="where runs will write (default %(default)s)"
    )
    parser.add_argument(
        "--engines", default=",".join(ENGINES), help="comma-separated sharding modes to train in (default %(default)s)"
    )
    parser.add_argument(
        "--config_file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a DeepSpeed file, or one of accelerate launch, to look through beside those in configs/; may be given "
        "several times",
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave out rates, exchanges, training runs and torchao's steps"
    )
    parser.add_argument("--only", help=f"comma-separated checks to run, of {', '.join(check.name for check in CHECKS)}")
    parser.add_argument("--verbose", action="store_true", help="print the details of checks that passed too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    options = parser.parse_args(argv)
    for name in ("max_seq_length", "batch_size"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)}: give 1 or more.")
    if options.json is not None and (options.json.is_dir() or try_to_write(options.json.parent) is not None):
        raise UserError(f"--json {options.json} cannot be written; give a file in a folder that you may write to.")
    for path in options.config_file:
        required_kind(path)
    options.engines = tuple(dict.fromkeys(options.engines.split(",")))
    known = {check.name for check in CHECKS}
    if options.only is not None and (unknown := [name for name in options.only.split(",") if name not in known]):
        raise UserError(
            f"--only {options.only}: {', '.join(unknown)} is unknown; choose from {', '.join(sorted(known))}."
        )
    return options


def chosen_checks(options: argparse.Namespace) -> list[Check]:
    """What --quick and --only leave."""
    if options.only is not None:
        return [check for check in CHECKS if check.name in options.only.split(",")]
    return [check for check in CHECKS if check.quick or not options.quick]


def _check_engines(modes: Sequence[str]) -> None:
    """Raise `UserError` for a mode that cannot be tried by itself."""
    from llm_fp8.config.options import SHARDING_MODES

    possible = [mode for mode in SHARDING_MODES if mode not in ("auto", "fsdp_hybrid")]
    if unknown := [mode for mode in modes if mode not in possible]:
        raise UserError(f"--engines: '{', '.join(unknown)}' cannot be tried; choose from {', '.join(possible)}.")


def main(argv: Sequence[str], description: str = "") -> int:
    """Run the checks; returns the exit code.

    The process's environment is cleaned of what launchers leave in a shell, of which the check of the variables speaks,
    and which would make the other checks take themselves for processes of a launch.
    """
    environ = dict(os.environ)
    options = parse(argv, description)
    if "TORCHELASTIC_RUN_ID" in environ:
        raise UserError(
            "verify_fp8.py starts the processes that it needs; run it once, without torchrun or accelerate launch."
        )
    for name in [name for name in os.environ if is_left_over(name)]:
        del os.environ[name]
    os.environ.update({**CUDA_DEFAULTS, **os.environ})  # torch is not loaded yet
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    checks = chosen_checks(options)
    setup = Setup(
        model_name=options.model_name,
        max_seq_length=options.max_seq_length,
        batch_size=options.batch_size,
        packing=not options.no_packing,
        output_dir=options.output_dir,
        engines=options.engines,
        environ=environ,
        config_files=tuple(options.config_file),
    )
    record = Record(options.json, vars(options), checks)
    stopped: int | None = None
    has_gpu = False
    try:
        with signals_raise(), Progress(console) as progress:
            progress.say("torch, models, GPUs")
            prepare(setup, checks)
            has_gpu = setup.num_gpus > 0

            def before(check: Check) -> None:
                record.begin(check)
                progress.say(check.title)

            for row in run_checks(checks, setup, setup.num_gpus, before):
                record.add(row)
                record.write(None)
            record.provenance = _provenance()
    except Stopped as stop:
        stopped = stop.exit_code
    except FailedCheck:
        record.write(EXIT_FAILED_CHECK)
        raise
    finally:
        for process in (*setup.probes.values(), setup.engine_runs):
            if process is not None:
                process.kill()
        shutil.rmtree(setup.scratch, ignore_errors=True)
    code = exit_code(record.rows, has_gpu) if stopped is None else stopped
    record.write(code)
    print_rows(record.rows, console, verbose=options.verbose)
    console.print(f"\n{closing_line(record.rows, has_gpu)}; {record.wall_s:.0f} s")
    if stopped is not None:
        where = "" if record.under_way is None else f" in '{record.under_way.title}'"
        console.print(f"stopped{where}; what came behind was not checked")
    if is_hanging():  # its thread would be waited for by what torch and CUDA do at the end of a program
        sys.stdout.flush()
        os._exit(code)
    return code


class Stopped(BaseException):
    """A signal asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a lost terminal raise `Stopped`, so that what was found is kept and no process is left."""

    def stop(number: int, _: object) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare(setup: Setup, checks: Sequence[Check]) -> None:
    """Find the user's mistakes and start what takes long. Raises `UserError`, and `FailedCheck` where torch or the
    driver hangs.

    A package that does not load is left for the checks to say.
    """
    try:
        within(PREPARE_LIMIT_S, lambda: look_around(setup))
    except NoEnd as hung:
        where = hung.stack[-2].strip() if len(hung.stack) > 1 else "native code"
        raise FailedCheck(
            f"loading torch, asking the driver for GPUs and reading --model_name {setup.model_name} {hung}, in "
            f"{where}; see whether 'nvidia-smi' answers, and whether the disk of the Python environment does."
        ) from hung
    names = {check.name for check in checks}
    if not setup.num_gpus:
        return
    # In this thread, whose end would be taken by the processes for the end of the program.
    with contextlib.suppress(ImportError, OSError):
        if "engines" in names:  # the longest first
            from llm_fp8.tools.verify import engines

            setup.engine_runs = engines.start(setup)
        if names & {"steps", "torchao_steps"}:
            from llm_fp8.tools.verify import steps

            for name in names & steps.LIBRARIES.keys():
                setup.probes[name] = steps.start(setup, steps.LIBRARIES[name])
        if names & {"attention", "cudnn"}:
            from llm_fp8.tools.verify import attention

            setup.probes["attention"] = attention.start(setup)


def look_around(setup: Setup) -> None:
    """Load torch and count the GPUs; read what the options name."""
    setup.num_gpus  # noqa: B018 - kept by the object
    try:
        from llm_fp8.utils.console import quiet_libraries

        quiet_libraries()
        _check_engines(setup.engines)
        model_config(setup.model_name)  # a name that cannot be read is the user's mistake, found before anything is run
    except UserError:
        raise
    except Exception:  # whatever a broken package raises, the check that needs it says
        return


def _provenance() -> dict[str, Any] | None:
    try:
        from llm_fp8.observability.provenance import collect_provenance

        return collect_provenance(sys.argv)
    except Exception:  # the file is wanted most where something does not load
        return None


# --- output ----------------------------------------------------------------------------------------------
# The table on the terminal, and the JSON file, which is written anew after every check.

_STYLES = {"failed": "bold red", "warning": "yellow", "skipped": "dim", "info": "cyan", "passed": "green"}
SHOWN_DETAILS = 12


def print_rows(rows: list[Row], console: Console, *, verbose: bool) -> None:
    """The table, then what is to be mended. Details of checks that passed are left to `verbose`."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for row in rows:
        result = row.result
        details = result.details if verbose or result.status in ("failed", "warning") else ()
        hidden = len(details) - SHOWN_DETAILS
        lines = [result.summary, *(f"  {detail}" for detail in (details if verbose else details[-SHOWN_DETAILS:]))]
        if hidden > 0 and not verbose:
            lines.insert(1, f"  ({hidden} more lines with --verbose)")
        style = _STYLES[result.status]
        table.add_row(
            f"[{style}]{result.status}[/]",
            row.check.title,
            escape("\n".join(lines)),
            f"{row.wall_s:.1f} s" if row.wall_s else "",
        )
    console.print(table)
    for heading, status in (("To mend", "failed"), ("To look at", "warning")):
        mended = [row for row in rows if row.result.status == status and row.result.mends]
        if mended:
            console.print(f"\n[bold]{heading}[/]")
        for row in mended:
            console.print(f"  {row.check.title}:")
            for mend in row.result.mends:
                console.print(f"    {escape(mend)}", soft_wrap=True, highlight=False)


def closing_line(rows: list[Row], has_gpu: bool) -> str:
    """How many checks ended how, and what could not be checked."""
    counts = {status: sum(row.result.status == status for row in rows) for status in STATUSES}
    line = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    if not has_gpu:
        line += "; without a GPU nothing is said of fp8"
    return line


@dataclass
class Record:
    """What the JSON file holds. A check keeps its name for good."""

    path: Path | None
    """None: nothing is written."""
    options: dict[str, Any]
    checks: Sequence[Check]
    rows: list[Row] = field(default_factory=list)
    under_way: Check | None = None
    provenance: dict[str, Any] | None = None
    _began: float = field(default_factory=time.perf_counter)

    @property
    def wall_s(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._began

    def begin(self, check: Check) -> None:
        """`check` is under way."""
        self.under_way = check
        self.write(None)

    def add(self, row: Row) -> None:
        """A check has ended."""
        self.rows.append(row)
        self.under_way = None

    def write(self, exit_code: int | None) -> None:
        """Write the file as far as it is known; `exit_code` None: the checks are still running, or were killed."""
        if self.path is not None:
            write_json_atomic(self.path, self.contents(exit_code))

    def contents(self, exit_code: int | None) -> dict[str, Any]:
        """The file's contents."""
        reached = {row.check.name for row in self.rows}
        return {
            "exit_code": exit_code,
            "under_way": None if self.under_way is None else self.under_way.name,
            "wall_s": self.wall_s,
            "options": self.options,
            "checks": [
                {
                    "name": row.check.name,
                    "title": row.check.title,
                    "status": row.result.status,
                    "summary": row.result.summary,
                    "details": list(row.result.details),
                    "mends": list(row.result.mends),
                    "facts": row.result.facts,
                    "wall_s": row.wall_s,
                }
                for row in self.rows
            ],
            "not_checked": [check.name for check in self.checks if check.name not in reached]
            + [row.check.name for row in self.rows if row.result.status == "skipped"],
            "provenance": self.provenance,
        }


class Progress:
    """Says which check is under way: in place on a terminal, a line on stderr elsewhere."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("") if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """What is under way."""
        if self._status is not None:
            self._status.update(f"{text} ...")
        else:
            print(f"{text} ...", file=sys.stderr, flush=True)
