"""NVML's handle of a GPU, and how fast the GPU ran: clocks and power, looked at while it works.

A GPU that draws as much power as it may lowers its clocks, and large GEMMs bring an H200 there. So the same program takes longer on one GPU than on the next
of its kind, and a step with less beside its GEMMs gains less than the time that was beside them. `GpuStateSampler` says how it was.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import torch

INTERVAL_S = 0.1
"""Time between two looks. NVML's figures change about as often."""


class NoNvml(Exception):
    """NVML knows nothing of this device; the message says why."""


def gpu_uuid(device: torch.device | int) -> str:
    """The name that NVML and `nvidia-smi -L` have for this very board, whatever CUDA_VISIBLE_DEVICES leaves of the host's GPUs."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def open_nvml(device: torch.device) -> tuple[Any, Any]:
    """The module `pynvml`, initialised, and its handle of `device`. Raises `NoNvml` for a CPU, without NVML, and for a GPU that it does not show."""
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

        sm_clock_mhz: median clock of the multiprocessors. power_w: mean power of the board. power_capped_share: of the looks, those at which
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
