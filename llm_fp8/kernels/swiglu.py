"""Backward pass of SwiGLU in Transformer Engine's LayerNormMLP, fused with the cast of the gradient to fp8.

LayerNormMLP has such fused functions for some activations, but not for SwiGLU. It writes SwiGLU's gradient in bf16 and
reads it twice: to cast it, and to sum it for a bias that our MLPs do not have. `fuse_swiglu_backward` adds a function
for SwiGLU. It runs the kernel `dswiglu_cast` for delayed scaling, or else Transformer Engine's gradient and cast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from llm_fp8.utils.te_internals import add_activation

NAME = "swiglu_with_fused_cast"


def fuse_swiglu_backward(mlp: nn.Module) -> None:
    """Make `mlp`, a LayerNormMLP with "swiglu" and no biases, compute SwiGLU's gradient and cast it in one function."""
    add_activation(NAME, _backward_and_cast)
    mlp.activation = NAME  # type: ignore[assignment]


def _backward_and_cast(gradient: Tensor, gate_and_up: Tensor, quantizer: Any) -> tuple[None, Any]:
    """Return None (no bias gradient) and the quantised gradient [T, 2 f], given the `gradient` [T, f] of the output."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    if isinstance(quantizer, Float8CurrentScalingQuantizer):
        return None, tex.dswiglu(gradient, gate_and_up, quantizer)  # its kernel also computes the amax
    if not isinstance(quantizer, Float8Quantizer):
        return None, quantizer(tex.dswiglu(gradient, gate_and_up, None))
    from llm_fp8.kernels.swiglu_triton import dswiglu_cast

    fp8_dtype = {DType.kFloat8E5M2: torch.float8_e5m2, DType.kFloat8E4M3: torch.float8_e4m3fn}[quantizer.dtype]
    rowwise, transposed, scale_inverse = dswiglu_cast(gradient, gate_and_up, quantizer.scale, quantizer.amax, fp8_dtype)
    return None, Float8TensorStorage(
        data=rowwise.view(torch.uint8),
        data_transpose=transposed.view(torch.uint8),
        fp8_scale_inv=scale_inverse,
        fp8_dtype=quantizer.dtype,
        fake_dtype=gradient.dtype,
        quantizer=quantizer,
    )
