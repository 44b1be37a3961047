"""What CUDA's libraries read from the environment, once, when CUDA starts. Scripts set it before they import torch:

os.environ.update({**CUDA_DEFAULTS, **os.environ})
"""

from __future__ import annotations

CUDA_DEFAULTS = {
    # Growing segments leave less unusable memory between blocks of many sizes.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # Transformer Engine multiplies fp32 matrices in TF32 otherwise: fp32 would not be fp32.
    "NVIDIA_TF32_OVERRIDE": "0",
}
"""Values for every run; what the user has set stays."""
