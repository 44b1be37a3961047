"""Signals, --save_minutes, and failures of the machine."""

from __future__ import annotations

import errno
import functools
import os
import signal
from pathlib import Path

import pytest
import torch

from llm_fp8.train import loop as loop_module
from llm_fp8.train.graceful_stop import GracefulStop
from llm_fp8.train.run_dir import explained_failures
from llm_fp8.utils.errors import UserError
from tests.support.processes import run_ranks
from tests.support.small import assert_same_bits, final_weights, steps, train

AT_ONCE = "--save_minutes=1e-9"


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_signal_sets_a_flag_and_the_handlers_come_back(sent, code):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with GracefulStop() as stop:
        assert not stop.agreed()
        os.kill(os.getpid(), sent)
        assert stop.agreed() and stop.requested == sent.name and stop.exit_code == code
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == sent.name, "a second SIGTERM changes nothing"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


# --save_minutes


@pytest.fixture
def options(small_run) -> list[str]:
    return [*small_run, "--max_steps=8", "--log_every=2"]


def saves(log: str) -> list[str]:
    return [Path(line.split()[1]).name for line in log.splitlines() if line.startswith("saved ")]


@pytest.mark.slow
def test_checkpoints_come_at_log_lines_and_change_nothing(tmp_path, options, capsys):
    """They come after steps 2, 4 and 6; with no --save_every, none after the last step."""
    without, with_them = tmp_path / "without", tmp_path / "with"
    train(*options, f"--output_dir={without}")
    assert not (without / "checkpoints").exists(), "half an hour, the default, is not over"
    train(*options, AT_ONCE, f"--output_dir={with_them}")
    assert saves(capsys.readouterr().out) == ["step-00000002", "step-00000004", "step-00000006"]
    assert [step["loss"] for step in steps(with_them)] == [step["loss"] for step in steps(without)]
    assert_same_bits(final_weights(without), final_weights(with_them))


def _clock_stands_on_rank(rank: str) -> None:
    if os.environ["RANK"] == rank:
        loop_module.time.monotonic = lambda: 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "num_saves"), [("1", 2), ("0", 0)])
def test_the_clock_of_the_main_rank_decides_for_all(tmp_path, options, rank, num_saves):
    more = ["--batch_size=4", "--max_steps=5", AT_ONCE, "--sharding_mode=fsdp_full", f"--output_dir={tmp_path / 'run'}"]
    said = run_ranks(2, tmp_path / "run", *options, *more, first=functools.partial(_clock_stands_on_rank, rank))
    assert len(saves(said)) == num_saves, said


# Failures


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "--batch_size"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space"),
    ],
)
def test_a_failure_of_the_machine_is_a_sentence(tmp_path, error, named):
    with pytest.raises(UserError, match=named), explained_failures(tmp_path):
        raise error
