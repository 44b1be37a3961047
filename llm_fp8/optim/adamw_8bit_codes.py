"""The format of `EightBitAdamW`: six bytes per parameter, with 8-bit moments and stochastic rounding.

    state of a parameter      dtype    bytes   what
    (the parameter)           bf16     2       stochastically rounded: right on average
    exp_avg, exp_avg_sq       uint8    1 + 1   codes of m and v, of its shape
    exp_avg_scale, ..._sq_..  fp32     1 / 32  one scale per 256 elements each

Tensors of fewer than 4,096 elements, or of a number that 256 does not divide, keep fp32 moments. fp32 parameters are
rounded to nearest.

**Codes**, a dynamic map of 256 numbers with one scale per block of 256 elements, are those of Dettmers et al., arXiv
2110.02861, as torchao 0.18 has them (`torchao/optim/quant_utils.py`). Seven decades, 1e-7 to 1e-6 up to 0.1 to 1, each
have twice the codes of the one below, equally spaced:

    signed      -0.993 ... -5.5e-7   0   5.5e-7 ... 0.993    1     1, 2, ..., 64 codes in a decade, of either sign
    unsigned                         0   3.25e-7 ... 0.996   1     2, 4, ..., 128 codes in a decade

Unlike torchao, an unsigned code 0 is decoded as the largest number that gets it, 1.6e-7 of the scale: v is a square, so
a gradient 1/2,500 of its block's largest would have v = 0 and m > 0, and AdamW would divide by eps alone. The scale is
the block's amax, at least 1e-12. A number x times 1 / scale gets the nearest code.

**Stochastic rounding** adds 16 random bits below a bf16 number's last bit and truncates. Those of elements 2i and
2i + 1 are the halves of x, modulo 2^32 a Weyl sequence through the mixer "lowbias32" of Chris Wellons' hash-prospector
(public domain), with a second key in its middle:

    x = i 0x9E3779B9 + key_1;   x ^= x >> 16;   x *= 0x7FEB352D;   x ^= (x >> 15) ^ key_2;   x *= 0x846CA68B;
    x ^= x >> 16

The keys are a hash of the run's seed, the step and the parameter's number: there is no generator state to save, and
ranks that hold the same parameters stay identical.
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

Key = tuple[int, int]  # of random bits: 32 bits each, signed
MIXER = (0x9E3779B9, 0x7FEB352D, 0x846CA68B)  # step of the Weyl sequence, and the two factors
LARGEST_BITS = 0x7FFF0000  # before rounding: the GPU's NaN, 0x7FFFFFFF, would carry into the sign


def code_values(signed: bool) -> Tensor:
    """The numbers that codes 0 to 255 stand for, ascending: fp32 [256]."""
    decades = []
    for decade in range(NUM_DECADES):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1, device="cpu", dtype=torch.float32)
        decades.append(10.0 ** (decade + 1 - NUM_DECADES) * ((edges[:-1] + edges[1:]) / 2))
    positive, zero, one = torch.cat(decades), torch.zeros(1, device="cpu"), torch.ones(1, device="cpu")
    return torch.cat([-positive.flip(0), zero, positive, one] if signed else [zero, positive, one])


def code_limits(values: Tensor) -> Tensor:
    """The least number that gets each code: fp32 [256], -inf for code 0.

    As in torchao x goes up from its lower neighbour q where x - q is at least half of the spacing, both in fp32: within
    8 units in the last place of the middle of two values.
    """
    lower, upper = values[:-1], values[1:]
    steps = torch.arange(-8, 9, dtype=torch.int32, device="cpu")
    candidates = (((lower + upper) / 2).view(torch.int32)[:, None] + steps).view(torch.float32)  # neighbours in fp32
    goes_up = candidates - lower[:, None] >= ((upper - lower) * 0.5)[:, None]
    return torch.cat([torch.full((1,), -torch.inf, device="cpu"), torch.where(goes_up, candidates, torch.inf).amin(1)])


@functools.cache
def code_tables(device: torch.device) -> Tensor:
    """Values and limits of the signed codes, values and limits of the unsigned ones: fp32 [4, 256] on `device`."""
    signed, unsigned = code_values(True), code_values(False)
    limits = code_limits(unsigned)
    unsigned[0] = limits[1]
    return torch.stack([signed, code_limits(signed), unsigned, limits]).to(device)


def decode(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Numbers of `codes`, uint8 [n], and their blocks' `scale`, fp32 [n / 256]: fp32 [n]."""
    values = code_tables(codes.device)[0 if signed else 2]
    return (values[codes.to(torch.int32)].view(-1, CODE_BLOCK) * scale[:, None]).view(-1)


def encode(numbers: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [n], and scales, fp32 [n / 256], of `numbers`, fp32 [n]; a non-finite number makes its block so."""
    limits = code_tables(numbers.device)[1 if signed else 3]
    blocks = numbers.view(-1, CODE_BLOCK)
    scale = blocks.abs().amax(1).clamp(min=SMALLEST_SCALE)
    codes = torch.bucketize(blocks * (1 / scale)[:, None], limits[1:], right=True)
    return codes.to(torch.uint8).view(-1), scale


def rounding_key(seed: int, step: int, number: int) -> Key:
    """The key of a step's random bits for the parameter of this number."""
    digest = hashlib.blake2b(f"{seed} {step} {number}".encode(), digest_size=8).digest()
    return struct.unpack("<ii", digest)


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
