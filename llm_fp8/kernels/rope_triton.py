"""A Triton kernel that splits the fused QKV projection and applies RoPE.

    split_rope(fused [..., (H + 2 Hkv) d], angles, H, Hkv, cu_seqlens)   ->   q [..., H, d], k and v [..., Hkv, d]

Let (x, y) be columns i and rotary_dim / 2 + i of q or k (the rotate-half layout). The kernel computes (x cos - y sin,
y cos + x sin) in fp32 and rounds once to the dtype of `fused`. In the backward pass the same kernel rotates the
gradients, which may have any strides, by the negative angle. Each program processes BLOCK_ELEMENTS / (rotary_dim / 2)
tokens and HEADS_PER_PROGRAM heads. It computes a token's position by bisection of `cu_seqlens`, so a new number of
documents needs no host synchronisation and no recompilation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ELEMENTS = 1024  # elements per program of half a head: 8 (16 bytes of bf16) for each of 128 threads
HEADS_PER_PROGRAM = 8  # with more heads, a short batch would have too few programs to fill the GPU


@triton.jit
def _copy(
    fused: tl.tensor,
    part: tl.tensor,
    part_stride: tl.tensor,
    inside: tl.tensor,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
) -> None:
    """For each token for which `inside` is True, copy COLUMNS columns from `fused` to `part` or, if BACKWARD, from
    `part` to `fused`. Both are pointers [tokens, 1] to the first column of each token. `part_stride` is the stride of
    the columns in `part`. BLOCK is a power of two, at least COLUMNS.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    mask = inside & (columns < COLUMNS)
    if BACKWARD:
        tl.store(fused + columns, tl.load(part + columns * part_stride, mask=mask), mask=mask)
    else:
        tl.store(part + columns * part_stride, tl.load(fused + columns, mask=mask), mask=mask)


@triton.jit
def _rotate(
    fused: tl.tensor,
    part: tl.tensor,
    part_stride: tl.tensor,
    inside: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BACKWARD: tl.constexpr,
) -> None:
    """Rotate one head of each token from `fused` to `part` or, if BACKWARD, by the negative angle from `part` to
    `fused`. `cosine` and `sine` are fp32 [tokens, BLOCK_HALF]. For the other arguments see `_copy`.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    columns = tl.arange(0, BLOCK_HALF)[None, :]
    mask = inside & (columns < HALF)
    fused_first, fused_second = fused + columns, fused + (columns + HALF)
    part_first, part_second = part + columns * part_stride, part + (columns + HALF) * part_stride
    dtype = fused.dtype.element_ty
    if BACKWARD:
        first = tl.load(part_first, mask=mask).to(tl.float32)
        second = tl.load(part_second, mask=mask).to(tl.float32)
        tl.store(fused_first, (first * cosine + second * sine).to(dtype), mask=mask)
        tl.store(fused_second, (second * cosine - first * sine).to(dtype), mask=mask)
    else:
        first = tl.load(fused_first, mask=mask).to(tl.float32)
        second = tl.load(fused_second, mask=mask).to(tl.float32)
        tl.store(part_first, (first * cosine - second * sine).to(dtype), mask=mask)
        tl.store(part_second, (second * cosine + first * sine).to(dtype), mask=mask)
    if ROTARY_DIM < HEAD_DIM:
        rest, part_rest = fused + ROTARY_DIM, part + ROTARY_DIM * part_stride
        _copy(rest, part_rest, part_stride, inside, HEAD_DIM - ROTARY_DIM, BLOCK_REST, BACKWARD)


@triton.jit
def _positions_in_documents(
    tokens: tl.tensor, cu_seqlens_pointer: tl.tensor, num_documents: tl.tensor, num_bisections: tl.tensor
) -> tl.tensor:
    """Return each token's position in its document. Bisection keeps cu_seqlens[low] <= token < cu_seqlens[high]."""
    low = tl.zeros_like(tokens)
    high = low + num_documents
    for _ in range(num_bisections):
        middle = (low + high) // 2
        starts_before = tl.load(cu_seqlens_pointer + middle) <= tokens
        low = tl.where(starts_before, middle, low)
        high = tl.where(starts_before, high, middle)
    return tokens - tl.load(cu_seqlens_pointer + low)


