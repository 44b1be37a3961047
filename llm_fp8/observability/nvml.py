"""The energy that a GPU has used, which NVML counts.

Data-centre GPUs since Volta count the energy of the board in millijoules (`nvmlDeviceGetTotalEnergyConsumption`): of
all processes on it, without the host or the network. A MIG slice has no counter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator

MIN_INTERVAL_S = 1.0
"""Shortest interval with figures. The counter moves in jumps of about a tenth of a second."""


class NoNvml(Exception):
    """NVML cannot tell this of the device; the message says why."""


def gpu_uuid(device: torch.device | int) -> str:
    """The board's name in NVML and `nvidia-smi -L`, whatever CUDA_VISIBLE_DEVICES hides."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def open_nvml(device: torch.device) -> tuple[Any, Any]:
    """The initialised module `pynvml` and its handle of `device`. Raises `NoNvml` where there is none."""
    if device.type != "cuda":
        raise NoNvml("a CPU has no counter that NVML reads")
    try:
        import pynvml
    except ImportError as error:
        raise NoNvml("the nvidia-ml-py package is not installed") from error
    # NVML numbers all GPUs of the host, CUDA those that CUDA_VISIBLE_DEVICES leaves, in an order of its own.
    uuid = gpu_uuid(device)
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:
        raise NoNvml(f"NVML: {error}") from error


def open_energy_counter(device: torch.device) -> Callable[[], float]:
    """A function that reads the energy counter of `device` in J, NaN where a reading fails. Raises `NoNvml` where it
    has none.
    """
    pynvml, handle = open_nvml(device)

    def read_j() -> float:
        try:
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        except pynvml.NVMLError:
            return math.nan

    if math.isnan(read_j()):
        raise NoNvml("NVML: this GPU has no energy counter")
    return read_j


class EnergyMeter:
    """Energy of all GPUs of a run over intervals of optimizer steps; collective.

    An interval begins at `restart`, with an idle GPU, and ends at the first `read` at least `MIN_INTERVAL_S` later; the
    next begins there. `no_counter` says why this rank has no counter; then no rank has figures.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        open_counter: Callable[[torch.device], Callable[[], float]] = open_energy_counter,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._accelerator = accelerator
        self._clock = clock
        self.no_counter: str | None = None
        self._read_j: Callable[[], float] = lambda: math.nan
        try:
            self._read_j = open_counter(accelerator.device)
        except NoNvml as reason:
            self.no_counter = str(reason)
        self._begin_j = self._read_j()
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin an interval after `step`; the energy since the last figures counts in the total alone."""
        self._last_step = step
        self._num_tokens = 0
        self._start_s, self._start_j = self._clock(), self._read_j()

    def read(self, num_tokens: Mapping[int, int]) -> dict[int, dict[str, float]]:
        """Per step of this call, figures of the interval that ends here, under the keys of `metrics.METRICS`.

        `num_tokens`: positions of each step since the last call, on all GPUs, which must be done with them. Empty
        without a counter, or while the interval is too short: the tokens then count for the call that ends it.
        """
        # All ranks have the same type of device, so they agree on whether to reduce.
        if self._accelerator.device.type != "cuda" and self.no_counter is not None:
            return {}
        steps = [step for step in num_tokens if step > self._last_step]
        self._num_tokens += sum(num_tokens[step] for step in steps)
        now_s, now_j = self._clock(), self._read_j()
        own = [now_j - self._start_j, now_j - self._begin_j, now_s - self._start_s]
        summed = torch.tensor(own, dtype=torch.float64, device=self._accelerator.device)
        interval_j, total_j, gpu_seconds = self._accelerator.reduce(summed, reduction="sum").tolist()
        long_enough = gpu_seconds >= MIN_INTERVAL_S * self._accelerator.num_processes
        if not math.isfinite(interval_j) or not steps or not long_enough:
            return {}
        figures = {
            "energy_j_per_million_tokens": interval_j / self._num_tokens * 1e6,
            "gpu_power_w": interval_j / gpu_seconds,
            "energy_j": total_j,
        }
        self._num_tokens = 0
        self._start_s, self._start_j = now_s, now_j
        return dict.fromkeys(steps, figures)
