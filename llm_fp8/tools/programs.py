"""Shared parts of the programs around a run: the console, starting other programs, and reading their failures."""

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
    # datasets gives os.environ another object, which rich has not seen.
    return Console(width=wide, highlight=False, _environ=os.environ, **options)


# A program's `error: ...`, or the last line of a Python traceback that is not a launcher's own.
_TELLS_WHY = re.compile(r"(\[\w+\]:\s*)?(error: |(?!.*(ChildFailed|CalledProcess)Error)[\w.]*(Error|Exception)\b)")


@dataclass(frozen=True)
class Ended:
    """The end of a program."""

    exit_code: int | None  # None after a kill at the time limit
    output: str
    wall_s: float

    @property
    def failure(self) -> str | None:
        """Reason of the failure, in one line that ends with the program's words; None if it succeeded."""
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
    After `timeout_s`, or an exception here, it gets SIGTERM, and after 30 s SIGKILL, with all that it started.
    """
    with log.open("ab") as file:
        begin, began = file.tell(), time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=None if environ is None else dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that os.killpg reaches what it starts
        )
        try:
            exit_code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun passes it on to its ranks, which are in sessions of their own
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    output = log.read_bytes()[begin:].decode(errors="replace")
    return Ended(exit_code, output, time.monotonic() - began)


def torchrun(num_processes: int, *words: str) -> list[str]:
    """Return the command that starts `num_processes` on this host; --standalone binds a free port."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}", *words]


def training_command(num_gpus: int, *words: str) -> list[str]:
    """Return the command that trains with the options `words` on GPUs of this host."""
    if num_gpus == 1:
        return [sys.executable, str(REPOSITORY / "train_fp8.py"), *words]
    return torchrun(num_gpus, str(REPOSITORY / "train_multi_gpu.py"), *words)
