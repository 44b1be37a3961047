"""The arithmetic of the energy meter on a counter and a clock that the test moves, and where there is no counter."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from llm_fp8.observability.metrics import METRICS
from llm_fp8.observability.nvml import EnergyMeter, NoNvml, open_energy_counter


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


def test_steps_of_an_interval_that_is_too_short_count_in_the_next() -> None:
    board = Board(watts=400.0)
    meter = board.meter()
    board.wait(0.4)
    assert meter.read({1: 1000}) == {}
    board.wait(0.8)
    assert meter.read({2: 2000}) == {
        2: pytest.approx({"energy_j_per_million_tokens": 0.16e6, "gpu_power_w": 400.0, "energy_j": 480.0})
    }


def test_a_machine_without_a_counter_has_no_figures_and_says_why() -> None:
    meter = EnergyMeter(Accelerator(cpu=True))
    assert meter.read({1: 1000}) == {} and "a CPU has no counter" in str(meter.no_counter)
    with pytest.raises(NoNvml, match="a CPU has no counter"):
        open_energy_counter(torch.device("cpu"))
