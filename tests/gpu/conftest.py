"""What the GPU tests share. TF32 is switched off for the whole process: fp32 parity is then near fp32 rounding."""

from __future__ import annotations

import os

os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # cuBLAS reads it once; Transformer Engine multiplies fp32 in TF32 otherwise

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
