"""Training in processes of their own, which can be signalled and killed.

Where there is no GPU they are forked from multiprocessing's server, which has imported the packages once. (Importing
them initialises CUDA, which a forked process cannot use.) What runs in them is what train_fp8.py runs, down to the exit
code.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import random
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from llm_fp8.tools.programs import Outcome
from llm_fp8.tools.script import importing, run_script

CONTEXT: Any = multiprocessing.get_context("spawn" if Path("/dev/nvidia0").exists() else "forkserver")
PRELOADED = [
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "peft",
    "torch.distributed.run",
    "transformers.models.llama.modeling_llama",
]

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


def fork_server() -> None:
    """Let multiprocessing's server be a fork of this process, which has imported most and has not trained yet: one that
    starts anew imports all again, in each of xdist's workers. Read in CPython 3.10 to 3.13.

    With several threads it does start anew: after a fork, OpenMP would wait for those that this process had.
    """
    if CONTEXT.get_start_method() != "forkserver":
        return
    if torch.get_num_threads() > 1:
        CONTEXT.set_forkserver_preload([__name__, *PRELOADED])
        return

    def fork(path: bytes, args: list[str], fds: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _serve(*fds)
            except SystemExit:  # as the server ends
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                util._exit_function()  # semaphores of what it imported
                os._exit(code)
        return pid

    with mock.patch.dict(os.environ, PYTHONWARNINGS="ignore"):  # semaphores of killed processes, which it removes
        resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", fork):
        forkserver.ensure_running()


def _serve(listener: int, alive: int) -> None:
    """Fork processes. Pipes of others are closed, so that they see this process's parent end."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own
            kind = os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]
            if kind in ("pipe", "socket") and fd not in (0, 1, 2, listener, alive):
                os.close(fd)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not pytest's files
    with importing():
        for name in PRELOADED:
            with contextlib.suppress(ImportError):  # of a package that not everybody has
                importlib.import_module(name)
    forkserver.main(listener, alive, preload=[])


def begin(log: str, environment: dict[str, str], first: Callable[[], None] | None = None) -> None:
    """Begin a program in a process of the server: in this environment, its output appended to `log`."""
    os.environ.clear()  # of the server, which may be older than what the test changed
    os.environ.update(environment)
    gc.freeze()
    if first is not None:
        first()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def _train(
    options: list[str],
    log: str,
    inherited: dict[str, str],
    launch: dict[str, str],
    first: Callable[[], None] | None,
    program: Callable[[list[str]], int] | None = None,
) -> None:
    begin(log, inherited | launch, first)
    run_script(lambda: _run(options, parallel=bool(launch)) if program is None else program(options))


def _run_file(words: list[str], log: str, environment: dict[str, str]) -> None:
    begin(log, environment)
    sys.argv = words
    # A user's interpreter has the file's folder there, and not the repository.
    sys.path[:] = [str(Path(words[0]).resolve().parent), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("llm_fp8", "te_llama", "benchmarks")]:
        del sys.modules[name]
    runpy.run_path(words[0], run_name="__main__")


def run_program(
    command: Sequence[str], *, log: Path, environ: Mapping[str, str] | None = None, timeout_s: float = 4 * DEADLINE_S
) -> Outcome:
    """`llm_fp8.tools.programs.run_program` for Python and a file, in a process that need not import all anew."""
    environment = dict(os.environ if environ is None else environ)
    process = CONTEXT.Process(target=_run_file, args=(list(command[1:]), str(log), environment), daemon=True)
    process.start()
    code = exit_code(process, timeout_s)
    process.kill()  # where it has not ended
    return Outcome(code, log.read_text(), 0.0)


def _run(options: list[str], parallel: bool) -> int:
    from tests.support.small import train

    return train(*options, parallel=parallel)


def train_as_a_rank(options: list[str]) -> None:
    """Train as one of several processes, whose place a launcher has put into the environment; exits where it fails."""
    try:
        run_script(lambda: _run(options, parallel=True))
    except SystemExit as ended:
        if ended.code:
            raise


def _start(log: Path, options: Sequence[object], launch: dict[str, str], *how: Callable[..., Any] | None) -> Any:
    log.touch()
    words = [str(option) for option in options]
    process = CONTEXT.Process(target=_train, args=(words, str(log), dict(os.environ), launch, *how), daemon=True)
    process.start()
    return process


def start_training(log: Path, *options: object, first: Callable[[], None] | None = None) -> BaseProcess:
    """Start a process that trains with these options and appends what it prints to `log`. It calls `first` before:
    until then a SIGINT ends it with code 1 and without a word, in multiprocessing's own start.
    """
    return _start(log, options, {}, first)


def free_port() -> int:
    """A TCP port that nothing listens on, below those that Linux gives to connections, of which one may come before
    the listener does.
    """
    while True:
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 32_768)))
            return listener.getsockname()[1]


def start_ranks(
    num_ranks: int,
    log: Path,
    *options: object,
    first: Callable[[], None] | None = None,
    hosts: int = 1,
    program: Callable[[list[str]], int] | None = None,
) -> list[BaseProcess]:
    """Start the processes of one run as a launcher does; what they print goes to `log`, in any order. Each calls
    `first` before it trains. `hosts`: how many they seem to be spread over. `program`: what they do instead.
    """
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    launch |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks // hosts)}
    return [
        _start(log, options, {**launch, "RANK": str(rank), "LOCAL_RANK": str(rank)}, first, program)
        for rank in range(num_ranks)
    ]


def run_ranks(
    num_ranks: int, folder: Path, *options: object, first: Callable[[], None] | None = None, hosts: int = 1
) -> str:
    """As `start_ranks`, beside `folder`, to the end, which has to be a good one; returns what they printed."""
    log = folder.with_name(f"{folder.name}.log")
    ranks = start_ranks(num_ranks, log, *options, first=first, hosts=hosts)
    codes = [exit_code(process, 4 * DEADLINE_S) for process in ranks]
    assert codes == [0] * num_ranks, log.read_text()
    return log.read_text()


def wait_until(
    condition: Callable[[], bool], process: Any, poll_s: float = 0.001, deadline_s: float = DEADLINE_S
) -> bool:
    """Wait for `condition`; False where the process, or all of a run, ended before it came true."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if not process.is_alive():
            return condition()
        if time.monotonic() > deadline:
            raise TimeoutError("the training process did not get there")
        time.sleep(poll_s)
    return True


def exit_code(process: BaseProcess, deadline_s: float = DEADLINE_S) -> int | None:
    """Wait for the end; the exit code, negative for a signal that ended it, None where it did not end in time."""
    process.join(deadline_s)
    return process.exitcode


def wait_for_the_end_of_processes_with(name: str, value: str) -> None:
    """Wait until none is left that was started with this environment variable, or by one that was."""
    deadline = time.monotonic() + DEADLINE_S
    while left := [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get(name) == value]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
