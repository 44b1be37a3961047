"""One AdamW step of one tensor in every storage format: the arithmetic, in torch; `adamw_triton` is the same on a GPU.

Step t, in fp32, with g the gradient times `gradient_scale`, in the order of torch.optim.AdamW (Loshchilov and Hutter,
arXiv 1711.05101):

    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g^2
    x = (1 - lr weight_decay) x - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

with the new moments before they are rounded for storage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from llm_fp8.optim.adamw_8bit_codes import CODE_BLOCK, Key, decode, encode, round_stochastically, rounding_bits
from llm_fp8.optim.adamw_master import join_master, split_master

CHUNK_ELEMENTS = 2**18  # updated at a time: fp32 temporaries of a few MiB
State = Mapping[str, Tensor]
"""One parameter's state by name."""


class Coefficients(NamedTuple):
    """The numbers of one step of one parameter group, in fp64; rounded to fp32 once, where they are used."""

    decay: float
    beta1_complement: float
    beta2: float
    beta2_complement: float
    step_size: float
    inverse_root_correction2: float
    epsilon: float

    @classmethod
    def of_step(cls, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Coefficients:
        beta1, beta2 = betas
        return cls(
            decay=float(1 - lr * weight_decay),
            beta1_complement=float(1 - beta1),
            beta2=float(beta2),
            beta2_complement=float(1 - beta2),
            step_size=lr / (1 - beta1**step),
            inverse_root_correction2=1 / math.sqrt(1 - beta2**step),
            epsilon=float(eps),
        )


def moments_and_update(
    gradient: Tensor, gradient_scale: Tensor | None, m: Tensor, v: Tensor, c: Coefficients
) -> tuple[Tensor, Tensor, Tensor]:
    """The new m and v, and the update to subtract from the decayed parameter, all fp32: one rounded operation at a time
    (torch's lerp, addcmul and addcdiv may fuse), as in `adamw_triton`.
    """
    gradient = gradient.to(torch.float32)
    if gradient_scale is not None:
        gradient = gradient * gradient_scale
    m = m + (gradient - m) * c.beta1_complement
    v = v * c.beta2 + (gradient * c.beta2_complement) * gradient
    # torch's fp32 square root is off in the last bit on some CPUs.
    denominator = v.to(torch.float64).sqrt().to(torch.float32) * c.inverse_root_correction2 + c.epsilon
    return m, v, (m * c.step_size) / denominator


def update_with_torch_(
    weight: Tensor, gradient: Tensor, state: State, gradient_scale: Tensor | None, coefficients: Coefficients, key: Key
) -> None:
    """One step of one contiguous tensor, in place, on any device; the reference for the Triton kernel.

    Moments are bf16 or fp32, or codes where `state` has scales. An fp32 `weight` is its own master; a bf16 one is
    rounded to nearest with a remainder in `state`, else stochastically with the bits of `key`.
    """
    weight, gradient = weight.view(-1), gradient.view(-1)
    state = {name: tensor.view(-1) for name, tensor in state.items()}
    moments = (("exp_avg", True), ("exp_avg_sq", False))
    for start in range(0, weight.numel(), CHUNK_ELEMENTS):
        stop = start + CHUNK_ELEMENTS
        chunk, blocks = slice(start, stop), slice(start // CODE_BLOCK, stop // CODE_BLOCK)
        m, v = (
            decode(state[name][chunk], state[f"{name}_scale"][blocks], signed)
            if f"{name}_scale" in state
            else state[name][chunk].to(torch.float32)
            for name, signed in moments
        )
        m, v, update = moments_and_update(gradient[chunk], gradient_scale, m, v, coefficients)
        part = weight[chunk]
        if "remainder" in state:
            master = join_master(part, state["remainder"][chunk]) * coefficients.decay - update
            part[:], state["remainder"][chunk] = split_master(master)
        elif part.dtype == torch.bfloat16:
            random = rounding_bits(key, start, part.numel(), part.device)
            part.copy_(round_stochastically(part.to(torch.float32) * coefficients.decay - update, random))
        else:
            part.copy_(part * coefficients.decay - update)
        for (name, signed), new in zip(moments, (m, v), strict=True):
            if f"{name}_scale" in state:
                state[name][chunk], state[f"{name}_scale"][blocks] = encode(new, signed)
            else:
                state[name][chunk] = new
