"""flash-attn 4 over packed documents (--attn_implementation flash_attention_4), in place of Transformer Engine's
choice.

Causal attention of q [T, heads, d] with k and v [T, kv_heads, d], bf16, inside the documents that `cu_seqlens` bounds.
The package is called directly. Transformer Engine has a way to it too (NVTE_FUSED_ATTN=0, which forbids cuDNN's
attention), but for every head dimension that flash-attn accepts; on an H200 dQ was wrong for d = 80 and right for
`FLASH_ATTENTION_HEAD_DIMS` (tests/kernels/test_flash_attention_gpu.py). So `keep_from_transformer_engine` bars that way
for others.

With grouped queries dK and dV are summed in an order that changes from run to run. What it gains: docs/precision.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from llm_fp8.config.validation import FLASH_ATTENTION_HEAD_DIMS
from llm_fp8.utils.packages import FLASH_ATTENTION_4, package_version


def keep_from_transformer_engine(head_dim: int) -> None:
    """Forbid Transformer Engine flash-attn 4, where it is installed, for other head dimensions than
    `FLASH_ATTENTION_HEAD_DIMS`.
    """
    if head_dim not in FLASH_ATTENTION_HEAD_DIMS and package_version(FLASH_ATTENTION_4.name) is not None:
        os.environ["NVTE_FLASH_ATTN_V4"] = "0"


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float, window: int | None
) -> Tensor:
    """Causal attention inside packed documents.

    Args:
        q: bf16 [T, heads, d], on the GPU.
        k, v: [T, kv_heads, d].
        cu_seqlens: int32 [n + 1], where documents begin, and T.
        max_seqlen: tokens of the longest.
        softmax_scale: factor of q k^T.
        window: number of most recent positions attended to, itself included; None for all.

    Returns:
        [T, heads, d].
    """
    output = _varlen_function()(
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
    attended: Tensor = output[0] if isinstance(output, tuple) else output
    return attended


def _varlen_function() -> Callable[..., Any]:
    from flash_attn.cute.interface import flash_attn_varlen_func

    return flash_attn_varlen_func
