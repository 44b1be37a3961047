"""Utilities of the tools: the console, and functions that start a program and report why it failed."""

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

from llm_fp8.config.recipes import RECIPES
from llm_fp8.utils.packages import REPOSITORY


def wide_console(**options: Any) -> Console:
    """Return rich's console. It is as wide as COLUMNS or the terminal, or 160 characters if both are unknown."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    # The datasets library replaces os.environ, and rich would read the old object.
    return Console(width=wide, highlight=False, _environ=os.environ, **options)


# Matches a program's `error: ...` and the last line of a Python traceback, except a launcher's.
_REASON = re.compile(r"(\[\w+\]:\s*)?(error: |(?!.*(ChildFailed|CalledProcess)Error)[\w.]*(Error|Exception)\b)")


@dataclass(frozen=True)
class Outcome:
    """The result of a program that ended or was killed."""

    exit_code: int | None  # None after a kill at the time limit
    output: str
    wall_s: float

    @property
    def failure(self) -> str | None:
        """Why the program failed, in one line that ends with its error message. None if it succeeded."""
        if self.exit_code == 0:
            return None
        if self.exit_code is None:
            return f"it was killed after {self.wall_s:.0f} s"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        reason = ([line for line in lines if _REASON.match(line)] or lines or ["it printed nothing"])[-1]
        return f"exit code {self.exit_code}: {reason[:300]}"


def run_program(
    command: Sequence[str],
    *,
    log: Path,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float | None = None,
) -> Outcome:
    """Run a program until it ends, and append its output to `log`. `environ` and `cwd` default to this process's. After
    `timeout_s`, or on an interrupt of this call, send the program SIGTERM, wait up to 30 s, and kill its process group.
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
    return Outcome(exit_code, log.read_bytes()[start_byte:].decode(errors="replace"), time.monotonic() - started_s)


def torchrun(num_processes: int, *argv: str) -> list[str]:
    """Return the command that starts `num_processes` processes on this host. --standalone picks a free port."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}", *argv]


def recipe_argv(name: str) -> tuple[str, ...]:
    """Return the command-line arguments that select the recipe `name`."""
    return ("--mixed_precision", "fp8", "--fp8_backend", RECIPES[name].backend, "--fp8_scenario", name)


def training_command(num_gpus: int, *argv: str) -> list[str]:
    """Return the command that trains with the options `argv` on `num_gpus` GPUs of this host."""
    if num_gpus == 1 and "--sharding_mode" not in argv:
        return [sys.executable, str(REPOSITORY / "train_fp8.py"), *argv]
    return torchrun(num_gpus, str(REPOSITORY / "train_multi_gpu.py"), *argv)
