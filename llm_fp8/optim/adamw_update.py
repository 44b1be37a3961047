"""One AdamW step of one tensor in torch, in every storage format; `adamw_triton` computes the same on a GPU.

Step t is computed in fp32, in the order of torch.optim.AdamW (Loshchilov and Hutter, arXiv 1711.05101), with g the
gradient times `gradient_scale`:

    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g^2
    x = (1 - lr weight_decay) x - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The last line uses the new moments before they are rounded for storage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from llm_fp8.optim.adamw_8bit_codes import CODE_BLOCK, Key, decode, encode, round_stochastically, rounding_bits
from llm_fp8.optim.adamw_master import join_master, split_master

CHUNK_ELEMENTS = 2**18  # updated at a time, for fp32 temporaries of a few MiB; a multiple of CODE_BLOCK
State = Mapping[str, Tensor]  # name of a state tensor -> the tensor, for one parameter


class Coefficients(NamedTuple):
    """The coefficients of one step of one parameter group, in fp64; they are rounded to fp32 where they are used."""

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
    gradient: Tensor, gradient_scale: Tensor | None, m: Tensor, v: Tensor, coefficients: Coefficients
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new m and v, and the update to subtract from the decayed parameter, all fp32. Every operation is
    rounded on its own, as in `adamw_triton`; torch's lerp, addcmul and addcdiv may fuse.
    """
    gradient = gradient.to(torch.float32)
    if gradient_scale is not None:
        gradient = gradient * gradient_scale
    m = m + (gradient - m) * coefficients.beta1_complement
    v = v * coefficients.beta2 + (gradient * coefficients.beta2_complement) * gradient
    root = v.to(torch.float64).sqrt().to(torch.float32)  # torch's fp32 square root is off in the last bit on some CPUs
    denominator = root * coefficients.inverse_root_correction2 + coefficients.epsilon
    return m, v, (m * coefficients.step_size) / denominator


def _load_moment(state: State, name: str, chunk: slice, signed: bool) -> Tensor:
    scales = state.get(f"{name}_scale")
    if scales is None:
        return state[name][chunk].to(torch.float32)
    return decode(state[name][chunk], scales[_blocks_of(chunk)], signed)


def _store_moment(state: State, name: str, chunk: slice, signed: bool, moment: Tensor) -> None:
    scales = state.get(f"{name}_scale")
    if scales is None:
        state[name][chunk] = moment
    else:
        state[name][chunk], scales[_blocks_of(chunk)] = encode(moment, signed)


def _blocks_of(chunk: slice) -> slice:
    return slice(chunk.start // CODE_BLOCK, chunk.stop // CODE_BLOCK)


def update_with_torch_(
    weight: Tensor, gradient: Tensor, state: State, gradient_scale: Tensor | None, coefficients: Coefficients, key: Key
) -> None:
    """Take one step of one contiguous tensor in place, on any device; the reference for the Triton kernel.

    Moments are bf16 or fp32, or codes where `state` has scales. An fp32 `weight` is its own master. A bf16 `weight` is
    rounded to nearest where `state` has a remainder, else stochastically with the random bits of `key`.
    """
    weight, gradient = weight.view(-1), gradient.view(-1)
    state = {name: tensor.view(-1) for name, tensor in state.items()}
    for start in range(0, weight.numel(), CHUNK_ELEMENTS):
        chunk = slice(start, start + CHUNK_ELEMENTS)
        m = _load_moment(state, "exp_avg", chunk, signed=True)
        v = _load_moment(state, "exp_avg_sq", chunk, signed=False)
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
        _store_moment(state, "exp_avg", chunk, signed=True, moment=m)
        _store_moment(state, "exp_avg_sq", chunk, signed=False, moment=v)
