"""Other processes: started, waited for, their last words kept.

None outlives the verifier, however that ends: one that was left would hold the GPU and slow the next run of it.
"""

from __future__ import annotations

import contextlib
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

from llm_fp8.utils.packages import REPOSITORY

TAIL_LINES = 12
KILL_S = 30.0
"""For the kernel to end a killed process; one that hangs inside the driver may never end."""
OUTPUT_CHARACTERS = 20_000
"""Of a process's output that the JSON file keeps, its end."""
STACK_FRAMES = 6
"""Shown of each process, the innermost."""
DUMP_S = 5.0
"""Left to processes that did not end in time to say where they are."""

_TETHER = (
    "import ctypes, os, resource, signal, sys; "
    # PR_SET_PDEATHSIG: SIGTERM when the verifier is gone, even if it was killed
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "  # the SIGABRT of `Started.wait` must not fill the disk
    "os.execv(sys.argv[1], sys.argv[1:])"
)
_STACK = re.compile(r"^(?:Current thread|Thread) .*most recent call first\):\n((?:  .*\n?)+)", re.MULTILINE)
_OBITUARY = re.compile(r"^Fatal Python error: |^[EW]\d{4} .*(?:failed \(exitcode|Sending process)", re.MULTILINE)
"""What is printed of a process's end by Python's handler or torchrun; what it said itself stands before."""
_ERROR = re.compile(r"^(?:\[\w+\]:\s*)?([\w.]*(?:Error|Exception|Architecture)\b.*)$", re.MULTILINE)
_OF_LAUNCHER = re.compile(r"ChildFailedError|CalledProcessError")
"""What torchrun and accelerate launch say of a script that failed."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int | None
    """None where it did not end in time and was killed."""
    output: str
    """stdout and stderr together."""
    wall_s: float

    def why(self) -> str:
        """The line that names its failure: the script's own sentence, else the last error of Python that is not its
        launcher's.
        """
        if self.code is None:
            return self.how()
        sentences = [line for line in self.output.splitlines() if line.startswith("error: ")]
        errors = [match[1] for match in _ERROR.finditer(self.output) if not _OF_LAUNCHER.search(match[1])]
        return next(reversed([*errors, *sentences]), self.how())

    @property
    def stacks(self) -> tuple[str, ...]:
        """Where the main threads of the processes that were stopped or crashed were, the innermost frame first."""
        # faulthandler names the main thread last.
        dumps = re.split(r"^Fatal Python error: ", self.output, flags=re.MULTILINE)[1:]
        last = [found[-1] for dump in dumps if (found := _STACK.findall(dump))]
        return tuple(line.strip() for stack in dict.fromkeys(last) for line in stack.splitlines()[:STACK_FRAMES])

    @property
    def evidence(self) -> tuple[str, ...]:
        """For the details of a failure: where it was, and the last lines it printed before."""
        before = _OBITUARY.split(self.output, maxsplit=1)[0]
        lines = tuple(line for line in before.splitlines() if line.strip())[-TAIL_LINES:]
        return (*lines, *(f"it was in: {line}" for line in self.stacks))

    @property
    def facts(self) -> dict[str, Any]:
        """For the JSON file."""
        return {"exit_code": self.code, "wall_s": self.wall_s, "output": self.output[-OUTPUT_CHARACTERS:]}

    def how(self) -> str:
        """In words, for a message."""
        return f"did not end within {self.wall_s:.0f} s" if self.code is None else f"ended with exit code {self.code}"


@dataclass
class Started:
    """A process under way, which ends with this one. What it and those it starts print goes to `log`."""

    command: list[str]
    log: Path
    extra_environ: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        with open(self.log, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-ISc", _TETHER, *self.command],
                cwd=REPOSITORY,
                env={"PYTHONFAULTHANDLER": "1", **os.environ, **self.extra_environ},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, timeout_s: float) -> Ended:
        """Its end. `timeout_s` after its start it is stopped with all that it started, and each process says where
        it was.
        """
        code: int | None
        try:
            code = self._process.wait(max(0.0, self._began + timeout_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
        wall_s = time.monotonic() - self._began
        self.kill(dump_s=DUMP_S if code is None else 0.0)
        return Ended(code, self.log.read_text(errors="replace"), wall_s)

    def kill(self, dump_s: float = 0.0) -> None:
        """End it and what it started; nothing where it has ended. With `dump_s` its workers, or it without any,
        first print where they are.
        """
        if self._process.poll() is not None:
            return
        import psutil

        # By descent, not by process group: torchrun gives each worker a session of its own.
        try:
            family = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        if dump_s:
            asked = family[1:] or family
            if family[1:]:  # torchrun would end the other workers when the first one has
                self._process.send_signal(signal.SIGSTOP)
            until = time.monotonic() + dump_s
            for process in reversed(asked):  # one after another, for all print to the same file
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGABRT)
                    while time.monotonic() < until and process.status() != psutil.STATUS_ZOMBIE:
                        time.sleep(0.02)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)


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
        """As `Started.wait`, with what it had written by then; None where that is nothing."""
        if self._ended is None:
            self._ended = self._process.wait(timeout_s)
        return self._ended, json.loads(self._result.read_text()) if self._result.exists() else None

    def kill(self) -> None:
        """End it."""
        self._process.kill()


def shown(command: list[str]) -> str:
    """A command as a user would type it."""
    words = ["torchrun", *command[3:]] if command[1:3] == ["-m", "torch.distributed.run"] else command
    return shlex.join(["python" if word == sys.executable else word for word in words])
