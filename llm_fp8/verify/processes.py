"""Other processes: started, waited for, their last words kept."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_fp8.verify.setup import REPOSITORY

TAIL_LINES = 12
_ERROR = re.compile(r"^(?:\[\w+\]:\s*)?([\w.]*(?:Error|Exception|Architecture)\b.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int | None
    """None where it did not end in time and was killed."""
    output: str
    """stdout and stderr together."""
    wall_s: float

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines it printed."""
        return tuple(line for line in self.output.splitlines() if line.strip())[-TAIL_LINES:]

    def why(self) -> str:
        """The line that names its failure: the script's own sentence, else the last error of Python that is not torchrun's."""
        sentences = [line for line in self.output.splitlines() if line.startswith("error: ")]
        errors = [match[1] for match in _ERROR.finditer(self.output) if "ChildFailedError" not in match[1]]
        return next(reversed([*errors, *sentences]), self.how())

    def how(self) -> str:
        """In words, for a message."""
        return f"did not end within {self.wall_s:.0f} s" if self.code is None else f"ended with exit code {self.code}"


@dataclass
class Started:
    """A process of its own session, so that what it started can be ended with it. What it prints goes to `log`."""

    command: list[str]
    log: Path
    extra_environ: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        with open(self.log, "wb") as file:
            self._process = subprocess.Popen(
                self.command,
                cwd=REPOSITORY,
                env={**os.environ, **self.extra_environ},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> Ended:
        """Its end; after `timeout_s` from now it is killed with all that it started."""
        code: int | None
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            self.kill()
        return Ended(code, self.log.read_text(errors="replace"), time.monotonic() - self._began)

    def kill(self) -> None:
        """End it and what it started; nothing where it has ended."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Probe:
    """A module of this package under way in a Python of its own, which writes what it sees to a JSON file.

    So a fault in native code ends the probe and not the verifier, and it starts as a run starts.
    """

    def __init__(self, name: str, scratch: Path, program: Sequence[str], words: Sequence[str], **environ: str) -> None:
        self._result = scratch / f"{name}.json"
        command = [sys.executable, *program, str(self._result), *words]
        self._process = Started(command, scratch / f"{name}.log", environ)
        self._ended: Ended | None = None

    def wait(self, timeout_s: float) -> tuple[Ended, dict[str, Any] | None]:
        """How it ended, and what it had written by then; None where that is nothing."""
        if self._ended is None:
            self._ended = self._process.wait(timeout_s)
        return self._ended, json.loads(self._result.read_text()) if self._result.exists() else None

    def kill(self) -> None:
        """End it."""
        self._process.kill()


def torchrun(num_processes: int, *words: str) -> list[str]:
    """The command that starts so many processes on this host, on a port of their own."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}", *words]


def shown(command: list[str]) -> str:
    """A command as a user would type it."""
    words = ["torchrun", *command[3:]] if command[1:3] == ["-m", "torch.distributed.run"] else command
    return shlex.join(["python" if word == sys.executable else word for word in words])


def output_of(*command: str, timeout_s: float = 20) -> str | None:
    """What a program prints to stdout; None where it does not exist, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, check=True)
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip()
