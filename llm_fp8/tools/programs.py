"""Shared parts of the programs around a run: the console, and functions that start programs and read their failures."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from llm_fp8.utils.packages import REPOSITORY


def wide_console(**options: Any) -> Console:
    """Return rich's console, as wide as COLUMNS or the terminal, else 160 characters."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    # The datasets library replaces os.environ, and rich would read the old object.
    return Console(width=wide, highlight=False, _environ=os.environ, **options)


# A program's `error: ...`, or the last line of a Python traceback that is not a launcher's own.
_TELLS_WHY = re.compile(r"(\[\w+\]:\s*)?(error: |(?!.*(ChildFailed|CalledProcess)Error)[\w.]*(Error|Exception)\b)")


@dataclass(frozen=True)
class Ended:
    """The outcome of a program that ended."""

    exit_code: int | None  # None after a kill at the time limit
    output: str
    wall_s: float

    @property
    def failure(self) -> str | None:
        """Reason of the failure in one line, which ends with the program's words; None if the program succeeded."""
        if self.exit_code == 0:
            return None
        if self.exit_code is None:
            return f"it was killed after {self.wall_s:.0f} s"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        reason = ([line for line in lines if _TELLS_WHY.match(line)] or lines or ["it printed nothing"])[-1]
        return f"exit code {self.exit_code}: {reason[:300]}"


def run_program(
    command: Sequence[str],
    *,
    log: Path,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float | None = None,
) -> Ended:
    """Run a program to its end, with `environ` and in `cwd` (defaults: this process's); append its output to `log`.
    After `timeout_s`, or after an exception here, the program gets SIGTERM; 30 s later its whole group gets SIGKILL.
    """
    with log.open("ab") as file:
        start_byte, started_s = file.tell(), time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that os.killpg reaches its children
        )
        try:
            exit_code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun passes SIGTERM on to its ranks, which have their own sessions
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    output = log.read_bytes()[start_byte:].decode(errors="replace")
    return Ended(exit_code, output, time.monotonic() - started_s)


def torchrun(num_processes: int, *words: str) -> list[str]:
    """Return the command that starts `num_processes` on this host; --standalone binds a free port."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}", *words]


def training_command(num_gpus: int, *words: str) -> list[str]:
    """Return the command that trains with the options `words` on `num_gpus` GPUs of this host."""
    if num_gpus == 1:
        return [sys.executable, str(REPOSITORY / "train_fp8.py"), *words]
    return torchrun(num_gpus, str(REPOSITORY / "train_multi_gpu.py"), *words)
