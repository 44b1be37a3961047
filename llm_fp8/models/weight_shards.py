"""Which rows of a model's parameters this process holds, and which Hugging Face tensors they belong to.

FSDP splits every parameter along dim 0: of R rows over n ranks each rank holds a block of ceil(R / n), the last ranks
fewer or none. Every parameter is one or more Hugging Face tensors stacked along that same dimension (`te_llama.Part`;
one and the same name outside of TE models), so a rank's share of a checkpoint is a range of rows of some of its
tensors, and both directions are slicing:

    in     a rank reads its rows from the safetensors files and nothing else (`HfFiller`, `te_llama.WeightFiller`)
    out    a parameter is gathered, cut into its parts and written (llm_fp8/models/export.py)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

import te_llama
from llm_fp8.models.lora_names import is_adapter, name_without_adapter
from te_llama import DecoderSpec, Part, UnsupportedArchitecture, _listed, parameter_map

_PASSED_OVER = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers that older checkpoints hold and that today's models compute."""


def row_block(tensor: Tensor) -> RowBlock:
    """The rows of `tensor` in this process's memory, which they share: all of an ordinary tensor, some of a DTensor
    split along dim 0.

    Raises `ValueError` for a DTensor that is split in another way.
    """
    if not isinstance(tensor, DTensor):
        return RowBlock(tensor.detach(), 0)
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    local = tensor._local_tensor.detach()
    if not split:
        return RowBlock(local, 0)
    if len(split) > 1 or not tensor.placements[split[0]].is_shard(0):
        raise ValueError(f"a parameter is placed as {tensor.placements}, and only a split along dim 0 is known here")
    mesh_dim = split[0]
    rows_per_rank = -(-tensor.shape[0] // tensor.device_mesh.size(mesh_dim))
    start = min(tensor.device_mesh.get_local_rank(mesh_dim) * rows_per_rank, tensor.shape[0])
    return RowBlock(local, start)


def is_te_model(model: nn.Module) -> bool:
    """Whether the decoder layers are those of te_llama.py."""
    return any(isinstance(module, te_llama.TEDecoderLayer) for module in model.modules())


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters but those of adapters, and buffers that belong into a checkpoint, by name; a tied parameter once,
    under its first name.
    """
    tensors: dict[str, Tensor] = {
        name: parameter for name, parameter in model.named_parameters() if not is_adapter(name)
    }
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}".lstrip(".")] = buffer
    return tensors


def parts_of(model: PreTrainedModel) -> dict[str, tuple[Part, ...]]:
    """Name in `saved_tensors` -> the Hugging Face tensors it is made of."""
    if is_te_model(model):
        return te_llama.parameter_map(te_llama.spec_of(model))
    return {name: (_as_part(name_without_adapter(name), tensor),) for name, tensor in saved_tensors(model).items()}


def _as_part(name: str, tensor: Tensor) -> Part:
    # A parameter that DeepSpeed has split is empty and keeps its shape elsewhere.
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    return Part(name, 0, shape[0] if shape else 1, shape)


def to_stored_layout(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's Hugging Face tensors under the names and in the shapes that its files have.

    They are the same for most architectures. Some have other names in their files; those with a mixture of experts
    store each expert's matrix for itself.
    """
    return revert_weight_conversion(model, dict(tensors))


def stored_names(model: PreTrainedModel) -> dict[str, str] | None:
    """Name in the files -> Hugging Face tensor; None where the files hold other tensors than the model
    (`to_stored_layout`).
    """
    tensors = {
        part.hf_name: torch.empty(part.shape, device="meta") for parts in parts_of(model).values() for part in parts
    }
    names = {id(tensor): name for name, tensor in tensors.items()}
    stored = {stored_name: names.get(id(tensor)) for stored_name, tensor in to_stored_layout(model, tensors).items()}
    return (
        {stored_name: name for stored_name, name in stored.items() if name is not None}
        if None not in stored.values()
        else None
    )


def _first_names(model: nn.Module) -> dict[str, str]:
    """Name of a parameter -> its first name, which is another one for the second place of a tied matrix."""
    seen: dict[int, str] = {}
    named = [
        (name_without_adapter(name), parameter) for name, parameter in model.named_parameters(remove_duplicate=False)
    ]
    return {name: seen.setdefault(id(parameter), name) for name, parameter in named if not is_adapter(name)}


def initialize_rows_(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Random weights: this process's rows of what `te_llama.initialize_weights_` gives an unsplit model of this dtype.

    Every parameter is drawn whole on the generator's device, one in memory at a time, so that the weights do not depend
    on the number of ranks. Architectures that initialise themselves in another way (TE has none) get these weights too.
    """
    std = getattr(model.config, "initializer_range", 0.02)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=generator.device)
        te_llama.random_(whole, name, std, generator)
        block = row_block(parameter)
        block.data.copy_(whole[block.start : block.start + len(block.data)])


@dataclass(frozen=True)
class RowBlock:
    """Rows of a parameter that is split along dim 0: `data` [n, ...] holds its rows `start` to `start + n`; n may be
    0.
    """

    data: Tensor
    start: int


class PartFiller:
    """Fills parameters from the Hugging Face tensors they are made of, which arrive one by one, in any order, with no
    second copy in memory.

    Use: `fill_rows` (or `fill`, with the whole tensor) for each tensor of each file, then `finish()`. Each Hugging Face
        tensor must come
    exactly once.
    Raises `UnsupportedArchitecture` that names the tensor on anything unexpected, doubled, missing or of another shape.

    Args:
        entries: parameter name -> its parts, as `parameter_map` gives them.
        blocks: parameter name -> the rows to fill.
    """

    def __init__(self, entries: Mapping[str, tuple[Part, ...]], blocks: Mapping[str, RowBlock]) -> None:
        if entries.keys() != blocks.keys():
            raise UnsupportedArchitecture(
                f"parameter map and model differ in {_listed(entries.keys() ^ blocks.keys())}"
            )
        self._targets = {part.hf_name: (blocks[name], part) for name, parts in entries.items() for part in parts}
        self._missing = set(self._targets)

    def resolve(self, hf_name: str) -> str | None:
        """The name under which the map knows a tensor of a checkpoint; None for one to pass over."""
        return hf_name

    def fill(self, hf_name: str, tensor: Tensor) -> None:
        """`fill_rows` from a whole tensor."""
        self.fill_rows(hf_name, tuple(tensor.shape), tensor)

    def fill_rows(self, hf_name: str, shape: tuple[int, ...], rows: Any) -> None:
        """Copy what is wanted of one Hugging Face tensor to its place, cast to the parameter's dtype.

        `rows[a:b]` gives rows a to b of dim 0: the tensor itself, or a slice of a safetensors file, of which nothing
        else is then read.
        """
        known_name = self.resolve(hf_name)
        if known_name is None:
            return
        if known_name not in self._targets:
            raise UnsupportedArchitecture(f"the checkpoint holds '{hf_name}', which this architecture does not have")
        if known_name not in self._missing:
            raise UnsupportedArchitecture(f"the checkpoint holds '{hf_name}' twice")
        block, part = self._targets[known_name]
        if shape != part.shape:
            raise UnsupportedArchitecture(
                f"'{hf_name}' has shape {list(shape)} in the checkpoint and {list(part.shape)} in the config"
            )
        first, last = max(part.start, block.start), min(part.stop, block.start + len(block.data))
        if first < last:
            with torch.no_grad():
                block.data[first - block.start : last - block.start].copy_(rows[first - part.start : last - part.start])
        self._missing.discard(known_name)

    def finish(self) -> None:
        """Raise unless every parameter was filled."""
        if self._missing:
            raise UnsupportedArchitecture(f"the checkpoint lacks {_listed(self._missing)}")


class WeightFiller(PartFiller):
    """A `PartFiller` of TE parameters, whole (tensors) or in part (`RowBlock`s)."""

    def __init__(self, spec: DecoderSpec, te_parameters: Mapping[str, Tensor | RowBlock]) -> None:
        blocks = {
            name: value if isinstance(value, RowBlock) else RowBlock(value, 0) for name, value in te_parameters.items()
        }
        super().__init__(parameter_map(spec), blocks)
        self._tied = spec.tied_embeddings

    def resolve(self, hf_name: str) -> str | None:
        """See `PartFiller.resolve`."""
        if hf_name == "lm_head.weight" and self._tied:
            return None  # Some checkpoints store the tied matrix a second time.
        if hf_name.endswith("rotary_emb.inv_freq"):
            return None  # Llama 2 checkpoints carry this buffer; the frequencies come from the config.
        return hf_name


class HfFiller(PartFiller):
    """Fills this process's rows of a Hugging Face model by name.

    As `from_pretrained` does, it takes names with or without the base model's prefix ("model."), and a tied matrix from
    whichever of its names is stored, from the first where both are.

    Args:
        model: has parameters with memory.
        names: what `stored_names` says of the model.
        checkpoint_names: of all tensors in the checkpoint.
    """

    def __init__(self, model: PreTrainedModel, names: Mapping[str, str], checkpoint_names: Iterable[str]) -> None:
        tensors = saved_tensors(model)
        super().__init__(parts_of(model), {name: row_block(tensor) for name, tensor in tensors.items()})
        self._prefix = f"{model.base_model_prefix}."
        own_names = (name_without_adapter(name) for name in tensors)
        self._first_names = {**names, **{name: name for name in own_names}, **_first_names(model)}
        self._passed_over = re.compile("|".join((*_PASSED_OVER, *(model._keys_to_ignore_on_load_unexpected or ()))))
        self._stored = {self._known_name(name) for name in checkpoint_names}

    def _known_name(self, checkpoint_name: str) -> str:
        """The name by which the model knows a tensor of the checkpoint; the latter's own where there is none."""
        candidates = (checkpoint_name, f"{self._prefix}{checkpoint_name}", checkpoint_name.removeprefix(self._prefix))
        return next((name for name in candidates if name in self._first_names), checkpoint_name)

    def resolve(self, hf_name: str) -> str | None:
        """See `PartFiller.resolve`."""
        name = self._known_name(hf_name)
        first_name = self._first_names.get(name)
        if first_name is None:
            return None if self._passed_over.search(hf_name) else hf_name
        return None if name != first_name and first_name in self._stored else first_name
