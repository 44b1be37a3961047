"""Energy of training, from the counters that the GPUs themselves keep.

Data-centre GPUs since Volta count the energy of the whole board since the driver was loaded, and NVML reads that counter
(`nvmlDeviceGetTotalEnergyConsumption`, in millijoules: NVML API reference, device queries). The difference of two readings is
the energy between them, whatever the power did in between, so nothing has to be sampled. It is the energy of one GPU board: not
of the host, its fans or the network.

The counter belongs to the board: what another process does on the same GPU is in it. A MIG slice has none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch
from accelerate import Accelerator

from llm_fp8.nvml import NoNvml, open_nvml

MIN_INTERVAL_S = 1.0
"""Shortest interval that figures are given for. The counter moves in jumps of about a tenth of a second."""


class NoEnergyCounter(Exception):
    """This machine has no energy counter for the device; the message says why."""


def open_energy_counter(device: torch.device) -> Callable[[], float]:
    """A function that reads the energy counter of `device` in joules, from an arbitrary start.

    Raises `NoEnergyCounter` for a CPU, without NVML, and for a GPU that has no counter.
    """
    try:
        pynvml, handle = open_nvml(device)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except NoNvml as error:
        raise NoEnergyCounter(str(error)) from error
    except pynvml.NVMLError as error:
        raise NoEnergyCounter(f"NVML: {error}") from error

    def read_j() -> float:
        try:
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        except pynvml.NVMLError:  # A reading that fails costs the figure and must not cost the run.
            return math.nan

    return read_j


class EnergyMeter:
    """Energy of all GPUs of a run over intervals of whole steps; used by every rank alike, because its figures are sums over ranks.

    An interval begins at `restart`, with the GPU idle, and ends at the first `read` that comes at least `MIN_INTERVAL_S` later, with the GPU
    done with the steps that it is told of; the next begins there. `no_counter` says why there are no figures on this rank, None where
    there are; where one rank has no counter there are none at all, because a sum that lacks a GPU would be wrong.
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
        self._read_j: Callable[[], float] | None = None
        try:
            self._read_j = open_counter(accelerator.device)
        except NoEnergyCounter as reason:
            self.no_counter = str(reason)
        self._begin_j = self._counter_j()
        self.restart(0)

    def restart(self, step: int) -> None:
        """Begin an interval after `step`; what has been counted since the last figures belongs to none, only to the total."""
        self._last_step = step
        self._num_tokens = 0
        self._start_s, self._start_j = self._clock(), self._counter_j()

    def _counter_j(self) -> float:
        return math.nan if self._read_j is None else self._read_j()

    def read(self, num_tokens: Mapping[int, int]) -> dict[int, dict[str, float]]:
        """The figures of the interval that ends here, under the keys of `metrics.METRICS`, for each step of this call in it; collective.

        `num_tokens` gives, for each step since the last call, its positions on all GPUs. Empty where there is no counter or the interval is
        still too short; the steps' tokens then count for the call that ends it. The GPU must be done with the steps: nothing here waits.
        """
        # All ranks see the same type of device, so they agree on whether there is something to sum.
        if self._accelerator.device.type != "cuda" and self._read_j is None:
            return {}
        steps = [step for step in num_tokens if step > self._last_step]
        self._num_tokens += sum(num_tokens[step] for step in steps)
        now_s, now_j = self._clock(), self._counter_j()
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
