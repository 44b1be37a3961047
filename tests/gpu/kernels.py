"""Which GEMM kernels a profile holds, by their names on Hopper."""

from __future__ import annotations

import re
from collections import Counter

# cuBLAS 13 on sm_90 names its kernels nvjet_sm90_<types>_...: q is e4m3, r is e5m2, t is bf16, h is fp16, s is fp32 (accumulation).
FP8_GEMM = re.compile(r"nvjet_sm90_[qr][qr]|_e[45]m[32]_.*gemm|gemm.*_e[45]m[32]", re.IGNORECASE)
BF16_GEMM = re.compile(r"nvjet_sm90_t|gemm.*bf16|bf16.*gemm", re.IGNORECASE)


def gemm_types(profile) -> Counter[str]:
    """Number of GEMM kernels run, by operand type."""
    counts: Counter[str] = Counter()
    for event in profile.key_averages():
        kind = "fp8" if FP8_GEMM.search(event.key) else "bf16" if BF16_GEMM.search(event.key) else None
        if kind:
            counts[kind] += event.count
    return counts
