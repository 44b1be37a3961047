"""Signals, time-based checkpoints, and failures of terminal, pipe or disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from llm_fp8.run import timeline as timeline_module
from llm_fp8.run.graceful_stop import SIGNALS, GracefulStop
from llm_fp8.run.run_dir import explained_failures
from llm_fp8.utils.errors import UserError, reading
from tests.support.processes import ROOT, exit_code, run_ranks, start_training, wait_until
from tests.support.small import assert_same_bits, final_weights, steps, summary_json, train


@pytest.fixture(scope="module")
def options(small_run) -> list[str]:
    return [*small_run, "--max_steps=6", "--log_every=2"]


@pytest.fixture(scope="module")
def uninterrupted(options, tmp_path_factory) -> Path:
    """Return the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(*options, f"--output_dir={folder}")
    return folder


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_first_signal_sets_flag_and_handlers_are_restored(number, code):
    before = [signal.getsignal(number) for number in SIGNALS]
    with GracefulStop() as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), number)
        assert stop.agreed() and stop.requested == number.name and stop.exit_code == code
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == number.name, "a second SIGTERM changes nothing"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_ignored_sighup_does_not_stop_the_run():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with GracefulStop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.agreed()
    finally:
        signal.signal(signal.SIGHUP, before)


def _redirect_output(place: str) -> None:
    """Make this process the leader of a new session, and redirect its output to the pipe or terminal at the path
    `place`. A terminal becomes the controlling terminal of the session.
    """
    os.setsid()
    descriptor = os.open(place, os.O_RDWR if place.startswith("/dev/pts/") else os.O_WRONLY)
    for number in (1, 2):
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "name"),
    [("terminal", "SIGHUP"), *(("pipe", name) for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGPIPE"))],
)  # with `| tee`, a closed ssh or Ctrl-C ends the pipe's reader too; with `| head`, only the reader ends (SIGPIPE)
def test_run_saves_after_terminal_or_pipe_reader_is_gone(tmp_path, options, output, name):
    if output == "terminal":
        ours, theirs = pty.openpty()
        place = Path(os.ttyname(theirs))
    else:
        place, theirs = tmp_path / "pipe", -1
        os.mkfifo(place)
        ours = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    more = ["--max_steps=4000", "--log_every=1", f"--output_dir={tmp_path / 'run'}"]
    process = start_training(place, *options, *more, first=functools.partial(_redirect_output, str(place)))
    assert wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and bool(steps(tmp_path / "run")), process)
    if theirs >= 0:
        os.close(theirs)
    os.close(ours)  # the kernel sends SIGHUP to the session of a closed terminal
    if output == "pipe" and name != "SIGPIPE":
        os.kill(process.pid, signal.Signals[name])
    assert exit_code(process) == 128 + signal.Signals[name]
    assert summary_json(tmp_path / "run")["stopped_by"] == name
    assert any((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_stderr_says_how_to_continue_after_the_reader_of_stdout_is_gone(tmp_path, options):
    command = [sys.executable, "train_fp8.py", *options, "--max_steps=4000", "--log_every=1"]
    command.append(f"--output_dir={tmp_path / 'run'}")
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    next(line for line in process.stdout if line.startswith("step"))
    process.stdout.close()
    assert "continue with --resume_from latest" in process.stderr.read() and process.wait(60) == 128 + signal.SIGPIPE


@pytest.mark.slow
def test_terminal_shows_every_line_by_itself(tmp_path, options):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 200, 0, 0))  # rows, columns
    start_training(Path(os.ttyname(theirs)), *options, f"--output_dir={tmp_path / 'run'}")
    output = os.read(ours, 1)  # so the process has opened the terminal
    os.close(theirs)
    with contextlib.suppress(OSError):  # EIO when the process ends
        while True:
            output += os.read(ours, 4096)
    lines = output.decode().replace("\r\n", "\n").split("\n")
    starts = [" ".join(line.split()[:2]) for line in lines]
    expected = ["training 6", *(f"step {step}/6" for step in (1, 2, 4, 6)), "evaluation at", "done: 6"]
    assert starts[starts.index("training 6") :][: len(expected)] == expected and lines[-1] == "", output.decode()


