"""Casts to fp8 inside Triton kernels, by PTX instruction. Imported on a GPU alone.

Triton's own conversion (3.6, CUDA 13.0) gave a wrong fourth byte after a transposition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CAST = """{{
.reg .b16 low, high;
cvt.rn.satfinite.{kind}.f32 low, $2, $1;
cvt.rn.satfinite.{kind}.f32 high, $4, $3;
mov.b32 $0, {{low, high}};
}}"""
CASTS = {torch.float8_e5m2: _CAST.format(kind="e5m2x2"), torch.float8_e4m3fn: _CAST.format(kind="e4m3x2")}
"""fp8 type -> PTX for four fp32 values to a word, the first in its lowest byte; rounds to nearest even. NaN stays NaN,
what is out of range becomes the range's end."""
CONSTRAINTS = tl.constexpr("=r,f,f,f,f")
"""Of its operands."""


@triton.jit
def to_fp8(values: tl.tensor, CAST: tl.constexpr) -> tl.tensor:
    """fp32 values to bytes of the same shape; CAST is an entry of `CASTS`."""
    return tl.inline_asm_elementwise(CAST, CONSTRAINTS, [values], dtype=tl.uint8, is_pure=True, pack=4)
