"""Which shard of a model's parameters this rank holds, and which Hugging Face tensors it belongs to.

FSDP shards every parameter along dim 0: of R rows over n ranks each rank holds ceil(R / n), the last ranks fewer or
none. Every parameter is one or more Hugging Face tensors stacked along dim 0 (`te_llama.Part`), so a rank's shard of a
checkpoint is a range of rows of some tensors, and loading and export (llm_fp8/models/export.py) are slicing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

import te_llama
from llm_fp8.models.source import text_config
from llm_fp8.optim.adamw_master import remainder_of, split_master
from llm_fp8.utils.errors import listed, reading
from llm_fp8.utils.hf_internals import ignored_on_load, renaming_on_load
from llm_fp8.utils.torch_internals import local_of, persistent_buffers
from te_llama import Part, UnsupportedArchitecture

_PASSED_OVER = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers stored in older checkpoints and computed by today's models."""


def is_adapter(name: str) -> bool:
    """Whether a parameter or module of this name belongs to an adapter, PEFT's or the TE decoder's."""
    return ".lora_A." in name or ".lora_B." in name or name.endswith(".adapters")


def name_without_adapter(name: str) -> str:
    """The name in the model without adapters; PEFT's is `...q_proj.base_layer.weight`."""
    return name.replace(".base_layer", "")


