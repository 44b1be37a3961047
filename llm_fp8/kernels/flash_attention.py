"""flash-attn 4 over packed documents (--attn_implementation flash_attention_4), called directly.

Transformer Engine can choose flash-attn 4 too, but does so for every head dimension that flash-attn accepts; on an H200
dQ was wrong for d = 80 and right for `FLASH_ATTENTION_HEAD_DIMS` (tests/kernels/test_flash_attention_gpu.py), so
`keep_from_transformer_engine` forbids it for others. With grouped queries dK and dV are summed in an order that changes
from run to run. What it gains: docs/precision.md.
"""

from __future__ import annotations

import os

from torch import Tensor

from llm_fp8.config.validation import FLASH_ATTENTION_HEAD_DIMS
from llm_fp8.utils.packages import FLASH_ATTENTION_4, package_version


def keep_from_transformer_engine(head_dim: int) -> None:
    """Keep Transformer Engine from an installed flash-attn 4 unless its gradients are right for `head_dim`."""
    if head_dim not in FLASH_ATTENTION_HEAD_DIMS and package_version(FLASH_ATTENTION_4.name) is not None:
        os.environ["NVTE_FLASH_ATTN_V4"] = "0"


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float, window: int | None
) -> Tensor:
    """Causal attention inside packed documents, [T, heads, d].

    `q`, `k`, `v`: bf16 [T, heads, d] and twice [T, kv_heads, d]; `cu_seqlens`: int32 [n + 1], where documents begin,
    and T; `window`: number of most recent positions attended to, the token itself included, None for all.
    """
    from flash_attn.cute.interface import flash_attn_varlen_func

    output = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=softmax_scale,
        causal=True,
        window_size=(None, None) if window is None else (window - 1, 0),
    )
    return output[0] if isinstance(output, tuple) else output
