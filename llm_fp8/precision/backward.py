"""Forward pass in bf16, dgrad and wgrad in fp8 with one scale per tensor (--fp8_scenario backward).

Rounding in the forward pass changes the trained function. Rounding in the backward pass is noise in a gradient. Inputs
and weights have bf16 rows for fprop, and fp8 columns for wgrad and dgrad. Gradients are cast to rows for dgrad and
columns for wgrad. Source: Transformer Engine 2.20, common/recipe (`CustomRecipe`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformer_engine.common.recipe import CustomRecipe, Format
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

from llm_fp8.kernels.fp8_columns import RowsAndColumns


class BackwardRecipe(CustomRecipe):
    """Recipe whose `fp8_format` is that of gradients: E4M3, or E5M2 if it is HYBRID."""

    def __init__(self, fp8_format: Format = Format.E4M3) -> None:
        gradient = DType.kFloat8E5M2 if fp8_format == Format.HYBRID else DType.kFloat8E4M3
        super().__init__(qfactory=functools.partial(_quantizer, gradient), fp8_format=fp8_format)

    def _make_repr(self) -> str:
        return f"recipe_type={type(self).__name__}, format={self.fp8_format.name}"


def _quantizer(gradient: Any, role: Any) -> Any:
    """Return the quantizer of an operand. `role` is Transformer Engine's `QuantizerRole`, or None for outputs."""
    kind = "" if role is None else role.tensor_type
    if kind in ("input", "weight"):
        return RowsAndColumns()
    if kind == "grad_output":
        return Float8CurrentScalingQuantizer(gradient, torch.device("cuda"))
    return IdentityQuantizer()
