"""A Python that has its imports: what is started with it runs in a process of its own, but begins a tenth of a second
later instead of five.

The path that the fixture `warm_python` gives takes the place of `sys.executable`, in a command line and in the process
that runs (torchrun and accelerate launch start their processes with it). Arguments, environment, folder, standard
files, signals and exit code are those of a process that is started anew; only the imports are done already, and at the
end, behind threads and exit handlers, modules are not taken apart, which would copy the memory that it shares with the
others. Each script of a user is also started by the real interpreter in some test.

The program at that path asks a server, which imports everything once, to fork; it passes signals on, and where it
is killed, so is the process. What it stands for is no child of it: a signal to the process group of the program's, or
to its children, does not get there.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.forking import can_fork

ROOT = Path(__file__).resolve().parents[2]
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_NUMBER_BYTES = 4


@contextlib.contextmanager
def warm_python_in(folder: Path) -> Iterator[str]:
    """The path of the program, as long as the block runs; where processes cannot be forked, the real interpreter's."""
    if not can_fork():
        yield sys.executable
        return
    address = f"\0{folder}-{os.getpid()}"  # a socket without a file, whose path could be too long
    program = folder / "python"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        words = [sys.executable, "-m", "tests.support.warm_python", str(listener.fileno())]
        with open(folder / "server.log", "w") as log:  # what its imports say
            given = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "pass_fds": [listener.fileno()]}
            server = subprocess.Popen(words, cwd=ROOT, **given)
    program.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.support.warm_python import _ask\n_ask({address!r})\n"
    )
    program.chmod(0o755)
    try:
        yield str(program)
    finally:
        server.communicate()  # the end of its input ends it


# --- the program ------------------------------------------------------------------------------------------------------


def _ask(address: str) -> None:
    """Have the server run this program's words; ends as what it runs does. What needs no imports (-ISc) runs here."""
    if sys.argv[1] == "-ISc":
        program, sys.argv[:3] = sys.argv[2], ["-c"]
        exec(program, {"__name__": "__main__"})
        return
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        job = json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(server, [len(job).to_bytes(_NUMBER_BYTES, "little")], [0, 1, 2])
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # a signal that comes now is passed on, too
        server.sendall(job)
        for number in _PASSED_ON:
            signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        code = int.from_bytes(server.recv(_NUMBER_BYTES, socket.MSG_WAITALL), "little", signed=True)
        if -code in _PASSED_ON:
            signal.signal(-code, signal.SIG_DFL)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


# --- the server -------------------------------------------------------------------------------------------------------


def _serve(listener: socket.socket) -> list[str]:
    """Fork for each that asks until standard input ends; returns nothing then, and in a forked process its words.

    All forked processes have this one as their parent, as those of one launcher have.
    """
    running: dict[
        int, tuple[int, socket.socket]
    ] = {}  # by the file that says that it ended: a process, and who asked for it
    while True:
        ready = select.select([listener, sys.stdin, *running, *(asker for _, asker in running.values())], [], [])[0]
        if sys.stdin in ready:
            return []
        for ended, (process, asker) in list(running.items()):
            if ended in ready:
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                with contextlib.suppress(BrokenPipeError), asker:  # it may have been killed
                    asker.sendall(code.to_bytes(_NUMBER_BYTES, "little", signed=True))
                os.close(ended)
                del running[ended]
            elif asker in ready:
                order = asker.recv(1)
                os.kill(process, order[0] if order else signal.SIGKILL)
        if listener in ready:
            importlib.import_module("tests.support.preloaded")  # for the first
            asker, _ = listener.accept()
            head, files, *_ = socket.recv_fds(asker, _NUMBER_BYTES, 3)
            job = asker.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
            process = os.fork() if job else None
            if process == 0:
                for file in (listener, asker, *(other for _, other in running.values())):
                    file.close()
                return _become(*json.loads(job), files)
            if process is not None:
                running[os.pidfd_open(process)] = (process, asker)
            for file in files:
                os.close(file)


def _become(words: list[str], folder: str, environment: dict[str, str], files: list[int]) -> list[str]:
    """Take the place of the program that asked; returns its words."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # The server's one knows whether its own output could seek.
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return words


def _run(words: list[str]) -> None:
    """What an interpreter does with these words: a script's, -m and a module's, or -c and a program's, behind -u."""
    sys.executable, *words = words
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        words = words[1:]
    if words[0] == "-m":
        sys.argv, sys.path[0] = words[1:], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[2:]], os.getcwd()
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


_code: int | None = None
"""What the program ends with; None as long as it runs, and where it ends on an exception."""


def _leave() -> None:
    """End the process at once, with what the interpreter would do next and be seen by others."""
    if _code is not None:
        for file in (sys.stdout, sys.stderr):
            if not file.closed:
                file.flush()
        os._exit(_code & 0xFF)


if __name__ == "__main__":
    atexit.register(_leave)  # before all others: it is called last
    if asked := _serve(socket.socket(fileno=int(sys.argv[1]))):
        try:
            _run(asked)
            _code = 0
        except SystemExit as end:
            if end.code is not None and not isinstance(end.code, int):
                raise
            _code = end.code or 0
