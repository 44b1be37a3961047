"""Start trainings in separate processes that tests can signal and kill.

They run the code of train_fp8.py and exit with its codes. Without a GPU they are forked from multiprocessing's server,
which has imported the packages once. With a GPU they are spawned: the imports initialise CUDA, which does not survive a
fork.
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
    """Fork multiprocessing's fork server from this process, which has not trained yet and has imported most packages.

    multiprocessing itself would start a server that imports all packages again, in each of xdist's workers. It does so
    if torch uses several threads, because OpenMP would wait for threads that do not exist in a fork. The code replaces
    internals of multiprocessing and was written for CPython 3.10 to 3.13.
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
            except SystemExit:  # the server's normal end
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                util._exit_function()  # frees the semaphores that its imports created
                os._exit(code)
        return pid

    with mock.patch.dict(os.environ, PYTHONWARNINGS="ignore"):  # it warns when it frees killed processes' semaphores
        resource_tracker.ensure_running()
    with mock.patch.object(util, "spawnv_passfds", fork):
        forkserver.ensure_running()


def _serve(listener: int, alive: int) -> None:
    """Close inherited pipes, since open copies would hide that the parent ended, and run the fork server's loop. The
    arguments are file descriptors that multiprocessing passes to the server.
    """
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            kind = os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]
            if kind in ("pipe", "socket") and fd not in (0, 1, 2, listener, alive):
                os.close(fd)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not pytest's files
    with importing():
        for name in PRELOADED:
            with contextlib.suppress(ImportError):  # optional packages
                importlib.import_module(name)
    forkserver.main(listener, alive, preload=[])


def begin_process(log: str, environment: dict[str, str], first: Callable[[], None] | None = None) -> None:
    """Set up this forked process: set its environment, call `first`, and append later output to the file `log`."""
    os.environ.clear()  # inherited from the server, which may have started before the test changed a variable
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
    begin_process(log, inherited | launch, first)
    run_script(lambda: _run(options, parallel=bool(launch)) if program is None else program(options))


def _run_file(arguments: list[str], log: str, environment: dict[str, str]) -> None:
    begin_process(log, environment)
    sys.argv = arguments
    # A user's interpreter has the file's folder on its path, and not the repository.
    folder = str(Path(arguments[0]).resolve().parent)
    sys.path[:] = [folder, *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("llm_fp8", "te_llama", "benchmarks")]:
        del sys.modules[name]
    runpy.run_path(arguments[0], run_name="__main__")


def run_program(
    command: Sequence[str], *, log: Path, environ: Mapping[str, str] | None = None, timeout_s: float = 4 * DEADLINE_S
) -> Outcome:
    """Run `python FILE ...` as `llm_fp8.tools.programs.run_program` does, but in a fork with `PRELOADED` imported."""
    environment = dict(os.environ if environ is None else environ)
    process = CONTEXT.Process(target=_run_file, args=(list(command[1:]), str(log), environment), daemon=True)
    process.start()
    code = exit_code(process, timeout_s)
    process.kill()  # if it has not ended
    return Outcome(code, log.read_text(), 0.0)


def _run(options: list[str], parallel: bool) -> int:
    from tests.support.small import train

    return train(*options, parallel=parallel)


def train_as_a_rank(options: list[str]) -> None:
    """Train as the rank that the environment variables describe. Exit with train_multi_gpu.py's code if it fails."""
    try:
        run_script(lambda: _run(options, parallel=True))
    except SystemExit as ended:
        if ended.code:
            raise


def _start(log: Path, options: Sequence[object], launch: dict[str, str], *hooks: Callable[..., Any] | None) -> Any:
    log.touch()
    arguments = [str(option) for option in options]
    process = CONTEXT.Process(target=_train, args=(arguments, str(log), dict(os.environ), launch, *hooks), daemon=True)
    process.start()
    return process


def start_training(log: Path, *options: object, first: Callable[[], None] | None = None) -> BaseProcess:
    """Start and return a process that calls `first`, trains with `options` and appends its output to `log`. A SIGINT
    that arrives before the call of `first` ends the process with code 1 and without a message.
    """
    return _start(log, options, {}, first)


def free_port() -> int:
    """Return a free TCP port. It is not one of Linux's ephemeral ports, which other connections take at any time."""
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
    """Start and return the `num_ranks` processes of one run, as a launcher on `hosts` machines would. Each process
    calls `first`, and then trains with `options` or, if `program` is set, runs `program(options)`. They share `log`.
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
    """Call `start_ranks`, check that all ranks succeed, and return the output. The log lies beside `folder`."""
    log = folder.with_name(f"{folder.name}.log")
    ranks = start_ranks(num_ranks, log, *options, first=first, hosts=hosts)
    codes = [exit_code(process, 4 * DEADLINE_S) for process in ranks]
    assert codes == [0] * num_ranks, log.read_text()
    return log.read_text()


def wait_until(
    condition: Callable[[], bool], process: Any, poll_s: float = 0.001, deadline_s: float = DEADLINE_S
) -> bool:
    """Wait until `condition()` is true. Return False if `process`, a process or a `Launch`, ends before that. Raise
    `TimeoutError` after `deadline_s`.
    """
    deadline = time.monotonic() + deadline_s
    while not condition():
        if not process.is_alive():
            return condition()
        if time.monotonic() > deadline:
            raise TimeoutError("the training process did not reach the condition")
        time.sleep(poll_s)
    return True


def exit_code(process: BaseProcess, deadline_s: float = DEADLINE_S) -> int | None:
    """Wait until a process ends. Return its exit code, the negative number of the signal that killed it, or None if it
    still runs after `deadline_s`.
    """
    process.join(deadline_s)
    return process.exitcode


def wait_until_processes_end(name: str, value: str) -> None:
    """Wait until no process of this machine has `value` in the environment variable `name`, which children inherit."""
    deadline = time.monotonic() + DEADLINE_S
    while remaining := [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get(name) == value]:
        assert time.monotonic() < deadline, remaining
        time.sleep(0.1)
