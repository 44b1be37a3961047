"""What CUDA's libraries read from the environment, once: scripts set it before they import torch."""

from __future__ import annotations

CUDA_DEFAULTS = {
    # Growing segments leave less unusable memory between blocks of many sizes.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # Transformer Engine multiplies fp32 matrices in TF32 otherwise: fp32 would not be fp32.
    "NVIDIA_TF32_OVERRIDE": "0",
}
