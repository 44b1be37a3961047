"""List the GPUs that a benchmark may use."""

from __future__ import annotations

import os

import torch


def visible_gpus() -> list[str]:
    """Return the GPUs that CUDA can see, each as its number or UUID, which CUDA_VISIBLE_DEVICES accepts."""
    numbers = [str(number) for number in range(torch.cuda.device_count())]
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(numbers)
    # CUDA ignores every name after an unknown one.
    return [name.strip() for name in named.split(",")][: len(numbers)]
