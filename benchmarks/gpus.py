"""The GPUs that a benchmark may use."""

from __future__ import annotations

import os

import torch


def visible_gpus() -> list[str]:
    """Return the numbers or UUIDs of the GPUs that CUDA counts, as CUDA_VISIBLE_DEVICES names them."""
    numbers = [str(number) for number in range(torch.cuda.device_count())]
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(numbers)
    # CUDA ignores all names after one that it does not know.
    return [name.strip() for name in named.split(",")][: len(numbers)]
