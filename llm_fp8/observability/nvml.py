"""NVML's handle of a GPU, and how fast the GPU ran: clocks and power, looked at while it works.

A GPU that draws as much power as it may lowers its clocks, and large GEMMs bring an H200 there. So the same program
takes longer on one GPU than on the next of its kind, and a step with less beside its GEMMs gains less than the time
that was beside them. `GpuStateSampler` says how it was.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator

INTERVAL_S = 0.1
"""Time between two looks. NVML's figures change about as often."""


class NoNvml(Exception):
    """NVML knows nothing of this device; the message says why."""


def gpu_uuid(device: torch.device | int) -> str:
    """The name that NVML and `nvidia-smi -L` have for this very board, whatever CUDA_VISIBLE_DEVICES leaves of the
    host's GPUs.
    """
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def open_nvml(device: torch.device) -> tuple[Any, Any]:
    """The module `pynvml`, initialised, and its handle of `device`. Raises `NoNvml` for a CPU, without NVML, and for
    a GPU that it does not show.
    """
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


class GpuStateSampler:
    """Looks at a GPU every `INTERVAL_S` from a thread of its own, from entry to exit; with no NVML it does nothing.

    The thread waits nearly all the time, and NVML answers without the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._samples: list[tuple[float, float, float, bool]] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._nvml, self._handle = open_nvml(device)
        except NoNvml:
            return
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> GpuStateSampler:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self) -> None:
        nvml = self._nvml
        while not self._ended.wait(INTERVAL_S):
            try:
                clock_mhz = nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)
                power_w = nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
                reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
            except nvml.NVMLError:
                return  # the figures are of the looks before
            capped = bool(reasons & nvml.nvmlClocksThrottleReasonSwPowerCap)
            self._samples.append((time.perf_counter(), float(clock_mhz), power_w, capped))

    def figures(self, last_s: float) -> dict[str, float] | None:
        """How it was in the last `last_s` seconds before the last look; None where there was none.

        sm_clock_mhz: median clock of the multiprocessors. power_w: mean power of the board. power_capped_share: of the
            looks, those at which
        the clock was held down by the limit of power.
        """
        if not self._samples:
            return None
        since = self._samples[-1][0] - last_s
        looks = [sample for sample in self._samples if sample[0] >= since]
        return {
            "sm_clock_mhz": statistics.median(sample[1] for sample in looks),
            "power_w": statistics.mean(sample[2] for sample in looks),
            "power_capped_share": statistics.mean(sample[3] for sample in looks),
        }


# --- energy ----------------------------------------------------------------------------------------------
# Energy of training, from the counters that the GPUs themselves keep.
#
# Data-centre GPUs since Volta count the energy of the whole board since the driver was loaded, and NVML reads that
# counter (`nvmlDeviceGetTotalEnergyConsumption`, in millijoules: NVML API reference, device queries). The difference of
# two readings is the energy between them, whatever the power did in between, so nothing has to be sampled. It is the
# energy of one GPU board: not of the host, its fans or the network.
#
# The counter belongs to the board: what another process does on the same GPU is in it. A MIG slice has none.

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
    """Energy of all GPUs of a run over intervals of whole steps; used by every rank alike, because its figures are sums
    over ranks.

    An interval begins at `restart`, with the GPU idle, and ends at the first `read` that comes at least
    `MIN_INTERVAL_S` later, with the GPU done with the steps that it is told of; the next begins there. `no_counter`
    says why there are no figures on this rank, None where there are; where one rank has no counter there are none at
    all, because a sum that lacks a GPU would be wrong.
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
        """Begin an interval after `step`; what has been counted since the last figures belongs to none, only to the
        total.
        """
        self._last_step = step
        self._num_tokens = 0
        self._start_s, self._start_j = self._clock(), self._counter_j()

    def _counter_j(self) -> float:
        return math.nan if self._read_j is None else self._read_j()

    def read(self, num_tokens: Mapping[int, int]) -> dict[int, dict[str, float]]:
        """The figures of the interval that ends here, under the keys of `metrics.METRICS`, for each step of this call
        in it; collective.

        `num_tokens` gives, for each step since the last call, its positions on all GPUs. Empty where there is no
        counter or the interval is still too short; the steps' tokens then count for the call that ends it. The GPU must
        be done with the steps: nothing here waits.
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
