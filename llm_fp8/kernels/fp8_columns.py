"""A tensor of Transformer Engine with bf16 rows and fp8 columns: fprop reads the rows, the backward pass the columns.

Rows are the tensor itself. Columns are an fp8 copy [K, T] of the tensor [T, K], as dgrad reads a weight and wgrad an
input. Source: Transformer Engine 2.20, pytorch/tensor (`HybridQuantizer` and its storage).
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
        columns, self._both = (Float8CurrentScalingQuantizer(DType.kFloat8E4M3, torch.device("cuda")) for _ in range(2))
        self._both.internal = True  # casts to both layouts, since TE cannot cast to columns alone with one scale
        super().__init__(rowwise_quantizer=IdentityQuantizer(), columnwise_quantizer=columns)

    def quantize_impl(self, tensor: Tensor) -> RowsAndColumnsStorage:
        rows = self.rows_of(tensor) if self.rowwise_usage else None
        columns = self.columns_of(tensor) if self.columnwise_usage else None
        return RowsAndColumnsStorage(rows, columns, self, tensor.dtype)

    def rows_of(self, tensor: Tensor) -> IdentityTensorStorage:
        """Return `tensor` itself or, for an fp32 weight under torch.autocast, its cast to the compute dtype."""
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else tensor.dtype
        return IdentityTensorStorage(hp_data=tensor.detach().to(dtype), fake_dtype=dtype)

    def columns_of(self, tensor: Tensor) -> Float8TensorStorage:
        """Cast `tensor` [T, K] to fp8 columns [K, T]."""
        columns = tex.quantize(tensor, self._both)
        columns.update_usage(rowwise_usage=False, columnwise_usage=True)
        return columns


class RowsAndColumnsStorage(HybridQuantizedTensorStorage):
    """A tensor cast by `RowsAndColumns`. Only its columns are saved for the backward pass."""

    def __new__(cls, rows: Any, columns: Any, quantizer: RowsAndColumns, dtype: torch.dtype) -> RowsAndColumnsStorage:
        instance: Any = object.__new__(cls)  # the base class expects a subclass to be a tensor
        vars(instance).update(_rowwise_storage=rows, _columnwise_storage=columns, _quantizer=quantizer, _dtype=dtype)
        return instance

    def prepare_for_saving(self) -> tuple[list[Tensor | None], RowsAndColumnsStorage]:
        """Return the tensors to save and a storage for them. `self`, which may be a cached weight, keeps its own."""
        stored: Any = self._columnwise_storage
        columns = None if stored is None else Float8TensorStorage(**stored.get_metadata())
        tensors = [] if columns is None else columns.prepare_for_saving()[0]
        return tensors, RowsAndColumnsStorage(None, columns, self._quantizer, self._dtype)

    def quantize_(self, tensor: Tensor, *, noop_flag: Any = None) -> RowsAndColumnsStorage:
        """Update a cached weight: replace its rows, and overwrite its columns."""
        self._rowwise_storage = self._quantizer.rows_of(tensor)
        self._columnwise_storage.copy_from_storage(self._quantizer.columns_of(tensor))
        return self
