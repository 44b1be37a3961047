"""Attention of flash-attn 3 or 4 over packed documents, in place of Transformer Engine's choice.

The options are --attn_implementation flash_attention_3 and flash_attention_4. Both are called directly. Transformer Engine has a way to flash-attn 4 too
(NVTE_FUSED_ATTN=0, which forbids cuDNN's attention), but for every head dimension that flash-attn lets pass; on an H200 the gradient of the queries was
wrong for one of 80, and right for those of `HEAD_DIMS` (tests/gpu/test_flash_attention_gpu.py). So `keep_from_transformer_engine` bars that way for others.

What they gain and cost: docs/precision.md. Of flash-attn 4 with grouped queries the gradients of keys and values are sums in an order that changes from run
to run; of flash-attn 3 those of the queries are too, and without grouped queries as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from llm_fp8.errors import UserError
from llm_fp8.flash_attention_3 import flash_attention_3, load_operators
from llm_fp8.flash_attention_package import FLASH_ATTENTION_3, FLASH_ATTENTION_4, FLASH_ATTENTION_PACKAGES, FlashAttention
from llm_fp8.provenance import package_version

HEAD_DIMS = (64, 128)
"""Those whose gradients were compared."""
HOPPER = (9, 0)
"""Compute capability that they were compared on."""


def keep_from_transformer_engine(head_dim: int) -> None:
    """Forbid Transformer Engine flash-attn 4, where it is installed, for heads of so many elements if their gradients were not compared."""
    if head_dim not in HEAD_DIMS and package_version(FLASH_ATTENTION_PACKAGES[FLASH_ATTENTION_4].package) is not None:
        os.environ["NVTE_FLASH_ATTN_V4"] = "0"


def check_flash_attention(which: FlashAttention, head_dim: int, attention_dropout: float) -> None:
    """Raise `UserError` where flash-attn cannot serve a model with heads of `head_dim` elements, or has not been shown to be right for it.

    `which`: a value of --attn_implementation, flash_attention_3 or flash_attention_4.
    """
    asked = f"--attn_implementation {which}"
    if head_dim not in HEAD_DIMS:
        raise UserError(
            f"{asked}: this model's heads have {head_dim} elements, and its gradients were compared for {' and '.join(map(str, HEAD_DIMS))} "
            "alone; drop it."
        )
    if attention_dropout:
        raise UserError(
            f"{asked} has no dropout, and this model's config.json has attention_dropout {attention_dropout}; drop it."
        )


def require_flash_attention(which: FlashAttention, capability: tuple[int, int]) -> None:
    """Raise `UserError` where flash-attn is not the version that was compared, or flash-attn 3's operators do not load, or this is no `HOPPER`.

    `which`: a value of --attn_implementation, flash_attention_3 or flash_attention_4. `capability`: the GPU's compute capability, major and minor.
    """
    asked = f"--attn_implementation {which}"
    if capability != HOPPER:
        major, minor = capability
        raise UserError(
            f"{asked}: its gradients were compared on Hopper alone (compute capability 9.0), and this GPU has {major}.{minor}; drop it."
        )
    package = FLASH_ATTENTION_PACKAGES[which]
    version = package_version(package.package)
    if version != package.version:
        found = "which is not installed" if version is None else f"and {version} is installed"
        raise UserError(f"{asked} needs {package.package} {package.version}, {found}; run: {package.install}")
    if which == FLASH_ATTENTION_3:
        load_operators()
        return
    try:
        _function_of_flash_attention_4()
    except ImportError as error:
        raise UserError(f"{asked}: {package.package} does not load ({error}); run: {package.install}") from error


def flash_attention(
    which: FlashAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    window: int | None,
) -> Tensor:
    """Causal attention inside packed documents.

    Args:
        which: a value of --attn_implementation, flash_attention_3 or flash_attention_4.
        q: bf16 [T, heads, d], on the GPU.
        k, v: [T, kv_heads, d].
        cu_seqlens: int32 [n + 1], where documents begin, and T.
        max_seqlen: tokens of the longest.
        softmax_scale: what the products of q and k are multiplied by.
        window: number of most recent positions attended to, itself included; None for all.

    Returns:
        [T, heads, d].
    """
    attend = {FLASH_ATTENTION_3: flash_attention_3, FLASH_ATTENTION_4: _flash_attention_4}[which]
    return attend(q, k, v, cu_seqlens, max_seqlen, softmax_scale, window)


def _function_of_flash_attention_4() -> Callable[..., Any]:
    from flash_attn.cute.interface import flash_attn_varlen_func

    return flash_attn_varlen_func


def _flash_attention_4(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float, window: int | None
) -> Tensor:
    output = _function_of_flash_attention_4()(
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
