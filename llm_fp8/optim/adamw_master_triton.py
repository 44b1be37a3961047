"""The Triton kernel behind `MasterAdamW`. Imported on a GPU alone.

One program updates BLOCK consecutive elements: it reads weight, remainder, gradient, m and v once and writes all but
the gradient once, 22 bytes per element, which is all of its time. Operation by operation it does what
`llm_fp8.optim.adamw_master` does in torch, with the same bits.

It is recompiled for another combination of: remainder or none, clip factor or none, a number of elements that 16
divides or not, alignment; not for a new learning rate: coefficients are fp32 arguments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm_fp8.optim.adamw_base import Coefficients
from llm_fp8.optim.adamw_base_triton import moments_and_update

BLOCK = 1024
"""Elements per program: 8 for each of 128 threads, 16 bytes of bf16."""


@triton.jit
def _update_kernel(
    weight_pointer: tl.tensor,
    remainder_pointer: tl.tensor,
    gradient_pointer: tl.tensor,
    exp_avg_pointer: tl.tensor,
    exp_avg_sq_pointer: tl.tensor,
    gradient_scale_pointer: tl.tensor,
    num_elements: tl.tensor,
    decay: float,
    beta1_complement: float,
    beta2: float,
    beta2_complement: float,
    step_size: float,
    inverse_root_correction2: float,
    epsilon: float,
    BLOCK: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < num_elements

    exp_avg, exp_avg_sq, update = moments_and_update(
        tl.load(gradient_pointer + offsets, mask=inside, other=0.0),
        gradient_scale_pointer,
        tl.load(exp_avg_pointer + offsets, mask=inside, other=0.0).to(tl.float32),
        tl.load(exp_avg_sq_pointer + offsets, mask=inside, other=0.0),
        beta1_complement,
        beta2,
        beta2_complement,
        step_size,
        inverse_root_correction2,
        epsilon,
    )

    weight = tl.load(weight_pointer + offsets, mask=inside, other=0.0)
    if remainder_pointer is None:
        tl.store(weight_pointer + offsets, weight * decay - update, mask=inside)
    else:
        # `join_master` and `split_master` of llm_fp8.optim.adamw_master; a signed right shift keeps the sign.
        remainder = tl.load(remainder_pointer + offsets, mask=inside, other=0).to(tl.int32)
        upper = weight.to(tl.int16, bitcast=True).to(tl.int32) + (remainder >> 15)
        master = ((upper << 16) | (remainder & 0xFFFF)).to(tl.float32, bitcast=True)
        bits = (master * decay - update).to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
        rounded = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(weight_pointer + offsets, rounded, mask=inside)
        tl.store(remainder_pointer + offsets, bits.to(tl.int16), mask=inside)
    tl.store(exp_avg_pointer + offsets, exp_avg.to(exp_avg_pointer.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq_pointer + offsets, exp_avg_sq, mask=inside)


def update_with_triton_(
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient_scale: Tensor | None,
    coefficients: Coefficients,
) -> None:
    """The contract of `llm_fp8.optim.adamw_master.update_with_torch_`, in one launch and without temporaries."""
    num_elements = weight.numel()
    with torch.cuda.device_of(weight):
        _update_kernel[(triton.cdiv(num_elements, BLOCK),)](
            weight,
            remainder,
            gradient,
            exp_avg,
            exp_avg_sq,
            gradient_scale,
            num_elements,
            *coefficients,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
