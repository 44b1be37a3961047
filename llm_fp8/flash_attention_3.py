"""flash-attn 3's two operators: where they are loaded from, and attention with gradients made of them.

They come from one file of the package xformers, built on torch's stable ABI, so that it loads in later versions of torch than the one xformers was built
for. xformers itself is not imported: its other parts are not of that kind. The file is linked with the runtime of CUDA 12, also where torch has that of
CUDA 13.

Which attention is taken, and for what it is refused: llm_fp8/flash_attention.py.
"""

from __future__ import annotations

import ctypes
import functools
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llm_fp8.errors import UserError
from llm_fp8.flash_attention_package import CUDA_RUNTIME_PACKAGE, FLASH_ATTENTION_3, FLASH_ATTENTION_PACKAGES

_PACKAGE = FLASH_ATTENTION_PACKAGES[FLASH_ATTENTION_3]
_OPERATORS = "xformers/flash_attn_3/_C.so"
_CUDA_RUNTIME = "libcudart.so.12"


@functools.cache
def load_operators() -> None:
    """Register `torch.ops.flash_attn_3`; once per process.

    Raises `UserError` where they, or the CUDA runtime that they need, are not there or do not load, and where others of that name are registered already.
    """
    asked = f"--attn_implementation {FLASH_ATTENTION_3}"
    if hasattr(torch.ops.flash_attn_3, "fwd"):
        raise UserError(
            f"{asked}: another package has loaded its own operators of {_PACKAGE.name}, which were not compared; uninstall it (flash-attn-3), or drop the option."
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
    """Load the CUDA 12 runtime, torch's or the system's before that of its package; the operators then find it by its name. Raises OSError without any."""
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
    """As `llm_fp8.flash_attention.flash_attention`. Raises `UserError` as `load_operators`."""
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