@triton.jit(do_not_specialize=["num_documents", "num_bisections"])
def _split_rope_kernel(
    fused_pointer: tl.tensor,
    q_pointer: tl.tensor,
    k_pointer: tl.tensor,
    v_pointer: tl.tensor,
    angles_pointer: tl.tensor,
    cu_seqlens_pointer: tl.tensor,
    num_tokens: tl.tensor,
    row_length: tl.tensor,
    num_positions: tl.tensor,
    num_documents: tl.tensor,
    num_bisections: tl.tensor,
    q_row_stride: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    q_column_stride: tl.tensor,
    k_row_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    k_column_stride: tl.tensor,
    v_row_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    v_column_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    ROTATED_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_HEAD: tl.constexpr,
    BACKWARD: tl.constexpr,
) -> None:
    # Programs for the same tokens have consecutive ids, so their angles are in the cache.
    program = tl.program_id(0)
    group = program % GROUPS
    tokens = (program // GROUPS) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token_inside = tokens < num_tokens
    inside = token_inside[:, None]
    rows = (tokens // row_length).to(tl.int64)[:, None]
    places = tokens % row_length
    in_row = places.to(tl.int64)[:, None]
    fused = fused_pointer + tokens.to(tl.int64)[:, None] * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)

    if group >= ROTATED_GROUPS:
        fused_v = fused + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
        v = v_pointer + rows * v_row_stride + in_row * v_token_stride
        start = ((group - ROTATED_GROUPS) * GROUP).to(tl.int64)
        for head in range(start, tl.minimum(start + GROUP, NUM_KV_HEADS)):
            fused_head, v_head = fused_v + head * HEAD_DIM, v + head * v_head_stride
            _copy(fused_head, v_head, v_column_stride, inside, HEAD_DIM, BLOCK_HEAD, BACKWARD)
    else:
        if cu_seqlens_pointer is None:
            positions = places
        else:
            positions = _positions_in_documents(tokens, cu_seqlens_pointer, num_documents, num_bisections)
        columns = tl.arange(0, BLOCK_HALF)[None, :]
        # A row of the table has the angles twice, once for each half. A position beyond the table gives NaN.
        known = (token_inside & (positions < num_positions))[:, None] & (columns < ROTARY_DIM // 2)
        places_in_table = positions.to(tl.int64)[:, None] * ROTARY_DIM + columns
        angles = tl.load(angles_pointer + places_in_table, mask=known, other=float("nan"))
        cosine, sine = tl.cos(angles), tl.sin(angles)
        q = q_pointer + rows * q_row_stride + in_row * q_token_stride
        k = k_pointer + rows * k_row_stride + in_row * k_token_stride
        start = (group * GROUP).to(tl.int64)
        for head in range(start, tl.minimum(start + GROUP, NUM_HEADS + NUM_KV_HEADS)):
            if head < NUM_HEADS:
                _rotate(
                    fused + head * HEAD_DIM, q + head * q_head_stride, q_column_stride, inside, cosine, sine,
                    HEAD_DIM, ROTARY_DIM, BLOCK_HALF, BLOCK_REST, BACKWARD
                )  # fmt: skip
            else:
                _rotate(
                    fused + head * HEAD_DIM, k + (head - NUM_HEADS) * k_head_stride, k_column_stride, inside, cosine,
                    sine, HEAD_DIM, ROTARY_DIM, BLOCK_HALF, BLOCK_REST, BACKWARD
                )  # fmt: skip


def _launch(
    fused: Tensor, parts: tuple[Tensor, ...], angles: Tensor, cu_seqlens: Tensor | None, backward: bool
) -> None:
    """Launch the kernel that splits contiguous `fused` [..., W] into `parts` (q, k and v [..., heads, d], any strides)
    and rotates q and k. If `backward`, the kernel rotates `parts` back and joins them into `fused` instead.
    """
    q, k, _ = parts
    (num_heads, head_dim), num_kv_heads, rotary_dim = q.shape[-2:], k.shape[-2], angles.shape[-1]
    num_tokens = fused[..., 0].numel()
    num_documents = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    block_half = triton.next_power_of_2(rotary_dim // 2)
    block_tokens = max(1, BLOCK_ELEMENTS // block_half)
    rotated_groups = triton.cdiv(num_heads + num_kv_heads, HEADS_PER_PROGRAM)
    groups = rotated_groups + triton.cdiv(num_kv_heads, HEADS_PER_PROGRAM)
    # A packed tensor [tokens, heads, d] is one row, so its row stride is 0.
    strides = [stride for part in parts for stride in (0, *part.stride())[-4:]]
    if num_tokens == 0:
        return
    with torch.cuda.device_of(fused):
        _split_rope_kernel[(groups * triton.cdiv(num_tokens, block_tokens),)](
            fused,
            *parts,
            angles,
            cu_seqlens,
            num_tokens,
            fused.shape[-2],
            angles.shape[0],
            num_documents,
            max(0, num_documents - 1).bit_length(),
            *strides,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            ROTARY_DIM=rotary_dim,
            GROUP=HEADS_PER_PROGRAM,
            ROTATED_GROUPS=rotated_groups,
            GROUPS=groups,
            BLOCK_TOKENS=block_tokens,
            BLOCK_HALF=block_half,
            BLOCK_REST=triton.next_power_of_2(max(1, head_dim - rotary_dim)),
            BLOCK_HEAD=triton.next_power_of_2(head_dim),
            BACKWARD=backward,
            num_warps=4,
            enable_fp_fusion=False,
        )


class _SplitRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: Tensor, angles: Tensor, num_heads: int, num_kv_heads: int, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, ...]:
        fused = fused.contiguous()
        all_heads = (num_heads, num_kv_heads, num_kv_heads)
        head_dim = fused.shape[-1] // sum(all_heads)
        parts = tuple(fused.new_empty(*fused.shape[:-1], heads, head_dim) for heads in all_heads)
        _launch(fused, parts, angles, cu_seqlens, backward=False)
        ctx.save_for_backward(angles, cu_seqlens)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        angles, cu_seqlens = ctx.saved_tensors
        *shape, _, head_dim = gradients[0].shape
        fused_gradient = gradients[0].new_empty(*shape, head_dim * sum(gradient.shape[-2] for gradient in gradients))
        _launch(fused_gradient, gradients, angles, cu_seqlens, backward=True)
        return fused_gradient, None, None, None, None


def split_rope(
    fused: Tensor, angles: Tensor, num_heads: int, num_kv_heads: int, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Split `fused` into contiguous q, k and v of its dtype, and rotate q and k. Differentiable once in `fused`.

    Args:
        fused: bf16, fp16 or fp32 on a GPU. Packed: [T, W] with W = (num_heads + 2 num_kv_heads) d. Padded: [B, S, W];
            then a token's position is its index in S.
        angles: contiguous fp32 [positions, 1, 1, rotary_dim]. Both halves of a row are equal; rotary_dim is even and
            at most d. Columns from rotary_dim on are not rotated. A position beyond the table gives NaN.
        cu_seqlens: contiguous int32 [n + 1] on the same GPU: the starts of the documents, then T. None if padded.
    """
    return _SplitRope.apply(fused, angles, num_heads, num_kv_heads, cu_seqlens)
