"""The energy of a training on a real board, against PyTorch's own reading of its power."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from accelerate import Accelerator

from llm_fp8.observability.nvml import EnergyMeter

pytestmark = pytest.mark.gpu


class PowerIntegral:
    """Integrates `torch.cuda.power_draw` (mW) over the enclosed block, in a thread."""

    def __enter__(self) -> PowerIntegral:
        self.energy_j, self.num_samples = 0.0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        last = time.perf_counter()
        while not self._stop.wait(0.05):
            watts = torch.cuda.power_draw() / 1e3
            now = time.perf_counter()
            self.energy_j += watts * (now - last)
            self.num_samples += 1
            last = now

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def test_the_counter_agrees_with_the_power_that_torch_reads(device):
    torch.cuda.set_device(0)
    meter = EnergyMeter(Accelerator())
    assert meter.no_counter is None
    left = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    with PowerIntegral() as expected:
        meter.restart(0)
        began = time.perf_counter()
        while time.perf_counter() - began < 6:
            for _ in range(20):
                left @ left
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        (figures,) = meter.read({1: 1_000_000}).values()
    assert expected.num_samples > 20
    energy_j = figures["energy_j_per_million_tokens"]
    assert 0.5 < energy_j / expected.energy_j < 2, f"{energy_j} J counted, {expected.energy_j} J integrated"
    assert figures["gpu_power_w"] == pytest.approx(energy_j / seconds, rel=0.05)
