"""A number that is not finite on one rank stops all of them at its step. gloo on the CPU."""

from __future__ import annotations

import math

import pytest

from tests.support.planted import check_that_the_run_stops
from tests.support.small import write_rows

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("place", "mode", "value"),
    [("activation", "fsdp_full", math.nan), ("gradient", "ddp", math.inf), ("gradient", "deepspeed_1", math.nan)],
)
def test_a_number_that_is_not_finite_stops_all_ranks_at_its_step(tmp_path, tiny_model, place, mode, value):
    rows = write_rows(tmp_path / "rows.jsonl", 64)
    options = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--max_seq_length=128"]
    check_that_the_run_stops(tmp_path / "run", place, value, *options, f"--sharding_mode={mode}")
