"""Real signals to real processes."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from llm_fp8.train.graceful_stop import GracefulStop, exit_code

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]

LOOP = """
    import sys, time
    from llm_fp8.train.graceful_stop import GracefulStop

    with GracefulStop() as stop:
        for step in range(2000):
            print("step", step, flush=True)
            for _ in range(20):       # a step in many small pieces: it must be finished
                time.sleep(0.005)
            print("done", step, flush=True)
            if stop.requested and "--ignore" not in sys.argv:
                print("saved after", stop.requested, flush=True)
                sys.exit(stop.exit_code)
"""


@pytest.fixture
def start(warm_python):
    """A function: start the loop with these arguments; its first step has begun."""

    def start_loop(*arguments):
        process = subprocess.Popen(
            [warm_python, "-c", textwrap.dedent(LOOP), *arguments],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "step 0\n"
        return process

    return start_loop


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_first_signal_finishes_the_step_and_saves(start, sent, code):
    process = start()
    process.send_signal(sent)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code == exit_code(sent.name)
    assert out.splitlines() == ["done 0", f"saved after {sent.name}"]
    assert err.startswith(f"{sent.name} received")
    assert ("Ctrl-C again" in err) == (sent == signal.SIGINT)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_second_ctrl_c_stops_at_once(start, first):
    process = start("--ignore")
    process.send_signal(first)
    assert process.stderr.readline().startswith(f"{first.name} received")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode != 0 and "KeyboardInterrupt" in err


def test_second_sigterm_changes_nothing(start):
    process = start()
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("SIGINT received")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out.splitlines()[-1] == "saved after SIGINT"


def test_old_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with GracefulStop() as stop:
        assert signal.getsignal(signal.SIGTERM) == stop._handle
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    with pytest.raises(ValueError, match="from inside"), GracefulStop():
        raise ValueError("from inside")
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert stop.requested is None and stop.exit_code == 0


def test_a_crash_in_a_native_library_says_where_python_was(tmp_path):
    """And ends the process by its signal, which is what a launcher and the other ranks look at."""
    script = """
        import ctypes
        from llm_fp8.utils.errors import run_script

        def reads_the_null_pointer():
            return ctypes.string_at(0)

        run_script(reads_the_null_pointer)
    """
    # In a folder of its own, where the system may leave a core file.
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "in reads_the_null_pointer" in done.stderr


def test_ctrl_c_while_a_library_closes_ends_the_process():
    code = """
import atexit, time
atexit.register(lambda: (print("closing", flush=True), time.sleep(60)))
from llm_fp8.utils.errors import run_script
run_script(lambda: 0)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY) as done:
        assert done.stdout is not None and done.stdout.readline() == "closing\n"
        done.send_signal(signal.SIGINT)
        _, error = done.communicate(timeout=30)
    assert (done.returncode, error) == (130, "")
