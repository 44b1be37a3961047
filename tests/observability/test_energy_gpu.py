"""The energy counter of a real GPU, compared with the power that PyTorch reads."""

from __future__ import annotations

import time

import pytest
import torch
from accelerate import Accelerator

from llm_fp8.observability.nvml import EnergyMeter

pytestmark = pytest.mark.gpu


def test_mean_power_agrees_with_the_power_that_torch_reads(device):
    torch.cuda.set_device(0)
    meter = EnergyMeter(Accelerator())
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    meter.restart(0)
    start, watts = time.perf_counter(), []
    while time.perf_counter() - start < 6:
        for _ in range(20):
            matrix @ matrix
        watts.append(torch.cuda.power_draw() / 1e3)  # while the GPU is busy
        torch.cuda.synchronize()
    figures = meter.read({1: 1_000_000})
    seconds = time.perf_counter() - start
    mean_w = sum(watts) / len(watts)
    assert 0.5 < figures["gpu_power_w"] / mean_w < 2, f"{figures['gpu_power_w']} W counted, {mean_w} W read"
    assert figures["gpu_power_w"] == pytest.approx(figures["energy_j_per_million_tokens"] / seconds, rel=0.05)
