"""flash-attn 4's attention over packed documents, in place of Transformer Engine's choice (--attn_implementation flash_attention_4).

It is called directly. Transformer Engine has a way to it too (NVTE_FUSED_ATTN=0, which forbids cuDNN's attention), but for every head dimension that
flash-attn lets pass; on an H200 the gradient of the queries was wrong for one of 80, and right for those of `HEAD_DIMS` (tests/gpu/test_flash_attention_gpu.py).
So `keep_from_transformer_engine` bars that way for others.

What it gains and costs: docs/precision.md. With grouped queries the gradients of keys and values are sums in an order that changes from run to run.
"""

from __future__ import annotations

import os

from torch import Tensor

from llm_fp8.config import FLASH_ATTENTION_4
from llm_fp8.errors import UserError
from llm_fp8.flash_attention_package import INSTALL, PACKAGE, VERSION
from llm_fp8.provenance import package_version

HEAD_DIMS = (64, 128)
"""Those whose gradients were compared."""
HOPPER = (9, 0)
"""Compute capability that they were compared on."""
_ASKED = f"--attn_implementation {FLASH_ATTENTION_4}"


def keep_from_transformer_engine(head_dim: int) -> None:
    """Forbid Transformer Engine flash-attn 4, where it is installed, for heads of so many elements if their gradients were not compared."""
    if head_dim not in HEAD_DIMS and package_version(PACKAGE) is not None:
        os.environ["NVTE_FLASH_ATTN_V4"] = "0"


def check_flash_attention(head_dim: int, attention_dropout: float) -> None:
    """Raise `UserError` where it cannot serve a model with heads of `head_dim` elements, or has not been shown to be right for it."""
    if head_dim not in HEAD_DIMS:
        raise UserError(
            f"{_ASKED}: this model's heads have {head_dim} elements, and its gradients were compared for {' and '.join(map(str, HEAD_DIMS))} "
            "alone; drop it."
        )
    if attention_dropout:
        raise UserError(
            f"{_ASKED} has no dropout, and this model's config.json has attention_dropout {attention_dropout}; drop it."
        )


def require_flash_attention(capability: tuple[int, int]) -> None:
    """Raise `UserError` where it is not installed, or not compared on a GPU of this compute capability."""
    if capability != HOPPER:
        major, minor = capability
        raise UserError(
            f"{_ASKED}: its gradients were compared on Hopper alone (compute capability 9.0), and this GPU has {major}.{minor}; drop it."
        )
    version = package_version(PACKAGE)
    if version != VERSION:
        found = "which is not installed" if version is None else f"and {version} is installed"
        raise UserError(f"{_ASKED} needs {PACKAGE} {VERSION}, {found}; run: {INSTALL}")


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float, window: int | None
) -> Tensor:
    """Causal attention inside packed documents.

    Args:
        q: bf16 or fp16 [T, heads, d], on the GPU.
        k, v: [T, kv_heads, d].
        cu_seqlens: int32 [n + 1], where documents begin, and T.
        max_seqlen: tokens of the longest.
        softmax_scale: what the products of q and k are multiplied by.
        window: number of most recent positions attended to, itself included; None for all.

    Returns:
        [T, heads, d].
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
    attended: Tensor = output[0] if isinstance(output, tuple) else output
    return attended
