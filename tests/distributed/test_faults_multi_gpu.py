"""Faults under torchrun and NCCL: a killed rank, a restart, and non-finite numbers. Also exact resuming from
checkpoints that are saved in the background.
"""

from __future__ import annotations

import functools
import signal

import pytest

from tests.support.faults import (
    SCALES,
    START_S,
    VALUES,
    check_run_stops_on_nonfinite_value,
    kill_rank_and_restart,
    kill_rank_during_save,
)
from tests.support.launches import Torchrun, train_under_torchrun
from tests.support.small import assert_same_continuation, run_json, write_rows

pytestmark = pytest.mark.multi_gpu

DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""Makes the gradients of attention bitwise reproducible."""


@pytest.fixture
def options(models, tmp_path) -> list[str]:
    """Return the options of a short fp8 run. Each test adds an output folder."""
    common = "--validation_fraction=0 --use_te --mixed_precision=fp8 --sharding_mode=fsdp_full --max_seq_length=256"
    rows = write_rows(tmp_path / "rows.jsonl", 64)
    return [f"--model_name={models['llama3_rope_gqa']}", f"--dataset_name={rows}", *common.split()]


def test_rank_killed_in_a_save_ends_all_ranks_and_leaves_complete_checkpoints(options, tmp_path, record_property):
    folder = tmp_path / "run"
    training = [*options, "--log_every=1", f"--output_dir={folder}"]
    codes = kill_rank_during_save(functools.partial(Torchrun, tmp_path / "log", *training), folder, within_s=60)
    record_property("codes", codes)
    assert f"Signal {signal.SIGKILL.value} (SIGKILL) received" in (tmp_path / "log").read_text()


def test_run_resumes_after_torchrun_restarts_it(options, tmp_path):
    kill_rank_and_restart(functools.partial(Torchrun, cwd=tmp_path), tmp_path, *options)


def test_run_resumes_bit_for_bit_from_a_background_save(options, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    training = [*options, "--log_every=1", "--max_steps=6", "--async_save", "--save_every=2", "--save_total_limit=9"]
    train_under_torchrun({whole: training}, START_S, **DETERMINISTIC)
    checkpoint = whole / "checkpoints" / "step-00000002"
    train_under_torchrun({resumed: [*training, f"--resume_from={checkpoint}"]}, START_S, **DETERMINISTIC)
    assert run_json(resumed)["resumed_after_step"] == 2
    assert_same_continuation(whole, resumed, completed=2)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", ["activation", "gradient", *SCALES])
def test_non_finite_number_stops_all_ranks_at_its_step(options, tmp_path, place, value):
    check_run_stops_on_nonfinite_value(tmp_path / "run", place, value, *options)
