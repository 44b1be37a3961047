"""A causal language model and its facts: its layers, the layout of its files, where they are, and what was left out.

`llm_fp8.models.build` makes it from a config, `llm_fp8.models.build` gives it weights; nothing is set on Hugging Face's
modules. Every parameter is one or more tensors of the files stacked along dim 0 (`te_llama.Part`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

import te_llama
from llm_fp8.models.source import RELOAD, StoredCheckpoint
from llm_fp8.utils.errors import UserError, listed, reading
from llm_fp8.utils.hf_internals import ignored_on_load, renaming_on_load
from te_llama import Part, UnsupportedArchitecture

_PASSED_OVER = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")  # buffers stored in older checkpoints, computed today


@dataclass(frozen=True, eq=False)
class Model:
    """A model and its facts, each worked out when it is first needed and then the same for the whole run."""

    module: PreTrainedModel
    stored: StoredCheckpoint | None = None  # its weights; None where they are drawn
    left_out: tuple[str, ...] = ()  # modules of a multimodal checkpoint, not passed by text, that `module` lacks
    full_tensor: Callable[[Tensor], Tensor] = Tensor.detach  # unshards a parameter; collective where it is sharded

    @functools.cached_property
    def layers(self) -> nn.ModuleList:
        return decoder_layers(self.module)

    @functools.cached_property
    def uses_te(self) -> bool:
        """True for decoder layers of te_llama.py."""
        return any(isinstance(module, te_llama.TEDecoderLayer) for module in self.module.modules())

    @functools.cached_property
    def layout(self) -> dict[str, tuple[Part, ...]]:
        """Name in `saved_tensors` -> the tensors of the model's files that it is made of. transformers 5 may keep in
        one tensor what files hold in several, one for each matrix, unless `stored` has it in one too. Its conversion
        for saving runs on tensors without memory, which tell where in them each result begins. Raises `UserError` where
        a file's tensor is more than a view of the model's.
        """
        if self.uses_te:
            return te_llama.parameter_map(self.module)
        from transformers.core_model_loading import revert_weight_conversion

        # A parameter that DeepSpeed has sharded is empty and keeps its shape in `ds_shape`.
        shapes = {name: tuple(getattr(one, "ds_shape", one.shape)) for name, one in saved_tensors(self.module).items()}
        whole = {name: te_llama.stacked((name, shape)) for name, shape in shapes.items()}
        tensors = {name: torch.empty(part.shape, device="meta") for name, (part,) in whole.items()}
        owners = {StorageWeakRef(tensor.untyped_storage()): name for name, tensor in tensors.items()}
        in_files = {one for name in (self.stored.stored if self.stored else ()) for one in self._spellings(name)}
        layout: dict[str, list[Part]] = {name: [] for name in whole}
        name, advice = self.module.config.name_or_path, "Take another model, whose files hold its weights as they are."
        with reading("--model_name", name, "the layout of its files", advice), _CopiesAreViews():
            for stored_name, view in revert_weight_conversion(self.module, dict(tensors)).items():
                owner = owners.get(StorageWeakRef(view.untyped_storage()), "")
                if not owner or (part := _part_of(stored_name, view, whole[owner][0].shape)) is None:
                    raise ValueError(f"'{stored_name}' is computed from tensors of the model")
                layout[owner].append(part)
        return {name: whole[name] if name in in_files else tuple(parts) for name, parts in layout.items()}

    @functools.cached_property
    def targets(self) -> dict[str, tuple[str, Part]]:
        """Name of a stored tensor -> the name in `saved_tensors` that it belongs to, and as which part. Names with or
        without the base model's prefix fit, as in `from_pretrained`, and a tied matrix under any of its names. Raises
        `UserError` naming tensors that do not fit.
        """
        if (stored := self.stored) is None:
            return {}
        passed_over = re.compile("|".join((*_PASSED_OVER, *ignored_on_load(self.module))))
        owners = {part.hf_name: (name, part) for name, parts in self.layout.items() for part in parts}
        accepted = {name: parts[0].hf_name for name, parts in self.layout.items() if len(parts) == 1}
        accepted |= {name: name for name in owners}
        tied: Mapping[str, str] = self.module.all_tied_weights_keys
        accepted |= {name: accepted[first] for name, first in tied.items() if first in accepted}

        def candidates(name: str) -> Iterator[str]:
            yield name
            yield from self._spellings(self._renamed(name))

        with reading("--model_name", self.module.config.name_or_path, "the weights", RELOAD):
            names = {name: next((one for one in candidates(name) if one in accepted), name) for name in stored.stored}
            unknown = [name for name, one in names.items() if one not in accepted and not passed_over.search(name)]
            if surplus := sorted(set(unknown).difference(self.left_out_of(unknown))):
                what = f"the checkpoint holds '{surplus[0]}', which this architecture does not have"
                raise UnsupportedArchitecture(what)
            present = set(names.values())
            targets: dict[str, tuple[str, Part]] = {}
            for stored_name, name in names.items():
                if (target := accepted.get(name)) is None or (name != target and target in present):
                    continue  # no tensor of the model, or a tied matrix that is stored twice
                owner, part = owners[target]
                if (shape := stored.stored[stored_name].shape) != part.shape:
                    shapes = f"shape {list(shape)}, in the config {list(part.shape)}"
                    raise UnsupportedArchitecture(f"'{stored_name}' has {shapes}")
                targets[stored_name] = owner, part
            if missing := owners.keys() - {part.hf_name for _, part in targets.values()}:
                raise UnsupportedArchitecture(f"the checkpoint lacks {listed(sorted(missing))}")
            return targets

    def _spellings(self, name: str) -> tuple[str, str, str]:
        """A stored tensor's names as `from_pretrained` tries them: as it is, with the base model's prefix, without."""
        prefix = f"{self.module.base_model_prefix}."
        return name, f"{prefix}{name}", name.removeprefix(prefix)

    @functools.cached_property
    def _renamed(self) -> Callable[[str], str]:
        return renaming_on_load(self.module)  # which a model whose names are all known does not need

    @functools.cached_property
    def source_names(self) -> dict[str, str]:
        """transformers' name of a stored tensor -> the name in the source: families have older and newer layouts."""
        return {part.hf_name: name for name, (_, part) in self.targets.items()}

    def file_name(self, hf_name: str) -> str:
        """The name of a tensor in an export: transformers', but the source's where tensors left out go beside it."""
        return self.source_names.get(hf_name, hf_name) if self.left_out else hf_name

    def read(self, hf_name: str, device: torch.device) -> Any:
        """The stored tensor that transformers calls `hf_name`, whole."""
        assert self.stored is not None
        return self.stored.read(self.source_names[hf_name], device)

    def left_out_of(self, names: Iterable[str]) -> list[str]:
        """Keep of `names` of stored tensors those that belong to modules left out."""
        pattern = re.compile(rf"({'|'.join(map(re.escape, self.left_out))})(\.|$)")
        return [name for name in names if self.left_out and (pattern.match(name) or pattern.match(self._renamed(name)))]

    @functools.cached_property
    def left_out_tensors(self) -> dict[str, Tensor]:
        """Stored tensors of modules left out, without memory, by their names in the files; an export copies them."""
        stored = self.stored
        return {} if stored is None else {name: stored.on_meta(name) for name in self.left_out_of(stored.stored)}

    def describe_left_out(self) -> str:
        """The line for the start of a run; empty where nothing is left out, and where weights are drawn."""
        if not self.left_out or self.stored is None:
            return ""
        tensors = self.left_out_tensors.values()
        what = f"{len(tensors)} tensors, {sum(tensor.nbytes for tensor in tensors) / 1e6:,.1f} MB"
        return f"text alone is trained: {', '.join(self.left_out)} ({what}) go into the export as they are"


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside of `model`, the innermost with the embedding: from input ids to the last hidden states."""
    embedding = model.get_input_embeddings()
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [one for one in models if any(module is embedding for module in one.modules())][-1]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers in order; raises `UserError` for an architecture without a single list of them."""
    decoder = text_decoder(model)
    layers = getattr(decoder, "layers", getattr(decoder, "h", None))
    if not isinstance(layers, nn.ModuleList):
        what = f"{type(model).__name__} has no list of decoder layers"
        raise UserError(f"--model_name {model.config.name_or_path}: {what}; give a Llama, Qwen or Mistral.")
    return layers


def is_adapter(name: str) -> bool:
    """True for the name of a parameter or module of an adapter, PEFT's or the TE decoder's."""
    return ".lora_A." in name or ".lora_B." in name or name.endswith(".adapters")


def name_without_adapter(name: str) -> str:
    """The name in the model without adapters; PEFT's is `...q_proj.base_layer.weight`."""
    return name.replace(".base_layer", "")


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in the model without adapters; a tied parameter once."""
    tensors: dict[str, Tensor] = {name: tensor for name, tensor in model.named_parameters() if not is_adapter(name)}
    for prefix, module in model.named_modules():
        if buffers := dict(module.named_buffers(recurse=False)):
            persistent = buffers.keys() & module.state_dict(keep_vars=True).keys()
            tensors |= {f"{prefix}.{name}".lstrip("."): buffers[name] for name in buffers if name in persistent}
    return {name_without_adapter(name): tensor for name, tensor in tensors.items()}


class _CopiesAreViews(TorchFunctionMode):
    """In it `Tensor.contiguous` returns the tensor as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


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
