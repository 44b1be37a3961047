"""The format of `MasterAdamW`: bf16 parameters, and two more bytes for an exact fp32 master weight.

    tensor                 dtype    bytes   meaning
    the parameter          bf16     2       the master weight rounded to nearest, used in forward and backward pass
    remainder              int16    2       the master weight's lower 16 bits
    exp_avg                bf16     2       m, the running mean of gradients
    exp_avg_sq             fp32     4       v, the running mean of squared gradients

fp32 parameters need no master weight and have no remainder. `optimizers` explains why m may be bf16, but not v.
bf16 is the upper half of fp32, so an fp32 number with the bits b is split into two 16-bit halves without loss:

    weight    = (b + 0x8000) >> 16      the upper half, rounded to nearest; a tie goes away from zero
    remainder =  b & 0xFFFF             the lower half as it is, stored as int16

    b = ((weight - (1 if remainder < 0 else 0)) << 16) | (remainder & 0xFFFF)

because the addition carries into the upper half if and only if the remainder is negative as int16. The GPU's NaN,
0x7FFFFFFF, would carry into the sign and give a weight of -0, so every NaN is split as 0x7FC00000, whose weight is NaN.

**The lower bits of a bf16 checkpoint are drawn at random.** If master weights started as bf16 numbers, updates below
half a unit in the last place would not change the rounded weights: those of SmolLM2-135M show only 33% of an update of
1e-4 (RMS) and 3.6% of one of 1e-5. If a master weight starts at a random point between its two rounding boundaries, the
rounded weights show the full update on average, and the first step still uses the checkpoint's weights. FSDP2's fp32
parameters are drawn too, since FSDP2 gathers them in bf16 or fp8 (--fp8_params). Other fp32 parameters stay as loaded,
because casts to fp8 and operations other than GEMMs read them in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from llm_fp8.utils.torch_internals import local_of

FIRST_MOMENT_DTYPE, SECOND_MOMENT_DTYPE = torch.bfloat16, torch.float32
PART_ELEMENTS = 2**26  # drawn at a time, so that temporaries take a GiB


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 master weight of a bf16 `weight` and an int16 `remainder`, on the weight's device."""
    lower = remainder.to(weight.device).to(torch.int32)
    upper = weight.view(torch.int16).to(torch.int32) + (lower >> 15)  # minus one if the remainder is negative
    return ((upper << 16) | (lower & 0xFFFF)).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split an fp32 `master` into a bf16 weight and its int16 remainder."""
    bits = master.view(torch.int32)
    bits = torch.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)  # every NaN, see the module's docstring
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def give_remainder_(parameter: Tensor) -> None:
    """Attach a zero remainder to a bf16 parameter, to receive the lower bits of fp32 weights that are loaded later."""
    parameter.master_remainder = torch.zeros_like(parameter, dtype=torch.int16)  # type: ignore[attr-defined]


def remainder_of(parameter: Tensor) -> Tensor | None:
    """Return the remainder that `give_remainder_` attached, or None."""
    return getattr(parameter, "master_remainder", None)


def draw_remainder(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Draw the lower bits (int16) of master weights that round to the bf16 `weight`. A weight of 0 gets 0."""
    drawn = torch.randint(-32767, 32768, weight.shape, dtype=torch.int16, device=weight.device, generator=generator)
    return drawn.masked_fill_(weight == 0, 0)


@torch.no_grad()
def draw_lower_bits_(parameters: Iterable[Tensor], seed: int) -> None:
    """Draw the lower bits of fp32 parameters (or this rank's shards) in place, for elements whose lower bits are 0."""
    for number, parameter in enumerate(parameters):
        local = local_of(parameter)
        generator = torch.Generator(local.device).manual_seed(seed + number)
        for part in torch.atleast_1d(local).chunk(1 + local.numel() // PART_ELEMENTS):
            weight = part.to(torch.bfloat16)
            drawn = join_master(weight, draw_remainder(weight, generator))
            part.copy_(torch.where(weight.float() == part, drawn, part))
