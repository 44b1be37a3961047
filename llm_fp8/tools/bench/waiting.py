"""Programs for measurements that have their imports and wait for a script to run, in one process or in all those of a
launch.

    program = take_program(environment, num_processes=4, next_environment=environment)
    with program.folder as folder:                               # for what the script leaves
        program.begin(["scripts/benchmark_multi_gpu.py", "--output", f"{folder}/result.json"])
        program.process.wait()

Importing takes seconds, and a launcher some more. With `next_environment` another program does that meanwhile, and the
next who asks for as many processes in that environment has it; it touches no GPU before it has a script.

The standard input of a program is a pipe whose other end this process alone holds, and which torchrun leaves to all
that it starts. Nothing is written to it: its end says that the script is named in the program's folder, or, where none
is, that no more will come. So what waits ends when this process does, even if that is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.packages import REPOSITORY
from llm_fp8.utils.subprocesses import torchrun

_JOB = "job.json"
"""In a program's folder: the script and its words."""


# --- who asks for a program
# -------------------------------------------------------------------------------------------------


class WaitingProgram:
    """A program that imports, and then waits; of `num_processes` under torchrun, or without a launcher where that is
    None.

    Attributes:
        process: torchrun's, or the program's own. What it prints goes to this one's standard error; `os.killpg` reaches
            what it starts.
        folder: the program's own, until the context of it is left.
    """

    def __init__(self, environment: Mapping[str, str], num_processes: int | None) -> None:
        self.folder = tempfile.TemporaryDirectory()
        words = ["-m", __name__, self.folder.name]
        self.process = subprocess.Popen(
            [sys.executable, *words] if num_processes is None else torchrun(num_processes, *words),
            env={
                **environment,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")])),
            },
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            start_new_session=True,
        )

    def begin(self, words: Sequence[str]) -> None:
        """Have it run a script, the first of `words`, with the others as its command line. Raises nothing where it
        has ended.
        """
        write_json_atomic(Path(self.folder.name) / _JOB, words)
        self._end_input()

    def dismiss(self) -> None:
        """End it without a script, at once; processes of a launch that are still importing end when they have done
        that.
        """
        self.process.kill()
        self._end_input()
        self.process.wait()
        self.folder.cleanup()

    def _end_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


_prepared: dict[str, WaitingProgram] = {}
"""Programs that nobody has taken yet, by what they can be taken for."""
_lock = threading.Lock()


def take_program(
    environment: Mapping[str, str], num_processes: int | None = None, next_environment: Mapping[str, str] | None = None
) -> WaitingProgram:
    """A program in this environment, prepared or new; the one after it is started in `next_environment`, unless that
    is None.
    """
    with _lock:
        program = _prepared.pop(_key(environment, num_processes), None)
        if program is not None and program.process.poll() is not None:
            program.dismiss()  # of a launch whose launcher has died some processes may be left
            program = None
        program = program or WaitingProgram(environment, num_processes)
        if next_environment is not None and (key := _key(next_environment, num_processes)) not in _prepared:
            _prepared[key] = WaitingProgram(next_environment, num_processes)
    return program


def _key(environment: Mapping[str, str], num_processes: int | None) -> str:
    return json.dumps([num_processes, dict(environment)], sort_keys=True)


@atexit.register
def dismiss_prepared() -> None:
    """End all programs that nobody has taken."""
    with _lock:
        while _prepared:
            _prepared.popitem()[1].dismiss()


# --- the program
# ------------------------------------------------------------------------------------------------------------


def _import_what_measures() -> None:
    """Import what a measurement imports in any case, and Transformer Engine where there is one.

    None of it makes a context on a GPU. What few arms need and what looks at GPUs when it is imported (DeepSpeed,
    torchao) they import themselves.
    """
    from llm_fp8.utils.errors import UserError
    from llm_fp8.utils.te_import import require_te

    with contextlib.suppress(UserError):  # which an arm that needs it raises
        require_te("fp8")


def _main() -> None:
    folder = Path(sys.argv[1])
    _import_what_measures()
    sys.stdin.read()  # to its end
    try:
        sys.argv = json.loads((folder / _JOB).read_text())
    except FileNotFoundError:
        with contextlib.suppress(
            OSError
        ):  # one of the processes removes what is left where the one that asked was killed
            folder.rmdir()
    else:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Python takes a second to take down what was imported


if __name__ == "__main__":
    _main()