@pytest.mark.slow
@pytest.mark.parametrize("moved_path", ["folder", "metrics.jsonl"])
def test_run_ends_if_its_folder_moves_and_resumes_there(tmp_path, options, uninterrupted, monkeypatch, moved_path):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    take_step = timeline_module.Timeline.take_step

    def take_step_after_move(self, batches, start):
        if self.step == 3 and not moved.exists():
            (folder if moved_path == "folder" else folder / moved_path).rename(moved)
        return take_step(self, batches, start)

    monkeypatch.setattr(timeline_module.Timeline, "take_step", take_step_after_move)
    first, new_folder = (*options, "--save_every=2", f"--output_dir={folder}"), folder
    if moved_path == "folder":
        new_folder = moved
        with pytest.raises(UserError, match=f"--output_dir: {folder / 'metrics.jsonl'}"):
            train(*first)
        assert train(*options, f"--output_dir={moved}", "--resume_from=latest") == 0
    else:
        assert train(*first) == 0
    losses = [step["loss"] for step in steps(new_folder)]
    assert losses == [step["loss"] for step in steps(uninterrupted)][-len(losses) :]
    assert_same_bits(final_weights(new_folder), final_weights(uninterrupted))


# time-based checkpoints


def saved_checkpoints(log: str) -> list[str]:
    return [Path(line.split()[1]).name for line in log.splitlines() if line.startswith("saved ")]


@pytest.mark.slow
def test_time_based_checkpoints_do_not_change_results(tmp_path, options, uninterrupted, capsys, monkeypatch):
    """A checkpoint is always due, but it is saved only at logged steps, here 2 and 4, and after the last step."""
    with_saves, without_saves = tmp_path / "with", tmp_path / "without"
    assert not (uninterrupted / "checkpoints").exists(), "the default interval is half an hour"
    monkeypatch.setattr(timeline_module, "SAVE_AFTER_S", 0.0)
    train(*options, "--save_every=0", f"--output_dir={without_saves}")
    assert not (without_saves / "checkpoints").exists()
    capsys.readouterr()
    train(*options, f"--output_dir={with_saves}")
    assert saved_checkpoints(capsys.readouterr().out) == ["step-00000002", "step-00000004", "step-00000006"]
    assert [step["loss"] for step in steps(with_saves)] == [step["loss"] for step in steps(uninterrupted)]
    assert_same_bits(final_weights(uninterrupted), final_weights(with_saves))


def _stop_clock_of_rank(rank: str) -> None:
    timeline_module.SAVE_AFTER_S = 1e-9
    if os.environ["RANK"] == rank:
        timeline_module.time.monotonic = lambda: 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "num_saves"), [("1", 2), ("0", 0)])
def test_clock_of_main_rank_decides_when_to_save(tmp_path, options, rank, num_saves):
    more = ["--batch_size=4", "--max_steps=3", "--sharding_mode=ddp", f"--output_dir={tmp_path / 'run'}"]
    output = run_ranks(2, tmp_path / "run", *options, *more, first=functools.partial(_stop_clock_of_rank, rank))
    assert len(saved_checkpoints(output)) == num_saves, output


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), Exception("No space left on device (os error 28)")]
    + [OSError("Not enough disk space. Needed: Unknown size")],
)
def test_full_disk_error_does_not_name_an_input(tmp_path, error):
    message = "^(?!.*--model_name).*No space.*Nothing was saved"
    with pytest.raises(UserError, match=message), explained_failures(lambda: tmp_path, bool):
        with reading("--model_name", "a/b"):
            raise error


def test_program_without_execute_permission_is_no_folder_to_correct(tmp_path):
    (tmp_path / "ptxas").touch(mode=0o600)
    with pytest.raises(PermissionError), explained_failures(lambda: tmp_path, bool):
        subprocess.run([tmp_path / "ptxas"])
