"""The energy meter with a made-up counter and clock, and without a counter."""

from __future__ import annotations

import pytest
from accelerate import Accelerator

from llm_fp8.observability import nvml
from tests.support.documented_metrics import DOCUMENTED


class Board:
    """Stand in for a GPU of constant power. `wait` advances the clock and the energy counter."""

    def __init__(self, watts: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watts, self.now_s, self.energy_j = watts, 100.0, 5e6
        monkeypatch.setattr(nvml, "energy_j", lambda device: self.energy_j)
        monkeypatch.setattr(nvml.time, "perf_counter", lambda: self.now_s)
        self.meter = nvml.EnergyMeter(Accelerator(cpu=True))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.energy_j += self.watts * seconds


def test_energy_per_token_power_and_total(monkeypatch) -> None:
    board = Board(600.0, monkeypatch)
    board.wait(50)  # before training, so not counted
    board.meter.restart(0)
    board.wait(10)
    expected = {"energy_j_per_million_tokens": 6000 / 0.06, "gpu_power_w": 600.0, "energy_j": 36_000.0}
    assert board.meter.read({1: 20_000, 2: 40_000}) == pytest.approx(expected)
    assert set(expected) < DOCUMENTED
    board.watts = 300.0
    board.wait(2)
    expected = {"energy_j_per_million_tokens": 600 / 0.01, "gpu_power_w": 300.0, "energy_j": 36_600.0}
    assert board.meter.read({3: 10_000}) == pytest.approx(expected)


def test_too_short_interval_is_added_to_the_next(monkeypatch) -> None:
    board = Board(400.0, monkeypatch)
    board.wait(0.4)
    assert board.meter.read({1: 1000}) == {}
    board.wait(0.8)
    expected = {"energy_j_per_million_tokens": 0.16e6, "gpu_power_w": 400.0, "energy_j": 480.0}
    assert board.meter.read({2: 2000}) == pytest.approx(expected)


def test_machine_without_a_counter_has_no_figures() -> None:
    assert nvml.EnergyMeter(Accelerator(cpu=True)).read({1: 1000}) == {}