def local_shard(tensor: Tensor) -> LocalShard:
    """This rank's rows of `tensor` (shared memory): all of a plain tensor, the shard of a DTensor sharded on dim 0. A
    0-d tensor is one row.
    """
    remainder, start = remainder_of(tensor), 0
    if not isinstance(tensor, DTensor):
        return LocalShard(torch.atleast_1d(tensor.detach()), start, remainder)
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard(0):
            rows_per_rank = -(-tensor.shape[0] // tensor.device_mesh.size(dim))
            start = min(tensor.device_mesh.get_local_rank(dim) * rows_per_rank, tensor.shape[0])
    return LocalShard(local_of(tensor).detach(), start, None if remainder is None else local_of(remainder))


def is_te_model(model: nn.Module) -> bool:
    """Whether `model` has decoder layers of te_llama.py."""
    return any(isinstance(module, te_llama.TEDecoderLayer) for module in model.modules())


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters (without adapters) and persistent buffers by name; a tied parameter once, under its first name."""
    tensors: dict[str, Tensor] = {name: tensor for name, tensor in model.named_parameters() if not is_adapter(name)}
    for prefix, module in model.named_modules():
        for name, buffer in persistent_buffers(module):
            tensors[f"{prefix}.{name}".lstrip(".")] = buffer
    return tensors


def parts_of(model: PreTrainedModel) -> dict[str, tuple[Part, ...]]:
    """Name in `saved_tensors` -> the Hugging Face tensors it is made of."""
    if is_te_model(model):
        return te_llama.parameter_map(model)
    parts: dict[str, tuple[Part, ...]] = {}
    for name, tensor in saved_tensors(model).items():
        # A parameter that DeepSpeed has sharded is empty and keeps its shape in `ds_shape`.
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
        parts[name] = (Part(name_without_adapter(name), 0, shape[0] if shape else 1, shape),)
    return parts


class _CopiesAreViews(TorchFunctionMode):
    """In it `Tensor.contiguous` returns the tensor as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def stored_parts(model: PreTrainedModel) -> dict[str, tuple[Part, ...]]:
    """Name in `saved_tensors` -> the tensors of the model's files that it is made of: of the experts of a layer, which
    transformers 5 keeps as one tensor, each expert's. `UserError` where they are more than views of it.

    transformers' own conversion is asked, with tensors without memory, which tell where in it each result begins.
    """
    own = parts_of(model)
    if is_te_model(model):
        return own
    tensors = {name: torch.empty(part.shape, device="meta") for name, (part,) in own.items()}
    owners = {StorageWeakRef(tensor.untyped_storage()): name for name, tensor in tensors.items()}
    named = {own[name][0].hf_name: tensor for name, tensor in tensors.items()}
    found: dict[str, list[Part]] = {name: [] for name in own}
    name, advice = model.config.name_or_path, "Take another model, whose files hold its weights as they are."
    with reading("--model_name", name, "the layout of its files", advice), _CopiesAreViews():
        for stored_name, view in revert_weight_conversion(model, named).items():
            owner = owners.get(StorageWeakRef(view.untyped_storage()), "")
            if not owner or (part := _part_of(stored_name, view, own[owner][0].shape)) is None:
                raise ValueError(f"'{stored_name}' is computed from tensors of the model")
            found[owner].append(part)
    kept: Any = getattr(model, "stored_as_they_are", frozenset())
    return {name: own[name] if own[name][0].hf_name in kept else tuple(parts) for name, parts in found.items()}


def _part_of(name: str, view: Tensor, shape: tuple[int, ...]) -> Part | None:
    """The tensor `name` of a file, which is this view of a contiguous one of `shape`; None where rows are torn."""
    if view.shape == shape and view.is_contiguous():
        return Part(name, 0, shape[0] if shape else 1, shape)
    row, offset = math.prod(shape[1:]), int(view.storage_offset())
    last = offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    start, stop = offset // row, last // row + 1
    if stop - start > 1 and (view.shape[0], view.stride(0)) != (stop - start, row):
        return None
    return Part(name, start, stop, tuple(view.shape), view.stride(), offset - start * row)


def initialize_shards_(
    model: PreTrainedModel, generator: torch.Generator, names: Collection[str] | None = None
) -> None:
    """Random weights for every architecture, as Hugging Face draws them for the Llama family: normal, norms of gain
    one, biases zero; with `names` for these parameters. Each is drawn whole on the generator's device, and this rank
    takes its shard, so they do not depend on the number of ranks.
    """
    std, gain = getattr(text_config(model.config), "initializer_range", 0.02), te_llama.initial_gain(model.config)
    for name, parameter in model.named_parameters():
        if is_adapter(name) or (names is not None and name not in names):
            continue
        full = torch.empty(parameter.shape or 1, dtype=parameter.dtype, device=generator.device)
        if name.endswith("bias"):
            full.zero_()
        elif full.ndim == 1:
            full.fill_(gain)
        else:
            full.normal_(0.0, std, generator=generator)
        shard = local_shard(parameter)
        shard.data.copy_(full[shard.start : shard.start + len(shard.data)])


@dataclass(frozen=True)
class LocalShard:
    """A shard along dim 0: `data` [n, ...] holds rows `start` to `start + n` of a parameter; n may be 0."""

    data: Tensor
    start: int
    remainder: Tensor | None = None
    """The lower bits of the fp32 values of bf16 `data`, where these are kept (`llm_fp8.optim.adamw_master`)."""

    def fill(self, part: Part, rows: Any) -> None:
        """Copy what this rank has of a Hugging Face tensor into place, cast to the parameter's dtype; `rows[a:b]` gives
        its rows a to b of dim 0.
        """
        first, last = max(part.start, self.start), min(part.stop, self.start + len(self.data))
        if first >= last:
            return
        wanted = slice(first - part.start, last - part.start) if part.by_rows else slice(None)
        values = rows[wanted] if part.shape else torch.atleast_1d(rows[...])
        if self.data.is_floating_point() and not values.is_floating_point():
            raise UnsupportedArchitecture(f"'{part.hf_name}' holds {values.dtype} in the checkpoint, not floats")
        own = slice(first - self.start, last - self.start)
        if self.data.dtype == torch.bfloat16 and values.dtype in (torch.float32, torch.float16):
            values, remainder = split_master(values.to(self.data.device, torch.float32))
            if self.remainder is not None:
                part.view(self.remainder[own]).copy_(remainder)
        part.view(self.data[own]).copy_(values)


def left_out_of(model: PreTrainedModel) -> tuple[str, ...]:
    """The modules that were taken out of `model`; empty for a language model, and where its weights were drawn."""
    return getattr(model, "left_out", ())


def is_left_out(model: PreTrainedModel) -> Callable[[str], bool]:
    """Whether a stored tensor of this name belongs to a module that was taken out of `model`."""
    modules = "|".join(map(re.escape, left_out_of(model)))
    pattern, renamed = re.compile(rf"({modules})(\.|$)" if modules else r"(?!)"), renaming_on_load(model)
    return lambda name: any(pattern.match(one) for one in (name, renamed(name)))


def targets_of(model: PreTrainedModel, stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, Part]]:
    """Name of a stored tensor -> the name in `saved_tensors` that it belongs to, and as which part; `stored` gives all
    names and shapes. Raises `UnsupportedArchitecture` naming tensors that do not fit.

    Like `from_pretrained` it takes names with or without the base model's prefix, a tied matrix from whichever of its
    names is stored, and experts in one tensor too, as which an export then stores them.
    """
    own, prefix = parts_of(model), f"{model.base_model_prefix}."
    passed_over = re.compile("|".join((*_PASSED_OVER, *ignored_on_load(model))))
    renamed, left_out = renaming_on_load(model), is_left_out(model)

    def spellings(name: str) -> tuple[str, ...]:
        return name, f"{prefix}{name}", name.removeprefix(prefix)

    held = {spelling for name in stored for spelling in spellings(name)}
    kept = frozenset(parts[0].hf_name for parts in own.values() if parts[0].hf_name in held)
    model.stored_as_they_are = kept  # type: ignore[assignment]
    entries = stored_parts(model)
    owners = {part.hf_name: (name, part) for name, parts in entries.items() for part in parts}
    accepted = {name: name for name in owners}
    for name, parts in own.items():
        if len(entries[name]) == 1:
            accepted.setdefault(parts[0].hf_name, entries[name][0].hf_name)
    tied: Mapping[str, str] = model.all_tied_weights_keys
    accepted |= {name: accepted[first] for name, first in tied.items() if first in accepted}

    def known(name: str) -> str:
        return next((one for one in (name, *spellings(renamed(name))) if one in accepted), name)

    names = {name: known(name) for name in stored}
    present = set(names.values())
    found: dict[str, tuple[str, Part]] = {}
    for stored_name, name in names.items():
        if (target := accepted.get(name)) is None:
            if not (passed_over.search(stored_name) or left_out(stored_name)):
                what = f"the checkpoint holds '{stored_name}', which this architecture does not have"
                raise UnsupportedArchitecture(what)
            continue
        if name != target and target in present:  # a tied matrix that is stored twice
            continue
        owner, part = owners[target]
        if stored[stored_name] != part.shape:
            shapes = f"shape {list(stored[stored_name])}, in the config {list(part.shape)}"
            raise UnsupportedArchitecture(f"'{stored_name}' has {shapes}")
        found[stored_name] = owner, part
    if missing := owners.keys() - {part.hf_name for _, part in found.values()}:
        raise UnsupportedArchitecture(f"the checkpoint lacks {listed(sorted(missing))}")
    return found
