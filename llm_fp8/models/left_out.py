"""The tensors of a multimodal checkpoint that text does not pass through: an export takes them over from the source.

`build.without_towers` takes their modules out of the model, whose other names stay those of the whole checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import str_to_torch_dtype

from llm_fp8.models.weight_shards import is_left_out
from llm_fp8.utils.hf_internals import renaming_on_load


def left_out_of(model: PreTrainedModel) -> tuple[str, ...]:
    """The modules that were taken out of `model`; empty for a language model, and where its weights were drawn."""
    return getattr(model, "left_out", ())


def left_out_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Their tensors, without memory, by the names that they have in the files of the source; fp8 is read as fp32."""
    if not left_out_of(model):
        return {}
    stored: Any = model.stored
    dtypes, belongs = {**str_to_torch_dtype, "F8_E4M3": torch.float32}, is_left_out(model)
    return {
        name: torch.empty(shape, dtype=dtypes[dtype], device="meta")
        for name, (_, dtype, shape) in stored.stored.items()
        if belongs(name)
    }


def source_names(model: PreTrainedModel) -> Callable[[str], str]:
    """From what transformers stores a tensor as to what a source with such tensors calls it: families have an older and
    a newer layout.
    """
    if not left_out_of(model):
        return str
    stored: Any = model.stored
    renamed = renaming_on_load(model)
    names = {renamed(name): name for name in stored.stored}
    return lambda name: names.get(renamed(name), name)


def describe_left_out(model: PreTrainedModel) -> str:
    """The line for the start of a run."""
    tensors = left_out_tensors(model).values()
    what = f"{len(tensors)} tensors, {sum(tensor.nbytes for tensor in tensors) / 1e6:,.1f} MB"
    return f"text alone is trained: {', '.join(left_out_of(model))} ({what}) go into the export as they are"
