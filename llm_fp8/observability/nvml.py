"""Measure with NVML the energy that a run's GPUs use.

Data-centre GPUs since Volta count the energy of their board in millijoules (`nvmlDeviceGetTotalEnergyConsumption`). The
count includes all processes on the board, but not the host or the network. A MIG slice has no counter.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping

import torch
from accelerate import Accelerator

MIN_INTERVAL_S = 1.0  # minimum for figures, since the counter is updated about every 0.1 s


def energy_j(device: torch.device) -> float:
    """Read the energy counter of `device` in J. Return NaN if there is none or it cannot be read."""
    if device.type == "cuda":
        import pynvml  # imported here, since a machine without a GPU may not have it

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()  # repeated calls cost nothing
            # NVML numbers all GPUs of the host; CUDA numbers only those in CUDA_VISIBLE_DEVICES, in its own order.
            board = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(board)) / 1e3
    return math.nan


class EnergyMeter:
    """Measures the energy of all GPUs of a run over intervals of steps. The first interval begins at `restart`, which
    must be called while the GPUs are idle. An interval ends, and the next begins, at a `read` after `MIN_INTERVAL_S`.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._begin_j = energy_j(accelerator.device)
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin an interval after `step`. Energy used since the previous interval ended counts only in "energy_j"."""
        self._last_step, self._num_tokens = step, 0
        self._start_s, self._start_j = time.perf_counter(), energy_j(self._accelerator.device)

    def read(self, num_tokens: Mapping[int, int]) -> dict[str, float]:
        """Return energy per million tokens, power and total energy, or {} if energy is unknown or the interval is too
        short to end here. `num_tokens` maps each step since the last call to its number of tokens. Collective.
        """
        self._num_tokens += sum(count for step, count in num_tokens.items() if step > self._last_step)
        now_s, now_j = time.perf_counter(), energy_j(self._accelerator.device)
        changes = [now_j - self._start_j, now_j - self._begin_j, now_s - self._start_s]
        summed = torch.tensor(changes, dtype=torch.float64, device=self._accelerator.device)
        interval_j, total_j, gpu_seconds = self._accelerator.reduce(summed, reduction="sum").tolist()
        long_enough = gpu_seconds >= MIN_INTERVAL_S * self._accelerator.num_processes
        if not math.isfinite(interval_j) or not self._num_tokens or not long_enough:
            return {}
        figures = {
            "energy_j_per_million_tokens": interval_j / self._num_tokens * 1e6,
            "gpu_power_w": interval_j / gpu_seconds,
            "energy_j": total_j,
        }
        self._num_tokens, self._start_s, self._start_j = 0, now_s, now_j
        return figures
