"""AdamW with 8-bit moments for bf16 parameters that are rounded stochastically: six bytes per parameter.

    state of a parameter      dtype    bytes   what
    (the parameter)           bf16     2       stochastically rounded: right on average
    exp_avg, exp_avg_sq       uint8    1 + 1   codes of m and v (`llm_fp8.optim.adamw_8bit_codes`), of its shape
    exp_avg_scale, ..._sq_..  fp32     1 / 32  one scale per 256 elements each

Tensors of fewer than 4,096 elements, or of a number that 256 does not divide, keep fp32 moments. fp32 parameters are
rounded to nearest. Moments are decoded, updated, used as they are and encoded again.

Why not torchao 0.18's AdamW8bit(bf16_stochastic_round=True), whose format and arithmetic these are up to fp32 rounding:
for 14.8 billion parameters on an H200 our step takes 88 ms, torchao's compiled one 199, and its casts and the clipping
pass 249 ms more of a step of 5,928 ms (`speed_table_14b_torchao_adamw.json`, `speed_table_h200.json`). Besides, no
compilation per shape, bit-for-bit resumption, and the same rounding on all ranks.

Stochastic rounding adds 16 random bits below a bf16 number's last bit and truncates. The bits are a function of the
place: those of elements 2i and 2i + 1 are the halves of

    x = i 0x9E3779B9 + key_1;   x ^= x >> 16;   x *= 0x7FEB352D;   x ^= (x >> 15) ^ key_2;   x *= 0x846CA68B;
    x ^= x >> 16

modulo 2^32: a Weyl sequence through the mixer "lowbias32" of Chris Wellons' hash-prospector (public domain), with a
second key in its middle. The keys are a hash of the run's seed, the step and the parameter's number, so there is no
generator state to save, and ranks that hold the same parameters stay identical.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from llm_fp8.optim.adamw_8bit_codes import CODE_BLOCK, LARGEST_BITS, MIXER, decode, encode
from llm_fp8.optim.adamw_base import CHUNK_ELEMENTS, Coefficients, GroupedAdamW, Key, State, moments_and_update

SMALLEST_ENCODED = 4096
"""Tensors of fewer elements keep fp32 moments."""


def rounding_key(seed: int, step: int, number: int) -> Key:
    """The key of a step's random bits for the parameter of this number."""
    digest = hashlib.blake2b(f"{seed} {step} {number}".encode(), digest_size=8).digest()
    first, second = struct.unpack("<ii", digest)
    return first, second


def rounding_bits(key: Key, start: int, count: int, device: torch.device) -> Tensor:
    """Random numbers from 0 to 65535 for the elements from `start`, even, on: int32 [count]."""
    pair_step, first_factor, second_factor = MIXER
    x = torch.arange(start // 2, (start + count + 1) // 2, device=device)
    x = _times(x & 0xFFFFFFFF, pair_step) + key[0] & 0xFFFFFFFF
    x = _times(x ^ (x >> 16), first_factor)
    x = _times(x ^ (x >> 15) ^ (key[1] & 0xFFFFFFFF), second_factor)
    x = x ^ (x >> 16)
    return torch.stack([x & 0xFFFF, x >> 16], dim=1).view(-1)[:count].to(torch.int32)


def _times(x: Tensor, factor: int) -> Tensor:
    """The lower 32 bits of the product of 32-bit numbers, in int64."""
    return (x & 0xFFFF) * factor + ((x >> 16) * factor << 16 & 0xFFFFFFFF) & 0xFFFFFFFF


def round_stochastically(numbers: Tensor, random: Tensor) -> Tensor:
    """fp32 `numbers` in bf16: away from zero where `random`, int32 from 0 to 65535, carries. NaN stays NaN."""
    bits = numbers.view(torch.int32).clamp(max=LARGEST_BITS)
    return ((bits + random) >> 16).to(torch.int16).view(torch.bfloat16)


def update_with_torch_(
    weight: Tensor, gradient: Tensor, state: State, gradient_scale: Tensor | None, coefficients: Coefficients, key: Key
) -> None:
    """One step of one tensor, in place, on any device; the reference for the Triton kernel.

    As `llm_fp8.optim.adamw_master.update_with_torch_`, but a bf16 `weight` is rounded stochastically by `rounding_key`,
    and exp_avg and exp_avg_sq in `state` are uint8 codes with scales, or fp32 without.
    """
    moments = [
        (state[name].view(-1), state.get(f"{name}_scale"), signed)
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False))
    ]
    for start in range(0, weight.numel(), CHUNK_ELEMENTS):
        stop = start + CHUNK_ELEMENTS
        chunk, blocks = slice(start, stop), slice(start // CODE_BLOCK, stop // CODE_BLOCK)
        m, v = (
            moment[chunk] if scale is None else decode(moment[chunk], scale[blocks], signed)
            for moment, scale, signed in moments
        )
        m, v, update = moments_and_update(gradient.view(-1)[chunk], gradient_scale, m, v, coefficients)
        part = weight.view(-1)[chunk]
        new_weight = part.to(torch.float32) * coefficients.decay - update
        if part.dtype == torch.bfloat16:
            new_weight = round_stochastically(new_weight, rounding_bits(key, start, part.numel(), part.device))
        part.copy_(new_weight)
        for (moment, scale, signed), new in zip(moments, (m, v), strict=True):
            if scale is None:
                moment[chunk] = new
            else:
                moment[chunk], scale[blocks] = encode(new, signed)


class EightBitAdamW(GroupedAdamW):
    """AdamW with 8-bit moments and stochastic rounding. A DTensor raises ValueError: blocks would straddle shards.

    `seed`: of the random bits, the same on all ranks; other arguments as of `GroupedAdamW`.
    """

    def __init__(
        self, params: Iterable[Parameter] | Iterable[dict[str, Any]], seed: int = 0, **adamw_arguments: Any
    ) -> None:
        super().__init__(params, **adamw_arguments)
        self.seed = seed

    def _new_state(self, parameter: Parameter) -> dict[str, Tensor]:
        if isinstance(parameter, DTensor):
            raise ValueError(f"EightBitAdamW takes unsharded parameters, and one of shape {[*parameter.shape]} is not.")
        count = parameter.numel()
        encoded = count >= SMALLEST_ENCODED and count % CODE_BLOCK == 0
        state = {}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8 if encoded else torch.float32)
            if encoded:
                state[f"{name}_scale"] = torch.zeros(count // CODE_BLOCK, dtype=torch.float32, device=parameter.device)
        return state

    def _update_(self, weight: Tensor, *arguments: Any, place: tuple[int, int]) -> None:
        update_: Callable[..., None] = update_with_torch_
        if weight.is_cuda:
            from llm_fp8.optim.adamw_triton import update_8bit_ as update_
        update_(weight, *arguments, rounding_key(self.seed, *place))
