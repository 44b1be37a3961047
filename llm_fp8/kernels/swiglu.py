"""SwiGLU's backward pass inside Transformer Engine's LayerNormMLP, whose result goes to fp8 at once.

LayerNormMLP looks its activation up by name, in a table with a forward function, a backward function and, for some, one
that does the backward pass, the bias's gradient and the cast in one:

    backward_and_cast(gradient [T, f], fc1's output [T, 2 f], quantizer)   ->   (the bias's gradient, the gradient [T, 2 f] quantised)

SwiGLU has none. So its gradient is written in bf16 and read again, to be cast, and to be summed for a bias that our
MLPs do not have. `fuse_swiglu_backward` adds a name to the table that has one: with delayed scaling the kernel of
`llm_fp8.kernels.swiglu_triton`, with other recipes Transformer Engine's own two steps without the sum.

The table is no public part of Transformer Engine (2.20: `_get_act_func_supported_list` in module/layernorm_mlp.py).
Where it is not found, modules stay as they are: slower, and as right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "swiglu_with_fused_cast"
_TABLE = "_get_act_func_supported_list"


def fuse_swiglu_backward(mlp: nn.Module) -> None:
    """Let `mlp`, a LayerNormMLP with activation "swiglu" and without biases, cast the gradient of its inside where
    it is computed.
    """
    from transformer_engine.pytorch.module import layernorm_mlp

    if hasattr(layernorm_mlp, _TABLE):
        if NAME not in getattr(layernorm_mlp, _TABLE)(None):
            _add_to_table(layernorm_mlp)
        mlp.activation = NAME  # type: ignore[assignment]


def _add_to_table(module: Any) -> None:
    """Add the name to the table of Transformer Engine's `module`; other modules' activations are what they were."""
    original = getattr(module, _TABLE)

    def with_fused_cast(recipe: Any = None) -> dict[str, tuple[Any, ...]]:
        functions = original(recipe)
        forward, backward, _ = functions["swiglu"]
        return {**functions, NAME: (forward, backward, None if recipe is None else _backward_and_cast)}

    setattr(module, _TABLE, with_fused_cast)


def _backward_and_cast(gradient: Tensor, gate_and_up: Tensor, quantizer: Any) -> tuple[None, Any]:
    """See the module's docstring; there is no bias, and so no gradient of it."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    if not isinstance(quantizer, Float8Quantizer):
        return None, quantizer(tex.dswiglu(gradient, gate_and_up, None))
    from llm_fp8.kernels.swiglu_triton import dswiglu_cast

    fp8_dtype = {DType.kFloat8E5M2: torch.float8_e5m2, DType.kFloat8E4M3: torch.float8_e4m3fn}[quantizer.dtype]
    rowwise, transposed, scale_inverse = dswiglu_cast(gradient, gate_and_up, quantizer.scale, quantizer.amax, fp8_dtype)
    quantised = Float8TensorStorage(
        data=rowwise.view(torch.uint8),
        data_transpose=transposed.view(torch.uint8),
        fp8_scale_inv=scale_inverse,
        fp8_dtype=quantizer.dtype,
        fake_dtype=gradient.dtype,
        quantizer=quantizer,
    )
    return None, quantised
