"""Forward pass in bf16, dgrad and wgrad in fp8 with one scale per tensor (--fp8_scenario backward).

Transformer Engine's custom recipes choose a quantizer for each operand of a GEMM. Here an input or a weight has two
forms. Its rows are the bf16 tensor itself, which fprop reads. Its columns are an fp8 copy in transposed layout, which
dgrad reads of a weight and wgrad reads of an input. Only the columns are saved for the backward pass. A gradient is
cast to fp8 in both layouts: dgrad reads its rows and wgrad its columns.

Sources: Transformer Engine 2.20, common/recipe (`CustomRecipe`), pytorch/tensor/hybrid_tensor.py (`HybridQuantizer`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.common.recipe import CustomRecipe, Format
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.tensor.storage.hybrid_tensor_storage import HybridQuantizedTensorStorage
from transformer_engine.pytorch.tensor.storage.identity_tensor_storage import IdentityTensorStorage


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
    return _current_scaling(gradient) if kind == "grad_output" else IdentityQuantizer()


class RowsAndColumns(HybridQuantizer):
    """Quantizer of inputs and weights: bf16 rows, and columns in E4M3 with the scale of the tensor's own amax."""

    def __init__(self) -> None:
        super().__init__(rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=_current_scaling())
        self._both = _current_scaling()  # Transformer Engine cannot cast to columns alone with one scale
        self._both.internal = True

    def copy(self) -> RowsAndColumns:
        copied = RowsAndColumns()
        copied.set_usage(rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        copied.internal = self.internal
        return copied

    def quantize_impl(self, tensor: Tensor) -> BackwardStorage:
        rows = IdentityTensorStorage(hp_data=tensor.detach(), fake_dtype=tensor.dtype) if self.rowwise_usage else None
        return BackwardStorage(rows, self.columns_of(tensor) if self.columnwise_usage else None, self, tensor.dtype)

    def columns_of(self, tensor: Tensor) -> Float8TensorStorage:
        """Cast `tensor` [T, K] to fp8 columns [K, T]."""
        columns = tex.quantize(tensor, self._both)
        if columns._transpose is not None:  # GPUs whose GEMMs read either layout have one copy, the other layout
            columns._data = None
        return columns


class BackwardStorage(HybridQuantizedTensorStorage):
    """A tensor cast by `RowsAndColumns`. Only its columns are saved for the backward pass."""

    def __new__(cls, rows: Any, columns: Any, quantizer: RowsAndColumns, dtype: torch.dtype) -> BackwardStorage:
        instance = object.__new__(cls)  # the base class expects a subclass to be a tensor
        instance._rowwise_storage, instance._columnwise_storage = rows, columns
        instance._quantizer, instance._dtype = quantizer, dtype
        return instance

    def prepare_for_saving(self) -> tuple[list[Tensor | None], BackwardStorage]:
        """Return the tensors to save, and a storage to restore them in. Keep this storage intact: a weight's is cached
        over micro-batches.
        """
        if self._columnwise_storage is None:
            return [], BackwardStorage(None, None, self._quantizer, self._dtype)
        columns = Float8TensorStorage(**self._columnwise_storage.get_metadata())
        tensors, _ = columns.prepare_for_saving()
        return tensors, BackwardStorage(None, columns, self._quantizer, self._dtype)

    def quantize_(self, tensor: Tensor, *, noop_flag: Any = None) -> BackwardStorage:
        """Update a weight's cached columns in place. Its rows are the weight itself."""
        self._columnwise_storage.copy_from_storage(self._quantizer.columns_of(tensor))
        return self


def _current_scaling(fp8_dtype: Any = DType.kFloat8E4M3) -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(fp8_dtype, device=torch.device("cuda"))
