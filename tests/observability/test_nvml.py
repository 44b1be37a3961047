"""What is looked at while a GPU works, on a stand-in of NVML that the test moves."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from llm_fp8.observability import nvml
from llm_fp8.observability.nvml import GpuStateSampler, NoNvml, open_nvml

CAPPED = pynvml.nvmlClocksThrottleReasonSwPowerCap
IDLE = pynvml.nvmlClocksThrottleReasonGpuIdle


class Board:
    """NVML with one GPU that goes through `states` (clock in MHz, power in W, reasons), one for each look, and then
    fails.
    """

    def __init__(self, states: list[tuple[int, float, int]]) -> None:
        self.states = iter(states)
        self.over = threading.Event()

    def module(self) -> Any:
        return SimpleNamespace(
            NVML_CLOCK_SM=pynvml.NVML_CLOCK_SM,
            NVMLError=pynvml.NVMLError,
            nvmlClocksThrottleReasonSwPowerCap=CAPPED,
            nvmlDeviceGetClockInfo=self.clock,
            nvmlDeviceGetPowerUsage=lambda handle: int(self.state[1] * 1e3),
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: self.state[2],
        )

    def clock(self, handle: object, kind: int) -> int:
        assert kind == pynvml.NVML_CLOCK_SM
        try:
            self.state = next(self.states)
        except StopIteration:
            self.over.set()
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST) from None
        return self.state[0]


def sampled(monkeypatch: pytest.MonkeyPatch, states: list[tuple[int, float, int]]) -> GpuStateSampler:
    board = Board(states)
    monkeypatch.setattr(nvml, "open_nvml", lambda device: (board.module(), object()))
    monkeypatch.setattr(nvml, "INTERVAL_S", 0.001)
    with GpuStateSampler(torch.device("cuda")) as sampler:
        assert board.over.wait(10)
    return sampler


def test_clock_power_and_the_limit(monkeypatch):
    states = [(1980, 700.0, 0), (1500, 650.0, CAPPED), (1600, 690.0, CAPPED | IDLE)]
    sampler = sampled(monkeypatch, states)
    assert sampler.figures(last_s=100.0) == pytest.approx(
        {"sm_clock_mhz": 1600, "power_w": 680.0, "power_capped_share": 2 / 3}
    )
    assert sampler.figures(last_s=0.0) == pytest.approx(
        {"sm_clock_mhz": 1600, "power_w": 690.0, "power_capped_share": 1.0}
    )


def test_a_gpu_that_does_not_answer_has_no_figures(monkeypatch):
    assert sampled(monkeypatch, []).figures(last_s=1.0) is None


def test_without_nvml_there_is_nothing(monkeypatch):
    with pytest.raises(NoNvml, match="a CPU has no counter"):
        open_nvml(torch.device("cpu"))
    with GpuStateSampler(torch.device("cpu")) as sampler:
        pass
    assert sampler.figures(last_s=1.0) is None
