"""--save_minutes: a checkpoint when the last one is too old, in a run that asked for none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from llm_fp8.train.callbacks import SaveTimer

from llm_fp8.config.options import RunConfig
from llm_fp8.train import callbacks
from llm_fp8.train.loop import TrainingLoop
from tests.support.processes import run_ranks
from tests.support.small import assert_same_tensors, final_weights, steps, train

pytestmark = pytest.mark.slow

AT_ONCE = "--save_minutes=1e-9"


@pytest.fixture
def options(small_run) -> list[str]:
    return [*small_run, "--max_steps=8", "--log_every=2"]


def saves(log: str) -> list[str]:
    return [Path(line.split()[1]).name for line in log.splitlines() if line.startswith("saved ")]


def test_the_timer_measures_from_the_last_checkpoint(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: now))
    timer, never = SaveTimer(30, now), SaveTimer(0, now)
    now += 1799
    assert not timer.is_over()
    now += 1
    assert timer.is_over() and not never.is_over()
    timer.restart()
    assert not timer.is_over()
    now += 1800
    assert timer.is_over() and not never.is_over()


def test_checkpoints_come_at_log_lines_and_change_nothing(tmp_path, options, capsys):
    """Steps 2, 4 and 6; with no --save_every, none after the last step."""
    without, with_them = tmp_path / "without", tmp_path / "with"
    train(*options, "--save_minutes=0", f"--output_dir={without}")
    assert not (without / "checkpoints").exists() and saves(capsys.readouterr().out) == []
    train(*options, AT_ONCE, f"--output_dir={with_them}")
    assert saves(capsys.readouterr().out) == ["step-00000002", "step-00000004", "step-00000006"]
    left = sorted(path.name for path in (with_them / "checkpoints").iterdir())
    assert left == ["latest", "step-00000004", "step-00000006"], "--save_total_limit holds for them too"
    assert [step["loss"] for step in steps(with_them)] == [step["loss"] for step in steps(without)]
    assert_same_tensors(final_weights(without), final_weights(with_them))


def test_a_killed_run_goes_on_from_such_a_checkpoint(tmp_path, options, monkeypatch):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(*options, f"--output_dir={whole}")
    take_step = TrainingLoop.take_step

    def die(self, batches, start):
        if self.step == 5:
            raise RuntimeError("the power is gone")
        return take_step(self, batches, start)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the power is gone"):
        patch.setattr(TrainingLoop, "take_step", die)
        train(*options, AT_ONCE, f"--output_dir={killed}")
    assert train(*options, f"--output_dir={killed}", "--resume_from=latest") == 0
    assert [step["loss"] for step in steps(killed)] == [step["loss"] for step in steps(whole)]
    assert_same_tensors(final_weights(whole), final_weights(killed))


def test_the_default_is_half_an_hour_which_a_short_run_does_not_reach(tmp_path, options):
    assert RunConfig().save_minutes == 30
    train(*options, f"--output_dir={tmp_path}")
    assert not (tmp_path / "checkpoints").exists()


def test_a_disk_without_room_costs_the_checkpoint_and_not_the_run(tmp_path, options, capsys, monkeypatch):
    """A checkpoint takes 12 bytes for a weight and the export 4; the disk has room for both, then for one alone."""
    train(*options, f"--output_dir={tmp_path / 'size'}")
    num_weights = sum(tensor.numel() for tensor in final_weights(tmp_path / "size").values())
    margin, other_states = 2**20, 2**16
    assert 2 * num_weights > other_states
    usage = shutil.disk_usage
    for bytes_per_weight, num_saves in ((16, 3), (14, 0)):
        free = bytes_per_weight * num_weights + margin + other_states
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage(path)._replace(free=free))
        capsys.readouterr()
        folder = tmp_path / str(bytes_per_weight)
        assert train(*options, AT_ONCE, f"--output_dir={folder}") == 0
        said = capsys.readouterr().out
        assert len(saves(said)) == num_saves
        assert said.count("WARNING: --save_minutes 1e-09: no checkpoint is written, because the disk") == 3 - num_saves
        assert final_weights(folder) and (folder / "checkpoints").exists() == (num_saves > 0)


def _clock_runs_on_the_main_rank_alone() -> None:
    if os.environ["RANK"] != "0":
        SaveTimer.is_over = lambda self: False


def _clock_runs_on_other_ranks_alone() -> None:
    if os.environ["RANK"] == "0":
        SaveTimer.is_over = lambda self: False


@pytest.mark.parametrize(
    ("mode", "clocks", "saved"),
    [
        ("fsdp_full", _clock_runs_on_the_main_rank_alone, ["step-00000002", "step-00000004"]),
        ("deepspeed_1", _clock_runs_on_the_main_rank_alone, ["step-00000002", "step-00000004"]),
        ("ddp", _clock_runs_on_other_ranks_alone, []),
    ],
)
def test_the_clock_of_the_main_rank_decides_for_all(tmp_path, small_run, mode, clocks, saved):
    options = [
        *small_run,
        "--batch_size=4",
        "--max_steps=5",
        "--log_every=2",
        AT_ONCE,
        f"--sharding_mode={mode}",
        f"--output_dir={tmp_path / 'run'}",
    ]
    said = run_ranks(2, tmp_path / "run", *options, first=clocks)
    assert saves(said) == saved, said
