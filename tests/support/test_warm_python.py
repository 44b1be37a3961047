"""The Python that has its imports ends, is signalled and is killed as the real one."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from tests.support.warm_python import warm_python_in

SAYS = (
    "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['SAID'], sys.stdin.read(), 'torch' in "
    "sys.modules); sys.exit(7)"
)
WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"


def test_words_folder_environment_files_and_exit_code_arrive(warm_python, tmp_path):
    def run(python: str) -> tuple[int, str]:
        given = {"cwd": tmp_path, "env": {**os.environ, "SAID": "x"}, "input": "in"}
        done = subprocess.run([python, "-c", SAYS, "a b"], capture_output=True, text=True, **given)
        return done.returncode, done.stdout

    assert run(warm_python) == (7, f"['a b'] {tmp_path} x in True\n")
    assert run(sys.executable) == (7, f"['a b'] {tmp_path} x in False\n")


@pytest.mark.parametrize("ending", ["", "sys.exit()", "sys.exit(3)", "sys.exit(-1)", "sys.exit('said')", "1 / 0"])
def test_it_ends_as_the_real_one(warm_python, ending):
    """With its threads, exit handlers and what is left to be written."""
    code = (
        "import atexit, sys, threading, time; atexit.register(print, 'last'); print('first', end=' ')\n"
        f"threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()\n{ending}"
    )
    warm, real = (
        subprocess.run([python, "-c", code], capture_output=True, text=True) for python in (warm_python, sys.executable)
    )
    assert real.stdout == "first late\nlast\n"
    assert (warm.returncode, warm.stdout) == (real.returncode, real.stdout)
    assert warm.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_process_too(warm_python, number):
    with subprocess.Popen([warm_python, "-c", WAITS], stdout=subprocess.PIPE, text=True) as program:
        process = os.pidfd_open(int(program.stdout.readline()))
        program.send_signal(number)
        assert program.wait(30) == -number
        assert select.select([process], [], [], 30)[0], "the process still runs"
        os.close(process)


def test_where_processes_cannot_be_forked_it_is_the_real_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.support.warm_python.can_fork", lambda: False)
    with warm_python_in(tmp_path) as python:
        assert python == sys.executable


def test_a_program_that_needs_no_imports_can_go_on_as_another(warm_python):
    """As the processes are started that end with the one that started them."""
    goes_on = "import os, sys; print(sys.argv); sys.stdout.flush(); os.execv(sys.argv[1], sys.argv[1:])"
    command = [warm_python, "-ISc", goes_on, warm_python, "-c", "import sys; print('torch' in sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(["-c", *command[3:]]), "True"], done.stderr
