"""A causal language model with its properties: layers, stored weights, their layout, and modules left out.

`llm_fp8.models.build` builds it and fills its weights. A parameter stacks tensors of files on dim 0 (`te_llama.Part`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import str_to_torch_dtype

import te_llama
from llm_fp8.models.source import RELOAD, StoredCheckpoint
from llm_fp8.utils.errors import UserError, listed, reading
from llm_fp8.utils.hf_internals import ignored_on_load, renaming_on_load
from te_llama import Part, UnsupportedArchitecture

_IGNORED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")  # buffers that older checkpoints store


@dataclass(frozen=True, eq=False)
class Model:
    """A causal language model with its properties. Cached properties are computed once and never change."""

    module: PreTrainedModel
    stored: StoredCheckpoint | None = None  # the stored weights; None if they are random
    left_out: tuple[str, ...] = ()  # modules of a multimodal checkpoint that `module` lacks: text does not use them
    full_tensor: Callable[[Tensor], Tensor] = Tensor.detach  # unshards a parameter; a collective if it is sharded

    @functools.cached_property
    def layers(self) -> nn.ModuleList:
        return decoder_layers(self.module)

    @functools.cached_property
    def uses_te(self) -> bool:
        """True if any decoder layer is a `te_llama.TEDecoderLayer`."""
        return any(isinstance(module, te_llama.TEDecoderLayer) for module in self.module.modules())

    @functools.cached_property
    def layout(self) -> dict[str, tuple[Part, ...]]:
        """Name of each tensor in `saved_tensors` -> the tensors of the model's files that make it up.

        transformers 5 may fuse several tensors of the files into one. If `stored` has the fused tensor, the entry is
        that tensor. Otherwise transformers' conversion for saving runs on meta tensors, and the views of them that it
        returns define the layout. Raises `UserError` if it returns anything but views.
        """
        if self.uses_te:
            return te_llama.parameter_map(self.module)
        # A parameter that DeepSpeed has sharded is empty and stores its shape in `ds_shape`.
        shapes = {name: tuple(getattr(t, "ds_shape", t.shape)) for name, t in saved_tensors(self.module).items()}
        whole = {name: te_llama.stacked((name, shape)) for name, shape in shapes.items()}
        tensors = {name: torch.empty(part.shape, device="meta") for name, (part,) in whole.items()}
        owners = {StorageWeakRef(tensor.untyped_storage()): name for name, tensor in tensors.items()}
        in_files = {each for name in (self.stored.stored if self.stored else ()) for each in self._spellings(name)}
        layout: dict[str, list[Part]] = {name: [] for name in whole}
        name, advice = self.module.config.name_or_path, "Give a model whose files hold its weights unconverted."
        with reading("--model_name", name, "the layout of its files", advice), _CopiesAreViews():
            for stored_name, view in revert_weight_conversion(self.module, dict(tensors)).items():
                owner = owners.get(StorageWeakRef(view.untyped_storage()), "")
                if not owner or (part := _part_of(stored_name, view, whole[owner][0].shape)) is None:
                    raise ValueError(f"'{stored_name}' is computed from tensors of the model")
                layout[owner].append(part)
        return {name: whole[name] if name in in_files else tuple(parts) for name, parts in layout.items()}

    @functools.cached_property
    def targets(self) -> dict[str, tuple[str, Part]]:
        """Name of each stored tensor X -> name (in `saved_tensors`) of the tensor that contains X, and the `Part` of X.

        As in `from_pretrained`, stored names may have or lack the base model's prefix, and a tied matrix may have any
        of its names. Raises `UserError` with the names of tensors that do not match the model.
        """
        if (stored := self.stored) is None:
            return {}
        ignored = re.compile("|".join((*_IGNORED, *ignored_on_load(self.module))))
        owners = {part.hf_name: (name, part) for name, parts in self.layout.items() for part in parts}
        accepted = {name: parts[0].hf_name for name, parts in self.layout.items() if len(parts) == 1}
        accepted |= {name: name for name in owners}
        tied: Mapping[str, str] = self.module.all_tied_weights_keys
        accepted |= {name: accepted[first] for name, first in tied.items() if first in accepted}

        with reading("--model_name", self.module.config.name_or_path, "the weights", RELOAD):
            names = {name: name for name in stored.stored}
            for name in stored.stored.keys() - accepted.keys():
                names[name] = next(filter(accepted.__contains__, self._spellings(self._renamed(name))), name)
            unknown = [name for name in names if names[name] not in accepted and not ignored.search(name)]
            if surplus := sorted(set(unknown).difference(self.left_out_of(unknown))):
                problem = f"the checkpoint holds '{surplus[0]}', which this architecture does not have"
                raise UnsupportedArchitecture(problem)
            present = set(names.values())
            targets: dict[str, tuple[str, Part]] = {}
            for stored_name, name in names.items():
                if (target := accepted.get(name)) is None or (name != target and target in present):
                    continue  # the tensor is not in the model, or is a tied matrix that is stored twice
                owner, part = owners[target]
                if (shape := stored.stored[stored_name].shape) != part.shape:
                    shapes = f"shape {list(shape)}, but the config says {list(part.shape)}"
                    raise UnsupportedArchitecture(f"'{stored_name}' has {shapes}")
                targets[stored_name] = owner, part
            if missing := owners.keys() - {part.hf_name for _, part in targets.values()}:
                raise UnsupportedArchitecture(f"the checkpoint lacks {listed(sorted(missing))}")
            return targets

    def _spellings(self, name: str) -> tuple[str, str, str]:
        """Return the names that `from_pretrained` tries: unchanged, with the base model's prefix, and without it."""
        prefix = f"{self.module.base_model_prefix}."
        return name, f"{prefix}{name}", name.removeprefix(prefix)

    @functools.cached_property
    def _renamed(self) -> Callable[[str], str]:
        """transformers' function that renames stored tensors. Created only if a stored name is unknown."""
        return renaming_on_load(self.module)

    @functools.cached_property
    def source_names(self) -> dict[str, str]:
        """Name of a tensor in transformers -> name in the files, which may be from an older version of transformers."""
        return {part.hf_name: name for name, (_, part) in self.targets.items()}

    def file_name(self, hf_name: str) -> str:
        """Return a tensor's export name: its name in the source's files if modules were left out, else `hf_name`."""
        return self.source_names.get(hf_name, hf_name) if self.left_out else hf_name

    def export_dtype(self, hf_name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of `hf_name`, a part of `tensor`, in the files. For fp8 or none: `dtype` or a buffer's."""
        stored = self.stored.stored.get(self.source_names.get(hf_name, "")) if self.stored else None
        default = dtype if isinstance(tensor, nn.Parameter) else tensor.dtype
        return default if stored is None or stored.dtype.startswith("F8") else str_to_torch_dtype[stored.dtype]

    def left_out_of(self, names: Iterable[str]) -> list[str]:
        """Return those of `names`, names of stored tensors, that belong to modules in `left_out`."""
        pattern = re.compile(rf"({'|'.join(map(re.escape, self.left_out))})(\.|$)")
        return [name for name in names if self.left_out and (pattern.match(name) or pattern.match(self._renamed(name)))]

    @functools.cached_property
    def left_out_tensors(self) -> dict[str, Tensor]:
        """Name in the files -> tensor on "meta" that an export copies: left out, or ignored by transformers."""
        if (stored := self.stored) is None:
            return {}
        patterns = ignored_on_load(self.module) if stored.fp8 is None else ()
        ignored = [n for n in stored.stored if n not in self.targets and any(re.search(p, n) for p in patterns)]
        return {name: stored.on_meta(name) for name in (*ignored, *self.left_out_of(stored.stored))}

    def describe_left_out(self) -> str:
        """Return a line to print when a run starts, or "" if there is nothing to export unchanged."""
        if not (tensors := self.left_out_tensors):
            return ""
        size = f"{len(tensors)} tensors, {sum(tensor.nbytes for tensor in tensors.values()) / 1e6:,.1f} MB"
        return f"not trained, exported unchanged: {', '.join(self.left_out) or next(iter(tensors))} ({size})"


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the decoder (input ids to hidden states), which is the innermost model that contains the embedding."""
    embedding = model.get_input_embeddings()
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part for part in models if any(module is embedding for module in part.modules())][-1]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers in order. Raise `UserError` if the decoder has no list `layers` or `h`."""
    decoder = text_decoder(model)
    layers = getattr(decoder, "layers", getattr(decoder, "h", None))
    if not isinstance(layers, nn.ModuleList):
        problem = f"{type(model).__name__} has no list of decoder layers"
        raise UserError(f"--model_name {model.config.name_or_path}: {problem}; give a Llama, Qwen or Mistral.")
    return layers


def is_adapter(name: str) -> bool:
    """Return True if `name` is the name of a parameter or module of an adapter (PEFT's or the TE decoder's)."""
    return ".lora_A." in name or ".lora_B." in name or name.endswith(".adapters")


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and persistent buffers, by their names without adapters. Tied parameters appear once."""
    tensors: dict[str, Tensor] = {name: tensor for name, tensor in model.named_parameters() if not is_adapter(name)}
    for prefix, module in model.named_modules():
        if buffers := dict(module.named_buffers(recurse=False)):
            persistent = buffers.keys() & module.state_dict(keep_vars=True).keys()
            tensors |= {f"{prefix}.{name}".lstrip("."): buffers[name] for name in buffers if name in persistent}
    return {name.replace(".base_layer", ""): tensor for name, tensor in tensors.items()}  # PEFT inserted it


class _CopiesAreViews(TorchFunctionMode):
    """Mode in which `Tensor.contiguous` returns the tensor itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _part_of(name: str, view: Tensor, shape: tuple[int, ...]) -> Part | None:
    """Return the part of a contiguous tensor of `shape` that `view` covers, or None. `name` is that of the view."""
    if view.shape == shape and view.is_contiguous():
        return Part(name, 0, shape[0] if shape else 1, shape)
    row, offset = math.prod(shape[1:]), int(view.storage_offset())
    last = offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    start, stop = offset // row, last // row + 1
    if stop - start > 1 and (view.shape[0], view.stride(0)) != (stop - start, row):
        return None
    return Part(name, start, stop, tuple(view.shape), view.stride(), offset - start * row)
