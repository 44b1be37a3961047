"""Runs other processes within a time limit and keeps what they print.

None outlives the verifier, however that ends: a process that was left would hold the GPU and slow the next run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.packages import REPOSITORY

TAIL_LINES = 12
KILL_S = 30.0
"""For the kernel to end a killed process; one that hangs in the driver may never end."""
OUTPUT_CHARACTERS = 20_000
"""The JSON file keeps the end of a process's output."""
STACK_FRAMES = 6
"""Shown of each process, the innermost."""
DUMP_S = 5.0
"""For all processes that reached the time limit together to print their stacks."""

_END_WITH_PARENT = (
    "import ctypes, os, resource, signal, sys; "
    # PR_SET_PDEATHSIG: SIGTERM when the verifier is gone, even if it was killed
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); "  # the SIGABRT that prints the stacks must not dump core
    "os.execv(sys.argv[1], sys.argv[1:])"
)
_STACK = re.compile(r"^(?:Current thread|Thread) .*most recent call first\):\n((?:  .*\n?)+)", re.MULTILINE)
_LAUNCHERS_LINES = re.compile(r"^Fatal Python error: |^[EW]\d{4} .*(?:failed \(exitcode|Sending process)", re.MULTILINE)
"""What faulthandler or torchrun prints of a process's end; the process's own lines stand before."""
_ERROR = re.compile(r"^(?:\[\w+\]:\s*)?([\w.]*(?:Error|Exception|Architecture)\b.*)$", re.MULTILINE)
_LAUNCHERS_ERROR = re.compile(r"ChildFailedError|CalledProcessError")
"""torchrun's and accelerate launch's own error for a script that failed."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int | None
    """None: the time limit was reached and the process was killed."""
    output: str
    """stdout and stderr together."""
    wall_s: float

    def how(self) -> str:
        """In words, for a message."""
        return f"did not end within {self.wall_s:.0f} s" if self.code is None else f"ended with exit code {self.code}"

    def why(self) -> str:
        """The line that names the failure: the script's `error: ...`, else the last Python error that is not its
        launcher's.
        """
        if self.code is None:
            return self.how()
        sentences = [line for line in self.output.splitlines() if line.startswith("error: ")]
        errors = [match[1] for match in _ERROR.finditer(self.output) if not _LAUNCHERS_ERROR.search(match[1])]
        return [self.how(), *errors, *sentences][-1]

    @property
    def stacks(self) -> list[str]:
        """The stacks of the main threads of processes that crashed or reached the time limit, innermost frame first."""
        dumps = re.split(r"^Fatal Python error: ", self.output, flags=re.MULTILINE)[1:]
        # faulthandler names the main thread last.
        main_threads = dict.fromkeys(found[-1] for dump in dumps if (found := _STACK.findall(dump)))
        return [line.strip() for stack in main_threads for line in stack.splitlines()[:STACK_FRAMES]]

    @property
    def evidence(self) -> tuple[str, ...]:
        """The last lines that the process itself printed, and its stacks."""
        own = _LAUNCHERS_LINES.split(self.output, maxsplit=1)[0]
        lines = [line for line in own.splitlines() if line.strip()][-TAIL_LINES:]
        return (*lines, *(f"it was in: {line}" for line in self.stacks))

    @property
    def facts(self) -> dict[str, Any]:
        """For the JSON file."""
        return {"exit_code": self.code, "wall_s": self.wall_s, "output": self.output[-OUTPUT_CHARACTERS:]}


class Started:
    """A running process, which ends with this one. Its output, and that of processes it starts, goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None) -> None:
        self.command, self._log, self._began = list(command), log, time.monotonic()
        self._wall_s = 0.0
        self._ended: Ended | None = None
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-ISc", _END_WITH_PARENT, *command],
                cwd=REPOSITORY,
                env={"PYTHONFAULTHANDLER": "1", **os.environ, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # A check may wait long after the end: only a thread that waits from the start sees how long it took.
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        self._process.wait()
        self._wall_s = time.monotonic() - self._began

    def wait(self, timeout_s: float) -> Ended:
        """Wait for the end. `timeout_s` after its start the process is killed with all that it started, and each
        prints its stack. The answer is kept: several checks may ask.
        """
        if self._ended is None:
            self._watcher.join(max(0.0, self._began + timeout_s - time.monotonic()))
            if self._watcher.is_alive():
                code, wall_s = None, time.monotonic() - self._began
                self.kill(dump=True)
            else:
                code, wall_s = self._process.returncode, self._wall_s
            self._ended = Ended(code, self._log.read_text(errors="replace"), wall_s)
        return self._ended

    def findings(self, timeout_s: float) -> tuple[Ended, dict[str, Any] | None]:
        """As `wait`, with what the process had written by its end to the JSON file beside its log (None: nothing)."""
        ended, file = self.wait(timeout_s), self._log.with_suffix(".json")
        return ended, read_json(file) if file.exists() else None

    def kill(self, dump: bool = False) -> None:
        """End it and what it started, if it still runs. With `dump`, its children (or it, without any) first print
        their stacks.
        """
        if self._process.poll() is not None:
            return
        import psutil

        try:  # By descent, not by process group: torchrun gives each worker a session of its own.
            parent = psutil.Process(self._process.pid)
            children = parent.children(recursive=True)
        except psutil.NoSuchProcess:
            return
        if dump:
            if children:  # torchrun would end the other workers when the first one has
                parent.suspend()
            asked = children or [parent]
            for process in reversed(asked):  # one after another, because all print to one file
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGABRT)
                    time.sleep(min(0.3, DUMP_S / len(asked)))
        for process in (parent, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)


def start_probe(name: str, scratch: Path, program: Sequence[str], *words: str, **environ: str) -> Started:
    """Start Python on `program`, whose first argument is the JSON file that `Started.findings` reads.

    A crash in native code ends this process and not the verifier, and it starts as a run starts.
    """
    command = [sys.executable, *program, str(scratch / f"{name}.json"), *words]
    return Started(command, scratch / f"{name}.log", environ)


def shown(command: list[str]) -> str:
    """A command as a user would type it."""
    words = ["torchrun", *command[3:]] if command[1:3] == ["-m", "torch.distributed.run"] else command
    return shlex.join(["python" if word == sys.executable else word for word in words])
