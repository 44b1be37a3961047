"""The Triton kernel of `MasterAdamW` and `EightBitAdamW`: one launch per tensor, no temporaries.

The kernel performs the operations of `adamw.update_with_torch_` one by one and gives the same bits. Square root and
division are correctly rounded. `enable_fp_fusion=False` prevents fused multiply-adds, which round once instead of
twice. Coefficients are fp32 arguments and keys are not specialised, so a new step does not recompile the kernel.

With 8-bit state the kernel moves only 10 bytes per element, so the number of instructions matters (about 117 per
element). Each warp processes a block of 256 elements and reduces its amax. Encoding or decoding an element takes one
look-up in a table of 256 numbers in shared memory; the code is computed, not searched for, as follows.

Let x >= 0. The codes in a decade are equally spaced, so the position of x among them is a linear function of x. Each
decade's slope is 0.2 of the slope in the decade below, and the lines of neighbouring decades meet at their edge, so the
position is the minimum of seven lines. Its error is at most 0.25, at the edges and below the code of 1, plus rounding.
Therefore floor(position - 0.5) is the code or the code before it, and a comparison with the exact limit between the two
decides. Adding 1.5 * 2^23 rounds to an integer, in the sum's lower bits. A negative x has the complement of -x's code.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from llm_fp8.optim import adamw_8bit_codes as codes

State = Mapping[str, Tensor]
Floats = Mapping[str, float]
BLOCKS = 4  # blocks of 256 elements per program: 8 elements (16 bytes of bf16) for each of 128 threads
_CODE_BLOCK = tl.constexpr(codes.CODE_BLOCK)
_NUM_DECADES = tl.constexpr(codes.NUM_DECADES)
_SMALLEST_SCALE = tl.constexpr(codes.SMALLEST_SCALE)
_LARGEST_BITS = tl.constexpr(codes.LARGEST_BITS)
_PAIR_STEP, _FIRST_FACTOR, _SECOND_FACTOR = map(tl.constexpr, codes.MIXER)
_TO_INTEGER = tl.constexpr(1.5 * 2**23)


@triton.jit
def _per_element(per_block: tl.tensor) -> tl.tensor:
    """Repeat the number of each block for its elements: [BLOCKS] -> [BLOCKS * 256]."""
    BLOCKS: tl.constexpr = per_block.shape[0]
    return tl.reshape(tl.broadcast_to(per_block[:, None], (BLOCKS, _CODE_BLOCK)), (BLOCKS * _CODE_BLOCK,))


@triton.jit
def _decode(codes: tl.tensor, scale: tl.tensor, values: tl.tensor) -> tl.tensor:
    """Decode uint8 codes [BLOCKS * 256] with scales [BLOCKS] to fp32. `values` [256]: see `code_values`."""
    return tl.gather(values, codes.to(tl.int32), 0) * _per_element(scale)


@triton.jit
def _encode(numbers: tl.tensor, limits: tl.tensor, SIGNED: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Encode fp32 numbers (>= 0 unless SIGNED), by `code_limits`, as uint8 codes [BLOCKS * 256] and scales [BLOCKS]."""
    # As integers, the bits of magnitudes sort like the numbers, and NaN is largest; tl.max of floats would ignore NaN.
    magnitude = numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = tl.reshape(magnitude, (numbers.shape[0] // _CODE_BLOCK, _CODE_BLOCK))
    scale = tl.maximum(
        tl.max(magnitude, axis=1).to(tl.float32, bitcast=True), _SMALLEST_SCALE, propagate_nan=tl.PropagateNan.ALL
    )
    x = numbers * _per_element(tl.div_rn(1.0, scale))

    # The lowest decade has FINEST codes. At position p, `code` is the upper of the two possible codes:
    # 128 + floor(p - 0.5) if signed, else 1 + floor(p - 0.5). Lines are positive, so the minimum is taken of their
    # bits as integers, three in one instruction.
    FINEST: tl.constexpr = 1 if SIGNED else 2
    SHIFT: tl.constexpr = (128 if SIGNED else 1) - 0.5 - 0.5 - (FINEST - 1)
    distance = tl.abs(x) if SIGNED else x
    position = tl.full(x.shape, 0x7FFFFFFF, tl.int32)
    for decade in tl.static_range(_NUM_DECADES):
        line = tl.fma(
            distance, FINEST * 2**decade / 0.9 * 10.0 ** (_NUM_DECADES - 1 - decade), FINEST * 2**decade * 8 / 9 + SHIFT
        )
        position = tl.minimum(position, line.to(tl.int32, bitcast=True))
    code = (position.to(tl.float32, bitcast=True) + _TO_INTEGER).to(tl.int32, bitcast=True)
    if SIGNED:
        code = code ^ (x.to(tl.int32, bitcast=True) >> 31)
    code = code & 0xFF  # a valid index of the table for any x, even NaN
    return (code - (x < tl.gather(limits, code, 0)).to(tl.int32)).to(tl.uint8), scale


@triton.jit
def _random_bits(offsets: tl.tensor, first_key: tl.tensor, second_key: tl.tensor) -> tl.tensor:
    """Return an int32 from 0 to 65535 for each offset, as in `adamw_8bit_codes.rounding_bits`."""
    x = (offsets >> 1).to(tl.uint32) * _PAIR_STEP + first_key.to(tl.uint32)
    x = (x ^ (x >> 16)) * _FIRST_FACTOR
    x = (x ^ (x >> 15) ^ second_key.to(tl.uint32)) * _SECOND_FACTOR
    x = x ^ (x >> 16)
    return tl.where((offsets & 1) == 1, x >> 16, x & 0xFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["first_key", "second_key"])
def _update_kernel(
    weight_pointer: tl.tensor,
    remainder_pointer: tl.tensor,
    gradient_pointer: tl.tensor,
    exp_avg_pointer: tl.tensor,
    exp_avg_scale_pointer: tl.tensor,
    exp_avg_sq_pointer: tl.tensor,
    exp_avg_sq_scale_pointer: tl.tensor,
    gradient_scale_pointer: tl.tensor,
    tables_pointer: tl.tensor,
    num_elements: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    decay: float,
    beta1_complement: float,
    beta2: float,
    beta2_complement: float,
    step_size: float,
    inverse_root_correction2: float,
    epsilon: float,
    BLOCKS: tl.constexpr,
) -> None:
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    offsets = tl.program_id(0).to(tl.int64) * BLOCKS * _CODE_BLOCK + tl.arange(0, BLOCKS * _CODE_BLOCK)
    inside = offsets < num_elements
    blocks_inside = blocks * _CODE_BLOCK < num_elements

    # All loads come first, since a look-up synchronises the program and would delay loads after it.
    exp_avg = tl.load(exp_avg_pointer + offsets, mask=inside, other=0)
    exp_avg_sq = tl.load(exp_avg_sq_pointer + offsets, mask=inside, other=0)
    gradient = tl.load(gradient_pointer + offsets, mask=inside, other=0.0)
    weight = tl.load(weight_pointer + offsets, mask=inside, other=0.0)
    if exp_avg_scale_pointer is not None:
        exp_avg_scale = tl.load(exp_avg_scale_pointer + blocks, mask=blocks_inside, other=0.0)
        exp_avg_sq_scale = tl.load(exp_avg_sq_scale_pointer + blocks, mask=blocks_inside, other=0.0)
        table = tables_pointer + tl.arange(0, 256)  # four rows: see `code_tables`
        values, limits = tl.load(table), tl.load(table + 256)
        values_sq, limits_sq = tl.load(table + 512), tl.load(table + 768)
        exp_avg = _decode(exp_avg, exp_avg_scale, values)
        exp_avg_sq = _decode(exp_avg_sq, exp_avg_sq_scale, values_sq)

    # `moments_and_update`
    gradient = gradient.to(tl.float32)
    if gradient_scale_pointer is not None:
        gradient = gradient * tl.load(gradient_scale_pointer)
    exp_avg = exp_avg.to(tl.float32)
    exp_avg = exp_avg + (gradient - exp_avg) * beta1_complement
    exp_avg_sq = exp_avg_sq * beta2 + (gradient * beta2_complement) * gradient
    denominator = tl.sqrt_rn(exp_avg_sq) * inverse_root_correction2 + epsilon
    update = tl.div_rn(exp_avg * step_size, denominator)

    # Right shifts of signed integers keep the sign.
    if remainder_pointer is not None:  # `join_master` and `split_master`
        remainder = tl.load(remainder_pointer + offsets, mask=inside, other=0).to(tl.int32)
        upper = weight.to(tl.int16, bitcast=True).to(tl.int32) + (remainder >> 15)
        master = ((upper << 16) | (remainder & 0xFFFF)).to(tl.float32, bitcast=True)
        bits = (master * decay - update).to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)
        tl.store(remainder_pointer + offsets, bits.to(tl.int16), mask=inside)
        rounded = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        tl.store(weight_pointer + offsets, rounded, mask=inside)
    elif weight_pointer.dtype.element_ty == tl.bfloat16:  # `round_stochastically`
        bits = tl.minimum((weight.to(tl.float32) * decay - update).to(tl.int32, bitcast=True), _LARGEST_BITS)
        bits = bits + _random_bits(offsets, first_key, second_key)
        tl.store(weight_pointer + offsets, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(weight_pointer + offsets, weight * decay - update, mask=inside)

    if exp_avg_scale_pointer is not None:
        exp_avg, exp_avg_scale = _encode(exp_avg, limits, SIGNED=True)
        exp_avg_sq, exp_avg_sq_scale = _encode(exp_avg_sq, limits_sq, SIGNED=False)
        tl.store(exp_avg_scale_pointer + blocks, exp_avg_scale, mask=blocks_inside)
        tl.store(exp_avg_sq_scale_pointer + blocks, exp_avg_sq_scale, mask=blocks_inside)
    tl.store(exp_avg_pointer + offsets, exp_avg.to(exp_avg_pointer.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq_pointer + offsets, exp_avg_sq, mask=inside)


def update_(
    weight: Tensor, gradient: Tensor, state: State, gradient_scale: Tensor | None, coefficients: Floats, key: codes.Key
) -> None:
    """Update one tensor in place, as documented in `llm_fp8.optim.adamw.update_with_torch_`."""
    num_elements = weight.numel()
    with torch.cuda.device_of(weight):
        _update_kernel[(triton.cdiv(num_elements, BLOCKS * codes.CODE_BLOCK),)](
            weight,
            state.get("remainder"),
            gradient,
            state["exp_avg"],
            state.get("exp_avg_scale"),
            state["exp_avg_sq"],
            state.get("exp_avg_sq_scale"),
            gradient_scale,
            codes.code_tables(weight.device) if "exp_avg_scale" in state else None,
            num_elements,
            *key,
            **coefficients,
            BLOCKS=BLOCKS,
            num_warps=4,
            enable_fp_fusion=False,
        )
