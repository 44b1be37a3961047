"""The arithmetic of `llm_fp8.optim.adamw_base` in Triton. Imported on a GPU alone.

Square root and division are the correctly rounded ones, and kernels are launched with `enable_fp_fusion=False`, so that
a multiplication and an addition round twice: the bits are those of `llm_fp8.optim.adamw_base.moments_and_update`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def moments_and_update(
    gradient: tl.tensor,
    gradient_scale_pointer: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    beta1_complement: float,
    beta2: float,
    beta2_complement: float,
    step_size: float,
    inverse_root_correction2: float,
    epsilon: float,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The new m and v, and the update to subtract from the decayed parameter, all fp32; `gradient` bf16 or fp32."""
    gradient = gradient.to(tl.float32)
    if gradient_scale_pointer is not None:
        gradient = gradient * tl.load(gradient_scale_pointer)
    exp_avg = exp_avg + (gradient - exp_avg) * beta1_complement
    exp_avg_sq = exp_avg_sq * beta2 + (gradient * beta2_complement) * gradient
    denominator = tl.sqrt_rn(exp_avg_sq) * inverse_root_correction2 + epsilon
    return exp_avg, exp_avg_sq, tl.div_rn(exp_avg * step_size, denominator)
