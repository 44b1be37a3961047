"""`llm-fp8 verify` and scripts/verify_fp8.py: the command line, the terminal and JSON output, and the exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from llm_fp8.tools.verify.configs import required_kind
from llm_fp8.tools.verify.environment_rules import is_left_over
from llm_fp8.tools.verify.result import STATUSES, Setup, model_config
from llm_fp8.tools.verify.runner import CHECKS, Check, Row, TimeLimit, is_hanging, run_check, within
from llm_fp8.utils.cuda_environment import CUDA_DEFAULTS
from llm_fp8.utils.errors import EXIT_FAILED_CHECK, EXIT_NO_GPU, FailedCheck, OneSentenceParser, UserError
from llm_fp8.utils.json_files import require_writable, write_json_atomic

ENGINES = ("ddp", "fsdp_full", "deepspeed_3")
"""Sharding modes that are tried without --engines."""
PREPARE_LIMIT_S = 180.0
SHOWN_DETAILS = 12
_STYLES = {"failed": "bold red", "warning": "yellow", "skipped": "dim", "info": "cyan", "passed": "green"}


def exit_code(rows: list[Row], has_gpu: bool) -> int:
    """1 where a check failed, else 3 without a GPU, else 0."""
    if any(row.result.status == "failed" for row in rows):
        return EXIT_FAILED_CHECK
    return 0 if has_gpu else EXIT_NO_GPU


def parse(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    """The options, checked. Raises `UserError`."""
    parser = OneSentenceParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = [check.name for check in CHECKS]
    add(
        "--model_name",
        default="meta-llama/Llama-3.2-1B",
        help="whose attention is checked (default %(default)s; no weights are read)",
    )
    add("--max_seq_length", type=int, default=1024, help="tokens of a sequence (default %(default)s)")
    add("--batch_size", type=int, default=8, help="sequences of a micro-batch (default %(default)s)")
    add("--no_packing", action="store_true", help="padded sequences instead of packed ones")
    add("--output_dir", type=Path, default=Path("runs"), help="where runs will write (default %(default)s)")
    add("--engines", default=",".join(ENGINES), help="comma-separated sharding modes to train in (default %(default)s)")
    add(
        "--config_file",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a DeepSpeed or accelerate launch file to check beside those in configs/; may be given several times",
    )
    add("--quick", action="store_true", help="leave out rates, collectives, training runs and torchao's steps")
    add("--only", help=f"comma-separated checks to run, of {', '.join(names)}")
    add("--verbose", action="store_true", help="print the details of checks that passed too")
    add("--json", type=Path, metavar="FILE", help="write everything that was found")
    options = parser.parse_args(argv)
    for name in ("max_seq_length", "batch_size"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)}: give 1 or more.")
    if options.json is not None:
        require_writable("--json", options.json)
    for path in options.config_file:
        required_kind(path)
    options.engines = tuple(dict.fromkeys(options.engines.split(",")))
    if options.only is not None and (unknown := set(options.only.split(",")).difference(names)):
        raise UserError(f"--only {options.only}: {', '.join(unknown)} is unknown; choose from {', '.join(names)}.")
    return options


def main(argv: Sequence[str] | None = None, description: str = "Is this machine fit to train in fp8?") -> int:
    """Run the checks; returns the exit code.

    Variables that a launcher left in the shell are removed from the process's environment: the check of the variables
    reports them, and the other checks would take themselves for processes of a launch.
    """
    environ = dict(os.environ)
    options = parse(argv, description)
    if "TORCHELASTIC_RUN_ID" in environ:
        raise UserError(
            "verify_fp8.py starts the processes that it needs; run it once, without torchrun or accelerate launch."
        )
    for name in filter(is_left_over, environ):
        del os.environ[name]
    os.environ.update({**CUDA_DEFAULTS, **os.environ})  # torch is not loaded yet
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    wanted = [check.name for check in CHECKS if check.quick or not options.quick]
    wanted = wanted if options.only is None else options.only.split(",")
    checks = [check for check in CHECKS if check.name in wanted]
    setup = Setup(
        model_name=options.model_name,
        max_seq_length=options.max_seq_length,
        batch_size=options.batch_size,
        packing=not options.no_packing,
        output_dir=options.output_dir,
        engines=options.engines,
        environ=environ,
        scratch=Path(tempfile.mkdtemp(prefix="verify-fp8-")),
        config_files=tuple(options.config_file),
    )
    record = Record(options.json, vars(options), checks)
    stopped: int | None = None
    has_gpu = False
    try:
        with signals_raise(), progress(console) as say:
            say("torch, models, GPUs")
            prepare(setup, checks)
            has_gpu = setup.num_gpus > 0
            for check in checks:
                record.under_way = check
                record.write(None)
                say(check.title)
                record.rows.append(run_check(check, setup))
                record.under_way = None
            record.provenance = _provenance()
    except Stopped as stop:
        stopped = stop.args[0]
    except FailedCheck:
        record.write(EXIT_FAILED_CHECK)
        raise
    finally:
        for process in setup.processes.values():
            process.kill()
        shutil.rmtree(setup.scratch, ignore_errors=True)
    code = exit_code(record.rows, has_gpu) if stopped is None else stopped
    record.write(code)
    print_rows(record.rows, console, verbose=options.verbose)
    counts = Counter(row.result.status for row in record.rows)
    summary = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    without = "" if has_gpu else "; without a GPU nothing is said of fp8"
    console.print(f"\n{summary}{without}; {record.wall_s:.0f} s")
    if stopped is not None:
        where = "" if record.under_way is None else f" in '{record.under_way.title}'"
        console.print(f"stopped{where}; the checks after it did not run")
    if is_hanging():  # torch and CUDA would wait for its thread at the end of the program
        sys.stdout.flush()
        os._exit(code)
    return code


class Stopped(BaseException):
    """A signal asked for the end; with the exit code."""


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a lost terminal raise `Stopped`, so that findings are kept and no process is left."""

    def stop(number: int, _: object) -> None:
        raise Stopped(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def prepare(setup: Setup, checks: Sequence[Check]) -> None:
    """Find the user's mistakes and start what takes long. Raises `UserError`, and `FailedCheck` where torch or the
    driver hangs. A package that does not load is left to the check `imports`.
    """
    try:
        within(PREPARE_LIMIT_S, lambda: _load_and_validate(setup))
    except TimeLimit as hung:
        where = hung.stack[-2].strip() if len(hung.stack) > 1 else "native code"
        raise FailedCheck(
            f"loading torch, asking the driver for GPUs and reading --model_name {setup.model_name} {hung}, in "
            f"{where}; check that 'nvidia-smi' and the disk of the Python environment respond."
        ) from hung
    if setup.num_gpus:
        names = {check.name for check in checks}
        for module in ("distributed", "steps", "attention"):  # the longest first
            with contextlib.suppress(ImportError, OSError):
                # In the main thread: the processes end with the thread that starts them.
                importlib.import_module(f"llm_fp8.tools.verify.{module}").start(setup, names)


def _load_and_validate(setup: Setup) -> None:
    """Load torch, count the GPUs, and validate --engines and --model_name."""
    setup.num_gpus  # noqa: B018 - cached by the object
    try:
        from llm_fp8.config.options import SHARDING_MODES
        from llm_fp8.utils.console import quiet_libraries

        quiet_libraries()
        possible = [mode for mode in SHARDING_MODES if mode not in ("auto", "fsdp_hybrid")]
        if unknown := ", ".join(mode for mode in setup.engines if mode not in possible):
            raise UserError(f"--engines: '{unknown}' cannot be tried; choose from {', '.join(possible)}.")
        model_config(setup.model_name)
    except UserError:
        raise
    except Exception:  # whatever a broken package raises, the check that needs it reports
        return


def _provenance() -> dict[str, Any] | None:
    try:
        from llm_fp8.observability.provenance import collect_provenance

        return collect_provenance(sys.argv)
    except Exception:  # the file is most useful where something does not load
        return None


# --- output --------------------------------------------------------------------------------------------------


def print_rows(rows: list[Row], console: Console, *, verbose: bool) -> None:
    """The table, then the fixes. Details of checks that passed are printed with `verbose`."""
    columns = (
        Column(no_wrap=True),
        Column(no_wrap=True),
        Column(overflow="fold"),
        Column(justify="right", no_wrap=True),
    )
    table = Table(*columns, box=None, pad_edge=False, show_header=False)
    for check, result, wall_s in rows:
        details = list(result.details) if verbose or result.status in ("failed", "warning") else []
        if not verbose and (hidden := len(details) - SHOWN_DETAILS) > 0:
            details = [f"({hidden} more lines with --verbose)", *details[-SHOWN_DETAILS:]]
        text = "\n  ".join([result.summary, *details])
        status = f"[{_STYLES[result.status]}]{result.status}[/]"
        table.add_row(status, check.title, escape(text), f"{wall_s:.1f} s" if wall_s else "")
    console.print(table)
    for heading, status in (("To fix", "failed"), ("To look at", "warning")):
        found = [row for row in rows if row.result.status == status and row.result.fixes]
        if found:
            console.print(f"\n[bold]{heading}[/]")
        for row in found:
            console.print(f"  {row.check.title}:")
            for fix in row.result.fixes:
                console.print(f"    {escape(fix)}", soft_wrap=True, highlight=False)


@dataclass
class Record:
    """The JSON file."""

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
        return time.perf_counter() - self._began

    def write(self, exit_code: int | None) -> None:
        """Write what is known by now; `exit_code` None: the checks are still running, or were killed."""
        if self.path is None:
            return
        reached = [row.check.name for row in self.rows]
        not_reached = [check.name for check in self.checks if check.name not in reached]
        skipped = [row.check.name for row in self.rows if row.result.status == "skipped"]
        contents = {
            "exit_code": exit_code,
            "under_way": None if self.under_way is None else self.under_way.name,
            "wall_s": self.wall_s,
            "options": self.options,
            "checks": [
                {
                    "name": check.name,
                    "title": check.title,
                    "status": result.status,
                    "summary": result.summary,
                    "details": list(result.details),
                    "mends": list(result.fixes),
                    "facts": result.facts,
                    "wall_s": wall_s,
                }
                for check, result, wall_s in self.rows
            ],
            "not_checked": [*not_reached, *skipped],
            "provenance": self.provenance,
        }
        write_json_atomic(self.path, contents)


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """A function that shows which check runs: in place on a terminal, as a line on stderr elsewhere."""
    if console.is_terminal:
        with console.status("") as status:
            yield lambda text: status.update(f"{text} ...")
    else:
        yield lambda text: print(f"{text} ...", file=sys.stderr, flush=True)
