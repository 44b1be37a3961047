"""A tensor of Transformer Engine with bf16 rows and fp8 columns: fprop reads the rows, the backward pass the columns.

Rows are the bf16 tensor itself. Columns are an fp8 copy [K, T] of the tensor [T, K]: the layout that dgrad reads of a
weight and wgrad of an input. Sources: Transformer Engine 2.20, pytorch/tensor (`HybridQuantizer` and its storage).
"""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.tensor.storage.hybrid_tensor_storage import HybridQuantizedTensorStorage
from transformer_engine.pytorch.tensor.storage.identity_tensor_storage import IdentityTensorStorage


class RowsAndColumns(HybridQuantizer):
    """Quantizer for inputs and weights: bf16 rows, and E4M3 columns with one scale."""

    def __init__(self) -> None:
        # Transformer Engine cannot cast to columns alone with one scale, so `_both` casts to both layouts.
        columns, self._both = (Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cuda")) for _ in range(2))
        self._both.internal = True
        super().__init__(rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=columns)

    def quantize_impl(self, tensor: Tensor) -> RowsAndColumnsStorage:
        rows = IdentityTensorStorage(hp_data=tensor.detach(), fake_dtype=tensor.dtype) if self.rowwise_usage else None
        columns = self.columns_of(tensor) if self.columnwise_usage else None
        return RowsAndColumnsStorage(rows, columns, self, tensor.dtype)

    def columns_of(self, tensor: Tensor) -> Float8TensorStorage:
        """Cast `tensor` [T, K] to fp8 columns [K, T]."""
        columns = tex.quantize(tensor, self._both)
        if columns._transpose is not None:  # GPUs whose GEMMs read either layout have one copy, the other layout
            columns._data = None
        return columns


class RowsAndColumnsStorage(HybridQuantizedTensorStorage):
    """A tensor cast by `RowsAndColumns`. Only its columns are saved for the backward pass."""

    def __new__(cls, rows: Any, columns: Any, quantizer: RowsAndColumns, dtype: torch.dtype) -> RowsAndColumnsStorage:
        instance = object.__new__(cls)  # the base class expects a subclass to be a tensor
        instance._rowwise_storage, instance._columnwise_storage = rows, columns
        instance._quantizer, instance._dtype = quantizer, dtype
        return instance

    def prepare_for_saving(self) -> tuple[list[Tensor | None], RowsAndColumnsStorage]:
        """Return the tensors to save, and a storage to restore them in. `self` keeps its tensors, since the cast of a
        weight is used by later micro-batches.
        """
        if self._columnwise_storage is None:
            return [], RowsAndColumnsStorage(None, None, self._quantizer, self._dtype)
        columns = Float8TensorStorage(**self._columnwise_storage.get_metadata())
        tensors, _ = columns.prepare_for_saving()
        return tensors, RowsAndColumnsStorage(None, columns, self._quantizer, self._dtype)

    def quantize_(self, tensor: Tensor, *, noop_flag: Any = None) -> RowsAndColumnsStorage:
        """Update a weight's columns in place. Its rows are the weight itself."""
        self._columnwise_storage.copy_from_storage(self._quantizer.columns_of(tensor))
        return self
