"""The tensors of a multimodal checkpoint that text does not pass through: an export takes them over from the source.

`build.without_towers` takes their modules out of the model, whose other names stay those of the whole checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llm_fp8.models.weight_shards import is_left_out
from llm_fp8.models.weights import StoredCheckpoint
from llm_fp8.utils.hf_internals import renaming_on_load

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float32,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""safetensors' names of dtypes; fp8 tensors are read as fp32."""


def left_out_of(model: PreTrainedModel) -> tuple[str, ...]:
    """The modules that were taken out of `model`; empty for a language model."""
    return getattr(model, "left_out", ())


class LeftOut:
    """What was taken out of `model`, in the files of its source; nothing where its weights were drawn."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.empty: dict[str, Tensor] = {}  # without memory
        self._source_names: dict[str, str] = {}  # of the model's own tensors
        self._renamed = renaming_on_load(model)
        if not left_out_of(model):
            return
        self._checkpoint: StoredCheckpoint = model.stored  # type: ignore[assignment]
        belongs = is_left_out(model)
        self._source_names = {self._renamed(stored_name): stored_name for stored_name in self._checkpoint.stored}
        for stored_name, (_, dtype, shape) in self._checkpoint.stored.items():
            if belongs(stored_name) and not (self._checkpoint.fp8 and self._checkpoint.fp8.is_surplus(stored_name)):
                self.empty[stored_name] = torch.empty(shape, dtype=_DTYPES[dtype], device="meta")

    def source_name(self, name: str) -> str:
        """What the source calls the tensor that transformers stores as `name`: families have an older and a newer
        layout.
        """
        return self._source_names.get(self._renamed(name), name)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.empty.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor, on the CPU and one at a time, as stored."""
        for name in self.empty:
            tensor: Any = self._checkpoint.read(name, torch.device("cpu"))
            yield name, tensor.contiguous()

    def describe(self, model: PreTrainedModel) -> str:
        """The line for the start of a run."""
        what = f"{len(self.empty)} tensors, {self.num_bytes / 1e6:,.1f} MB"
        return f"text alone is trained: {', '.join(left_out_of(model))} ({what}) go into the export as they are"
