"""Attention of flash-attn 3 or 4 over packed documents, in place of Transformer Engine's choice.

The options are --attn_implementation flash_attention_3 and flash_attention_4. Both are called directly. Transformer
Engine has a way to flash-attn 4 too (NVTE_FUSED_ATTN=0, which forbids cuDNN's attention), but for every head dimension
that flash-attn lets pass; on an H200 the gradient of the queries was wrong for one of 80, and right for those of
`HEAD_DIMS` (tests/kernels/test_flash_attention_gpu.py). So `keep_from_transformer_engine` bars that way for others.

What they gain and cost: docs/precision.md. Of flash-attn 4 with grouped queries the gradients of keys and values are
sums in an order that changes from run to run; of flash-attn 3 those of the queries are too, and without grouped queries
as well.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_fp8.config.attention_packages import (
    CUDA_RUNTIME_PACKAGE,
    FLASH_ATTENTION_3,
    FLASH_ATTENTION_4,
    FLASH_ATTENTION_PACKAGES,
    FlashAttention,
)
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import package_version

HEAD_DIMS = (64, 128)
"""Those whose gradients were compared."""
HOPPER = (9, 0)
"""Compute capability that they were compared on."""


def keep_from_transformer_engine(head_dim: int) -> None:
    """Forbid Transformer Engine flash-attn 4, where it is installed, for heads of so many elements if their
    gradients were not compared.
    """
    if head_dim not in HEAD_DIMS and package_version(FLASH_ATTENTION_PACKAGES[FLASH_ATTENTION_4].package) is not None:
        os.environ["NVTE_FLASH_ATTN_V4"] = "0"


def check_flash_attention(which: FlashAttention, head_dim: int, attention_dropout: float) -> None:
    """Raise `UserError` where flash-attn cannot serve a model with heads of `head_dim` elements, or has not been shown
    to be right for it.

    `which`: a value of --attn_implementation, flash_attention_3 or flash_attention_4.
    """
    asked = f"--attn_implementation {which}"
    if head_dim not in HEAD_DIMS:
        raise UserError(
            f"{asked}: this model's heads have {head_dim} elements, and its gradients were compared for "
            f"{' and '.join(map(str, HEAD_DIMS))} alone; drop it."
        )
    if attention_dropout:
        raise UserError(
            f"{asked} has no dropout, and this model's config.json has attention_dropout {attention_dropout}; drop it."
        )


def require_flash_attention(which: FlashAttention, capability: tuple[int, int]) -> None:
    """Raise `UserError` where flash-attn is not the version that was compared, or flash-attn 3's operators do not load,
    or this is no `HOPPER`.

    `which`: a value of --attn_implementation, flash_attention_3 or flash_attention_4. `capability`: the GPU's compute
        capability, major and minor.
    """
    asked = f"--attn_implementation {which}"
    if capability != HOPPER:
        major, minor = capability
        raise UserError(
            f"{asked}: its gradients were compared on Hopper alone (compute capability 9.0), and this GPU has "
            f"{major}.{minor}; drop it."
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


# --- flash_attention_3 -----------------------------------------------------------------------------------
# flash-attn 3's two operators: where they are loaded from, and attention with gradients made of them.
#
# They come from one file of the package xformers, built on torch's stable ABI, so that it loads in later versions of
# torch than the one xformers was built for. xformers itself is not imported: its other parts are not of that kind. The
# file is linked with the runtime of CUDA 12, also where torch has that of CUDA 13.
#
# Which attention is taken, and for what it is refused: llm_fp8/kernels/flash_attention.py.

_PACKAGE = FLASH_ATTENTION_PACKAGES[FLASH_ATTENTION_3]
_OPERATORS = "xformers/flash_attn_3/_C.so"
_CUDA_RUNTIME = "libcudart.so.12"


@functools.cache
def load_operators() -> None:
    """Register `torch.ops.flash_attn_3`; once per process.

    Raises `UserError` where they, or the CUDA runtime that they need, are not there or do not load, and where others of
    that name are registered already.
    """
    asked = f"--attn_implementation {FLASH_ATTENTION_3}"
    if hasattr(torch.ops.flash_attn_3, "fwd"):
        raise UserError(
            f"{asked}: another package has loaded its own operators of {_PACKAGE.name}, which were not compared; "
            "uninstall it (flash-attn-3), or drop the option."
        )
    path = _file_of(_PACKAGE.package, _OPERATORS)
    if path is None:
        raise UserError(f"{asked} needs {_OPERATORS} of {_PACKAGE.package} {_PACKAGE.version}; run: {_PACKAGE.install}")
    try:
        _load_cuda_runtime()
        torch.ops.load_library(path)
    except OSError as error:
        said = (str(error.__cause__ or error).splitlines() or [""])[0]  # torch's own sentence leaves the reason out
        raise UserError(f"{asked}: its operators do not load ({said}); run: {_PACKAGE.install}") from error


def _load_cuda_runtime() -> None:
    """Load the CUDA 12 runtime, torch's or the system's before that of its package; the operators then find it by
    its name. Raises OSError without any.
    """
    try:
        ctypes.CDLL(_CUDA_RUNTIME)
    except OSError:
        path = _file_of(CUDA_RUNTIME_PACKAGE, f"nvidia/cuda_runtime/lib/{_CUDA_RUNTIME}")
        if path is None:
            raise
        ctypes.CDLL(str(path))


def _file_of(package: str, name: str) -> Path | None:
    """A file of an installed package, None where there is none; imports nothing."""
    try:
        path = Path(str(distribution(package).locate_file(name)))
    except PackageNotFoundError:
        return None
    return path if path.is_file() else None


def flash_attention_3(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float, window: int | None
) -> Tensor:
    """As `llm_fp8.kernels.flash_attention.flash_attention`. Raises `UserError` as `load_operators`."""
    load_operators()
    attended: Tensor = _Attention.apply(q, k, v, cu_seqlens, max_seqlen, softmax_scale, window)
    return attended


class _Attention(torch.autograd.Function):
    """Both operators, as one node of the graph."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        softmax_scale: float,
        window: int | None,
    ) -> Tensor:
        ctx.options = {
            "max_seqlen_q": max_seqlen,
            "max_seqlen_k": max_seqlen,
            "softmax_scale": softmax_scale,
            "is_causal": True,
            "window_size_left": -1 if window is None else window - 1,
            "window_size_right": -1 if window is None else 0,
        }
        # One split: keys are divided between blocks only to fill a GPU in generation.
        out, log_sum_exp, *_scratch = torch.ops.flash_attn_3.fwd(
            q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, num_splits=1, **ctx.options
        )
        ctx.save_for_backward(q, k, v, out, log_sum_exp, cu_seqlens)
        attended: Tensor = out
        return attended

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum_exp, cu_seqlens = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        torch.ops.flash_attn_3.bwd(
            gradient.contiguous(),
            q,
            k,
            v,
            out,
            log_sum_exp,
            dq=dq,
            dk=dk,
            dv=dv,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            **ctx.options,
        )
        return dq, dk, dv, None, None, None, None
