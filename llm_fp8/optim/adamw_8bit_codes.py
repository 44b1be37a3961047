"""The format of `EightBitAdamW`: six bytes per parameter, with 8-bit moments and stochastic rounding.

    tensor                    dtype    bytes   meaning
    the parameter             bf16     2       stochastically rounded, so unbiased
    exp_avg, exp_avg_sq       uint8    1 + 1   codes of m and v, in the parameter's shape
    exp_avg_scale, ..._sq_..  fp32     1 / 32  one scale per 256 elements each

A tensor has fp32 moments if it has fewer than 4,096 elements or its size is not a multiple of 256. fp32 parameters are
rounded to nearest. torchao's `AdamW8bit(bf16_stochastic_round=True)` (0.18) has the same format. For 14.8 billion
parameters on an H200 its step takes 448 ms with casts and clipping, ours 88 (`speed_table_14b_torchao_adamw.json`).

**Codes** are a dynamic map of 256 numbers (Dettmers et al., arXiv 2110.02861; `torchao/optim/quant_utils.py`). The map
covers seven decades from 1e-7 to 1. Each decade has twice as many codes as the decade below, equally spaced.

    signed      -0.993 ... -5.5e-7   0   5.5e-7 ... 0.993    1     1, 2, ..., 64 codes per decade and sign
    unsigned                         0   3.25e-7 ... 0.996   1     2, 4, ..., 128 codes per decade

The scale of a block of 256 elements is its amax, at least 1e-12. A number x gets the code nearest to x * (1 / scale).
Unlike in torchao, unsigned code 0 decodes to the largest number that it encodes, 1.6e-7 of the scale. v is quadratic in
the gradient: otherwise, 1/2,500 of a block's largest would have v = 0 and m > 0, and AdamW would divide by eps alone.

**Stochastic rounding** adds 16 random bits below the last bit of a bf16 number and truncates. Elements 2i and 2i + 1
use the lower and the upper half of x, computed modulo 2^32. x is a Weyl sequence, mixed by "lowbias32" from Chris
Wellons' hash-prospector (public domain) with a second key:

    x = i 0x9E3779B9 + key_1;   x ^= x >> 16;   x *= 0x7FEB352D;   x ^= (x >> 15) ^ key_2;   x *= 0x846CA68B;
    x ^= x >> 16

The keys are a hash of seed, step and the parameter's index. So no state is saved, and equal ranks stay equal.
"""

from __future__ import annotations

import functools
import hashlib
import struct

import torch
from torch import Tensor

CODE_BLOCK, SMALLEST_ENCODED = 256, 4096
SMALLEST_SCALE = 1e-12
NUM_DECADES = 7

Key = tuple[int, int]  # two signed 32-bit numbers
MIXER = (0x9E3779B9, 0x7FEB352D, 0x846CA68B)  # the step of the Weyl sequence and the two factors
LARGEST_BITS = 0x7FFF0000  # bits are clamped to it: the GPU's NaN, 0x7FFFFFFF, would carry into the sign


def code_values(signed: bool) -> Tensor:
    """Return the numbers that codes 0 to 255 represent, in ascending order: fp32 [256]."""
    decades = []
    for decade in range(NUM_DECADES):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1, device="cpu", dtype=torch.float32)
        decades.append(10.0 ** (decade + 1 - NUM_DECADES) * ((edges[:-1] + edges[1:]) / 2))
    positive, zero, one = torch.cat(decades), torch.zeros(1, device="cpu"), torch.ones(1, device="cpu")
    return torch.cat([-positive.flip(0), zero, positive, one] if signed else [zero, positive, one])


def code_limits(values: Tensor) -> Tensor:
    """Return, for each code, the smallest number that is encoded with it: fp32 [256], -inf for code 0.

    As in torchao, x gets the upper of two neighbouring codes if its distance from the lower one is at least half of
    their spacing, both rounded to fp32. The limit is at most 8 units in the last place away from the two codes' mean.
    """
    lower, upper = values[:-1], values[1:]
    steps = torch.arange(-8, 9, dtype=torch.int32, device="cpu")
    candidates = (((lower + upper) / 2).view(torch.int32)[:, None] + steps).view(torch.float32)  # neighbours in fp32
    goes_up = candidates - lower[:, None] >= ((upper - lower) * 0.5)[:, None]
    return torch.cat([torch.full((1,), -torch.inf, device="cpu"), torch.where(goes_up, candidates, torch.inf).amin(1)])


@functools.cache
def code_tables(device: torch.device) -> Tensor:
    """Return fp32 [4, 256] on `device`: values and limits of signed codes, values and limits of unsigned codes."""
    signed, unsigned = code_values(True), code_values(False)
    limits = code_limits(unsigned)
    unsigned[0] = limits[1]
    return torch.stack([signed, code_limits(signed), unsigned, limits]).to(device)


def decode(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Decode `codes`, uint8 [n], with their blocks' `scale`, fp32 [n / 256], to fp32 [n]."""
    values = code_tables(codes.device)[0 if signed else 2]
    return (values[codes.to(torch.int32)].view(-1, CODE_BLOCK) * scale[:, None]).view(-1)


def encode(numbers: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Encode fp32 [n] as codes, uint8 [n], and scales, fp32 [n / 256]. Inf or NaN makes a block's scale non-finite."""
    limits = code_tables(numbers.device)[1 if signed else 3]
    blocks = numbers.view(-1, CODE_BLOCK)
    scale = blocks.abs().amax(1).clamp(min=SMALLEST_SCALE)
    return torch.bucketize(blocks * (1 / scale)[:, None], limits[1:], right=True).to(torch.uint8).view(-1), scale


def rounding_key(seed: int, step: int, number: int) -> Key:
    """Return the key of a parameter's random bits: a hash of the seed, the step and the parameter's index."""
    return struct.unpack("<ii", hashlib.blake2b(f"{seed} {step} {number}".encode(), digest_size=8).digest())


def rounding_bits(key: Key, start: int, count: int, device: torch.device) -> Tensor:
    """Return pseudo-random numbers from 0 to 65535 for elements `start` (even) to `start + count`: int32 [count]."""
    pair_step, first_factor, second_factor = MIXER
    x = torch.arange(start // 2, (start + count + 1) // 2, device=device)  # int64; its products wrap around
    x = x * pair_step + key[0] & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * first_factor & 0xFFFFFFFF
    x = (x ^ (x >> 15) ^ (key[1] & 0xFFFFFFFF)) * second_factor & 0xFFFFFFFF
    x = x ^ (x >> 16)
    return torch.stack([x & 0xFFFF, x >> 16], dim=1).view(-1)[:count].to(torch.int32)


def round_stochastically(numbers: Tensor, random: Tensor) -> Tensor:
    """Add `random` (int32, 0 to 65535) to the lower bits of fp32 `numbers` and truncate to bf16. NaN stays NaN."""
    bits = numbers.view(torch.int32).clamp(max=LARGEST_BITS)
    return ((bits + random) >> 16).to(torch.int16).view(torch.bfloat16)
