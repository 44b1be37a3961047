"""Which GEMM kernels a profiled step ran, told by their names.

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        ...one step...
    gemm_kernels(prof)   ->   {"fp8": GemmKernels(count=480, time_s=0.21, names=...), "bf16": ...}

cuBLAS 13 names its Hopper kernels nvjet_sm90_<types>_...: the first letters are the operands' types, q for e4m3, r for e5m2, t for bf16, h for
fp16, s for fp32 (seen in profiles of one H200). A GEMM whose types its name does not tell is counted as "unknown", never as something.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_KINDS = (
    ("fp8", re.compile(r"nvjet_sm\d+_[qr][qr]|gemm.*e[45]m[32]|e[45]m[32].*gemm", re.IGNORECASE)),
    ("bf16", re.compile(r"nvjet_sm\d+_t|gemm.*bf16|bf16.*gemm", re.IGNORECASE)),
    ("fp16", re.compile(r"nvjet_sm\d+_h|gemm.*(f16f16|fp16)", re.IGNORECASE)),
    ("fp32", re.compile(r"nvjet_sm\d+_s|gemm.*(f32f32|sgemm|tf32)|sgemm", re.IGNORECASE)),
)
_GEMM = re.compile(r"gemm|nvjet", re.IGNORECASE)


@dataclass
class GemmKernels:
    """The GEMM kernels of one operand type."""

    count: int = 0
    time_s: float = 0.0
    names: list[str] = field(default_factory=list)


def gemm_kind(kernel_name: str) -> str | None:
    """fp8, bf16, fp16, fp32 or unknown for a GEMM kernel; None for any other kernel."""
    if not _GEMM.search(kernel_name):
        return None
    return next((kind for kind, pattern in _KINDS if pattern.search(kernel_name)), "unknown")


def gemm_kernels(profile: Any) -> dict[str, GemmKernels]:
    """The GEMM kernels of a finished `torch.profiler.profile` by operand type."""
    found: dict[str, GemmKernels] = {}
    for event in profile.key_averages():
        kind = gemm_kind(event.key)
        if kind is not None:
            kernels = found.setdefault(kind, GemmKernels())
            kernels.count += event.count
            kernels.time_s += event.device_time_total / 1e6
            kernels.names.append(event.key)
    return found
