"""The 8-bit codes of AdamW's moments: a dynamic map of 256 numbers, one scale per block of 256 elements.

The format is that of Dettmers et al., arXiv 2110.02861, as torchao 0.18 has it (`torchao/optim/quant_utils.py`; its map
is bitsandbytes'): the same numbers get torchao's codes, bit for bit. Seven decades, 1e-7 to 1e-6 up to 0.1 to 1, each
have twice the codes of the one below, equally spaced:

    signed      -0.993 ... -5.5e-7   0   5.5e-7 ... 0.993    1     1, 2, ..., 64 codes in a decade, of either sign
    unsigned                         0   3.25e-7 ... 0.996   1     2, 4, ..., 128 codes in a decade

Unlike torchao, an unsigned code 0 is decoded as the largest number that gets it, 1.6e-7 of the scale: v is a square, so
a gradient 1/2,500 of its block's largest would have v = 0 and m > 0, and AdamW would divide by eps alone. Rows of an
embedding that are seen seldom beside frequent ones moved by thousands of learning rates.

The scale of a block is its amax, at least 1e-12. A number x times 1 / scale gets the nearest code; torchao divides by
the scale, which can differ by a unit in the last place.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

CODE_BLOCK = 256
"""Elements that share a scale."""
SMALLEST_SCALE = 1e-12
NUM_DECADES = 7

MIXER = (0x9E3779B9, 0x7FEB352D, 0x846CA68B)
"""Step of the Weyl sequence and the two factors of the random bits (`llm_fp8.optim.adamw_8bit`)."""
LARGEST_BITS = 0x7FFF0000
"""Clamp of an fp32 number's bits before rounding: the GPU's NaN, 0x7FFFFFFF, would carry into the sign."""


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

    torchao takes the lower neighbour q of x and goes up where x - q is at least half of the spacing, both rounded to
    fp32. The least such x is at most 8 units in the last place from the middle of two values.
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
    """Codes, uint8 [n], and scales, fp32 [n / 256], of `numbers`, fp32 [n].

    A block with a non-finite number gets a non-finite scale, and decodes to non-finite numbers.
    """
    limits = code_tables(numbers.device)[1 if signed else 3]
    blocks = numbers.view(-1, CODE_BLOCK)
    scale = blocks.abs().amax(1).clamp(min=SMALLEST_SCALE)
    codes = torch.bucketize(blocks * (1 / scale)[:, None], limits[1:], right=True)
    return codes.to(torch.uint8).view(-1), scale
