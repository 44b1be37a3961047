"""How the tensors of a checkpoint's files lie in a model's parameters, and which rows of them this rank holds.

Every parameter is one or more Hugging Face tensors stacked along dim 0 (`te_llama.Part`). FSDP shards it along dim 0:
of R rows over n ranks each rank holds ceil(R / n), the last ranks fewer or none. So a rank's shard of a checkpoint is a
range of rows of some tensors, and loading (fill.py) and export (export.py) are slicing.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

import te_llama
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
    """Parameters (without adapters) and persistent buffers, by their names in the model without adapters; a tied
    parameter once, under its first name.
    """
    tensors: dict[str, Tensor] = {name: tensor for name, tensor in model.named_parameters() if not is_adapter(name)}
    for prefix, module in model.named_modules():
        for name, buffer in persistent_buffers(module):
            tensors[f"{prefix}.{name}".lstrip(".")] = buffer
    return {name_without_adapter(name): tensor for name, tensor in tensors.items()}


def parts_of(model: PreTrainedModel) -> dict[str, tuple[Part, ...]]:
    """Name in `saved_tensors` -> the tensors of transformers' model that it is made of."""
    if is_te_model(model):
        return te_llama.parameter_map(te_llama.spec_of(model))
    # A parameter that DeepSpeed has sharded is empty and keeps its shape in `ds_shape`.
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in saved_tensors(model).items()}
    return {name: (Part(name, 0, shape[0] if shape else 1, shape),) for name, shape in shapes.items()}


class _CopiesAreViews(TorchFunctionMode):
    """In it `Tensor.contiguous` returns the tensor as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def stored_parts(model: PreTrainedModel, stored: Collection[str] = ()) -> dict[str, tuple[Part, ...]]:
    """Name in `saved_tensors` -> the tensors of the model's files that it is made of. transformers 5 keeps the experts
    of a layer in one tensor, files one for each expert, unless the names `stored` in them say otherwise. Raises
    `UserError` where a file's tensor is more than a view of the model's.

    transformers' conversion for saving runs on tensors without memory, which tell where in them each result begins.
    """
    whole = parts_of(model)
    if is_te_model(model):
        return whole
    from transformers.core_model_loading import revert_weight_conversion

    tensors = {name: torch.empty(part.shape, device="meta") for name, (part,) in whole.items()}
    owners = {StorageWeakRef(tensor.untyped_storage()): name for name, tensor in tensors.items()}
    in_files = {spelling for name in stored for spelling in _spellings(model, name)}
    layout: dict[str, list[Part]] = {name: [] for name in whole}
    name, advice = model.config.name_or_path, "Take another model, whose files hold its weights as they are."
    with reading("--model_name", name, "the layout of its files", advice), _CopiesAreViews():
        for stored_name, view in revert_weight_conversion(model, dict(tensors)).items():
            owner = owners.get(StorageWeakRef(view.untyped_storage()), "")
            if not owner or (part := _part_of(stored_name, view, whole[owner][0].shape)) is None:
                raise ValueError(f"'{stored_name}' is computed from tensors of the model")
            layout[owner].append(part)
    return {name: whole[name] if name in in_files else tuple(parts) for name, parts in layout.items()}


def _spellings(model: PreTrainedModel, name: str) -> tuple[str, str, str]:
    """The names under which `from_pretrained` looks for a stored tensor: as it is, with the base's prefix, without."""
    prefix = f"{model.base_model_prefix}."
    return name, f"{prefix}{name}", name.removeprefix(prefix)


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


def left_out_names(model: PreTrainedModel, left_out: Collection[str], names: Collection[str]) -> set[str]:
    """Those `names` of stored tensors that belong to the modules `left_out` of `model`."""
    if not left_out:
        return set()
    pattern, renamed = re.compile(rf"({'|'.join(map(re.escape, left_out))})(\.|$)"), renaming_on_load(model)
    return {name for name in names if any(pattern.match(one) for one in (name, renamed(name)))}


def targets_of(
    model: PreTrainedModel,
    layout: Mapping[str, tuple[Part, ...]],
    stored: Mapping[str, tuple[int, ...]],
    left_out: Collection[str],
) -> dict[str, tuple[str, Part]]:
    """Name of a stored tensor -> the name in `saved_tensors` that it belongs to, and as which part; `stored` gives all
    names and shapes, `layout` is that of `stored_parts`. Raises `UnsupportedArchitecture` naming tensors that do not
    fit and are not `left_out`.

    Like `from_pretrained` it takes names with or without the base model's prefix, and a tied matrix from whichever of
    its names is stored.
    """
    passed_over = re.compile("|".join((*_PASSED_OVER, *ignored_on_load(model))))
    owners = {part.hf_name: (name, part) for name, parts in layout.items() for part in parts}
    accepted = {name: name for name in owners}
    for name, parts in layout.items():
        if len(parts) == 1:
            accepted.setdefault(name, parts[0].hf_name)
    tied: Mapping[str, str] = model.all_tied_weights_keys
    accepted |= {name: accepted[first] for name, first in tied.items() if first in accepted}
    rename = functools.cache(lambda: renaming_on_load(model))  # which a model without unknown names does not need

    def candidates(name: str) -> Iterator[str]:
        yield name
        yield from _spellings(model, rename()(name))

    names = {name: next((one for one in candidates(name) if one in accepted), name) for name in stored}
    unknown = {name for name, one in names.items() if one not in accepted and not passed_over.search(name)}
    if surplus := sorted(unknown - left_out_names(model, left_out, unknown)):
        raise UnsupportedArchitecture(f"the checkpoint holds '{surplus[0]}', which this architecture does not have")
    present = set(names.values())
    targets: dict[str, tuple[str, Part]] = {}
    for stored_name, name in names.items():
        if (target := accepted.get(name)) is None or (name != target and target in present):
            continue  # no tensor of the model, or a tied matrix that is stored twice
        owner, part = owners[target]
        if stored[stored_name] != part.shape:
            shapes = f"shape {list(stored[stored_name])}, in the config {list(part.shape)}"
            raise UnsupportedArchitecture(f"'{stored_name}' has {shapes}")
        targets[stored_name] = owner, part
    if missing := owners.keys() - {part.hf_name for _, part in targets.values()}:
        raise UnsupportedArchitecture(f"the checkpoint lacks {listed(sorted(missing))}")
    return targets
