"""The energy of a training on a real board, against PyTorch's own reading of its power."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from llm_fp8.observability.nvml import EnergyMeter, open_energy_counter
from tests.support.gpu_training import common, train
from tests.support.small import steps

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


def test_the_counter_only_rises_and_is_in_joules(device):
    read_j = open_energy_counter(torch.device("cuda", 0))
    first = read_j()
    time.sleep(2)
    # No board of today idles below 5 W or takes more than 2 kW: a counter read in mJ or kJ would be far outside.
    assert 2 * 5 < read_j() - first < 2 * 2000


def test_a_training_reports_energy_that_fits_its_power_and_speed(model_folder: Path, tmp_path: Path):
    # Steps of this model take some ten milliseconds: long intervals of many steps.
    options = [
        "--max_steps",
        "600",
        "--log_every",
        "300",
        "--num_epochs",
        "50",
        "--no_export",
        "--mixed_precision",
        "fp8",
    ]
    done = train(*common(model_folder, tmp_path, *options))
    assert done.returncode == 0, done.stderr
    taken = steps(tmp_path)
    assert "energy_j" in taken[-1], "600 steps took less than a second"
    counted = [step for step in taken if "energy_j" in step]
    totals = [step["energy_j"] for step in counted]
    assert totals == sorted(totals) and totals[0] > 0
    last = [step for step in counted if step["energy_j"] == totals[-1]]
    assert last[-1]["gpu_power_w"] > 20
    seconds = sum(step["step_time_s"] for step in last)
    num_tokens = sum(step["step_time_s"] * step["tokens_per_s"] for step in last)
    by_power = last[-1]["gpu_power_w"] * seconds
    by_tokens = last[-1]["energy_j_per_million_tokens"] * num_tokens / 1e6
    assert by_tokens == pytest.approx(by_power, rel=0.2)
