"""The GPUs that a process sees, by the names that the variable CUDA_VISIBLE_DEVICES takes: numbers, or UUIDs."""

from __future__ import annotations

import os


def gpu_names(num_gpus: int, visible_devices: str | None) -> list[str]:
    """Names of the `num_gpus` GPUs that CUDA counts where the variable is `visible_devices`; CUDA leaves out what follows a name that it does not know."""
    if not visible_devices:
        return [str(number) for number in range(num_gpus)]
    return [name.strip() for name in visible_devices.split(",")][:num_gpus]


def visible_gpus() -> list[str]:
    """Those of this process; none without a GPU."""
    import torch

    return gpu_names(torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
