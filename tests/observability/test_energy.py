"""The arithmetic of the energy meter on a counter and a clock that the test moves, one process and two, and where
there is no counter.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from llm_fp8.observability.metrics import METRICS
from llm_fp8.observability.nvml import EnergyMeter, NoNvml, open_energy_counter
from tests.support.processes import exit_code, start_ranks
from tests.support.small import steps, write_model, write_rows


class Board:
    """A GPU of constant power whose time the test lets pass."""

    def __init__(self, watts: float) -> None:
        self.watts, self.now_s, self.energy_j = watts, 100.0, 5e6

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.energy_j += self.watts * seconds

    def meter(self) -> EnergyMeter:
        return EnergyMeter(Accelerator(cpu=True), lambda device: lambda: self.energy_j, lambda: self.now_s)


def test_energy_per_token_power_and_total() -> None:
    board = Board(watts=600.0)
    meter = board.meter()
    board.wait(50)  # before training: in no interval
    meter.restart(0)
    board.wait(10)
    found = meter.read({1: 20_000, 2: 40_000})
    expected = {"energy_j_per_million_tokens": 6000 / 0.06, "gpu_power_w": 600.0, "energy_j": 36_000.0}
    assert found == {1: pytest.approx(expected), 2: pytest.approx(expected)}
    assert set(expected) < set(METRICS)
    board.watts = 300.0
    board.wait(2)
    (figures,) = meter.read({3: 10_000}).values()
    assert figures == pytest.approx(
        {"energy_j_per_million_tokens": 600 / 0.01, "gpu_power_w": 300.0, "energy_j": 36_600.0}
    )


def test_what_lies_before_a_restart_is_in_the_total_only() -> None:
    board = Board(watts=500.0)
    meter = board.meter()
    board.wait(4)  # steps 1 and 2
    board.wait(30)  # an evaluation
    meter.restart(2)
    board.wait(2)
    found = meter.read({1: 1000, 2: 1000, 3: 1000})
    assert found == {3: pytest.approx({"energy_j_per_million_tokens": 1e6, "gpu_power_w": 500.0, "energy_j": 18_000.0})}


def test_steps_of_an_interval_that_is_too_short_count_in_the_next() -> None:
    board = Board(watts=400.0)
    meter = board.meter()
    board.wait(0.4)
    assert meter.read({1: 1000}) == {}
    board.wait(0.8)
    assert meter.read({2: 2000}) == {
        2: pytest.approx({"energy_j_per_million_tokens": 0.16e6, "gpu_power_w": 400.0, "energy_j": 480.0})
    }


def test_a_reading_that_fails_gives_no_figure_and_the_next_interval_recovers() -> None:
    board = Board(watts=400.0)
    meter = board.meter()
    board.wait(2)
    good, board.energy_j = board.energy_j, math.nan
    assert meter.read({1: 1000}) == {}
    board.energy_j = good
    board.wait(2)
    assert meter.read({2: 3000})[2]["energy_j_per_million_tokens"] == pytest.approx(0.4e6)


def without_counter(reason: str) -> Callable[[torch.device], Callable[[], float]]:
    def open_counter(device: torch.device) -> Callable[[], float]:
        raise NoNvml(reason)

    return open_counter


def test_a_machine_without_a_counter_has_no_figures_and_says_why() -> None:
    meter = EnergyMeter(Accelerator(cpu=True), without_counter("no board"))
    assert meter.read({1: 1000}) == {} and meter.no_counter == "no board"
    with pytest.raises(NoNvml, match="a CPU has no counter"):
        open_energy_counter(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a driver")
def test_nvml_without_a_driver_is_a_reason_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        uuid = "00000000-0000-0000-0000-000000000000"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    with pytest.raises(NoNvml, match="NVML: .*Not Found"):
        open_energy_counter(torch.device("cuda"))


def give_each_rank_a_board() -> None:
    """In a training process: a board of 100 W, or 300 W on rank 1, whose counter fails from 30 s on; each reading of
    the clock takes 10 s.
    """
    import llm_fp8.train.loop

    first = os.environ["RANK"] == "0"
    ticks = itertools.count(step=10)
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s = float(next(ticks))
        return now_s

    def open_counter(device: torch.device) -> Callable[[], float]:
        return lambda: 100.0 * now_s if first else 300.0 * now_s if now_s < 30 else math.nan

    meter = functools.partial(EnergyMeter, open_counter=open_counter, clock=clock)
    llm_fp8.train.loop.EnergyMeter = meter  # type: ignore[misc, assignment]


@pytest.mark.slow
def test_the_energy_of_two_processes_is_their_sum_and_nothing_where_one_is_missing(tmp_path: Path) -> None:
    options = [
        "--model_name", write_model(tmp_path / "model"), "--dataset_name",
        write_rows(tmp_path / "rows.jsonl", 32), "--validation_fraction=0",
        "--output_dir", tmp_path / "run", "--max_steps=4", "--log_every=2", "--batch_size=2",
        "--max_seq_length=256", "--sharding_mode=ddp",
        "--no_export"
    ]  # fmt: skip
    ranks = start_ranks(2, tmp_path / "log", *options, first=give_each_rank_a_board)
    assert [exit_code(rank) for rank in ranks] == [0, 0], (tmp_path / "log").read_text()
    taken = steps(tmp_path / "run")
    assert len(taken) == 4
    # The clock: 0 as the meter is made, 10 as training begins, 20 and 30 at the two readings; 4000 J until the first.
    assert [step["gpu_power_w"] for step in taken[:2]] == [200.0] * 2
    assert [step["energy_j"] for step in taken[:2]] == [8000.0] * 2
    assert not any("energy" in key or "power" in key for step in taken[2:] for key in step)
    num_tokens = sum(step["tokens_per_s"] * step["step_time_s"] for step in taken[:2])
    assert taken[0]["energy_j_per_million_tokens"] == pytest.approx(4000 / num_tokens * 1e6)
