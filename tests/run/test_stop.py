"""Signals, checkpoints by the clock, and failures of the machine."""

from __future__ import annotations

import errno
import functools
import os
import pty
import signal
import sys
from pathlib import Path

import pytest

from llm_fp8.run import timeline as timeline_module
from llm_fp8.run.graceful_stop import SIGNALS, GracefulStop
from llm_fp8.run.run_dir import explained_failures
from llm_fp8.settle import plan as plan_module
from llm_fp8.utils.errors import UserError, reading
from tests.support.processes import exit_code, run_ranks, start_training, wait_until
from tests.support.small import assert_same_bits, final_weights, steps, summary_json, train


@pytest.fixture(scope="module")
def options(small_run) -> list[str]:
    return [*small_run, "--max_steps=6", "--log_every=2"]


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(*options, f"--output_dir={folder}")
    return folder


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_the_first_signal_sets_a_flag_and_the_handlers_come_back(sent, code):
    before = [signal.getsignal(number) for number in SIGNALS]
    with GracefulStop() as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), sent)
        assert stop.agreed() and stop.requested == sent.name and stop.exit_code == code
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == sent.name, "a second SIGTERM changes nothing"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_under_nohup_a_closed_terminal_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with GracefulStop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.agreed()
    finally:
        signal.signal(signal.SIGHUP, before)


def _prints_to(place: str) -> None:
    """Lead a session that has this terminal, if it is one, and print to it."""
    os.setsid()
    descriptor = os.open(place, os.O_RDWR if place.startswith("/dev/pts/") else os.O_WRONLY)
    for number in (1, 2):
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "sent"),
    [("terminal", "SIGHUP"), *(("pipe", sent) for sent in ("SIGHUP", "SIGINT", "SIGTERM", "SIGPIPE"))],
)  # a pipe as to `| tee`, which a closed ssh or Ctrl-C ends too; SIGPIPE stands for its end alone, as of `| head`
def test_the_loss_of_the_terminal_or_reader_lets_the_run_save(tmp_path, options, to, sent):
    if to == "terminal":
        ours, theirs = pty.openpty()
        place = Path(os.ttyname(theirs))
    else:
        place, theirs = tmp_path / "pipe", -1
        os.mkfifo(place)
        ours = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    more = ["--max_steps=4000", "--log_every=1", f"--output_dir={tmp_path / 'run'}"]
    process = start_training(place, *options, *more, first=functools.partial(_prints_to, str(place)))
    assert wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and bool(steps(tmp_path / "run")), process)
    if theirs >= 0:
        os.close(theirs)
    os.close(ours)  # the kernel sends SIGHUP to whose terminal it was
    if to == "pipe" and sent != "SIGPIPE":
        os.kill(process.pid, signal.Signals[sent])
    assert exit_code(process) == 128 + signal.Signals[sent]
    assert summary_json(tmp_path / "run")["stopped_by"] == sent
    assert any((tmp_path / "run" / "checkpoints").glob("step-*"))


def _prints_to_a_full_disk() -> None:
    _prints_to("/dev/full")
    plan_module.print_line = lambda text: None  # before the training, where a full disk ends the program


@pytest.mark.slow
def test_a_log_on_a_full_disk_ends_no_training(tmp_path, options):
    process = start_training(
        tmp_path / "log", *options, f"--output_dir={tmp_path / 'run'}", first=_prints_to_a_full_disk
    )
    assert exit_code(process) == 0 and len(steps(tmp_path / "run")) == 6


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["folder", "metrics.jsonl"])
def test_a_run_whose_folder_is_moved_ends_and_goes_on_where_it_was_moved_to(
    tmp_path, options, whole, monkeypatch, lost
):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    take_step = timeline_module.Timeline.take_step

    def moving(self, batches, start):
        if self.step == 3 and not moved.exists():
            (folder if lost == "folder" else folder / lost).rename(moved)
        return take_step(self, batches, start)

    monkeypatch.setattr(timeline_module.Timeline, "take_step", moving)
    with pytest.raises(UserError, match=f"--output_dir: {folder / 'metrics.jsonl'}"):
        train(*options, "--save_every=2", f"--output_dir={folder}")
    there = moved if lost == "folder" else folder
    assert train(*options, f"--output_dir={there}", "--resume_from=latest") == 0
    assert [step["loss"] for step in steps(there)] == [step["loss"] for step in steps(whole)][-len(steps(there)) :]
    assert_same_bits(final_weights(there), final_weights(whole))


# checkpoints by the clock


def saves(log: str) -> list[str]:
    return [Path(line.split()[1]).name for line in log.splitlines() if line.startswith("saved ")]


@pytest.mark.slow
def test_checkpoints_come_at_log_lines_and_change_nothing(tmp_path, options, whole, capsys, monkeypatch):
    """They come after steps 2 and 4, and after the last step because there are some."""
    with_them, off = tmp_path / "with", tmp_path / "off"
    assert not (whole / "checkpoints").exists(), "half an hour, the default, is not over"
    monkeypatch.setattr(timeline_module, "SAVE_AFTER_S", 0.0)
    train(*options, "--save_every=0", f"--output_dir={off}")
    assert not (off / "checkpoints").exists()
    capsys.readouterr()
    train(*options, f"--output_dir={with_them}")
    assert saves(capsys.readouterr().out) == ["step-00000002", "step-00000004", "step-00000006"]
    assert [step["loss"] for step in steps(with_them)] == [step["loss"] for step in steps(whole)]
    assert_same_bits(final_weights(whole), final_weights(with_them))


def _clock_stands_on_rank(rank: str) -> None:
    timeline_module.SAVE_AFTER_S = 1e-9
    if os.environ["RANK"] == rank:
        timeline_module.time.monotonic = lambda: 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "num_saves"), [("1", 2), ("0", 0)])
def test_the_clock_of_the_main_rank_decides_for_all(tmp_path, options, rank, num_saves):
    more = ["--batch_size=4", "--max_steps=3", "--sharding_mode=ddp", f"--output_dir={tmp_path / 'run'}"]
    said = run_ranks(2, tmp_path / "run", *options, *more, first=functools.partial(_clock_stands_on_rank, rank))
    assert len(saves(said)) == num_saves, said


def test_a_full_disk_is_a_sentence_that_blames_no_input(tmp_path):
    with pytest.raises(UserError, match="^(?!.*--model_name).*No space"), explained_failures(lambda: tmp_path):
        with reading("--model_name", "a/b"):
            raise OSError(errno.ENOSPC, "No space left on device")
