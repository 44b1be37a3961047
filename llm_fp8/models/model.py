"""A causal language model and its facts: its layers, the layout and place of its files, and the modules left out.

`llm_fp8.models.build` builds it from a config and gives it weights. No attribute is set on Hugging Face's modules.
Every parameter consists of one or more tensors of the files, stacked along dim 0 (`te_llama.Part`).
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

_PASSED_OVER = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")  # older checkpoints store these buffers


@dataclass(frozen=True, eq=False)
class Model:
    """A model and its facts. Each fact is computed when first needed and then stays the same for the whole run."""

    module: PreTrainedModel
    stored: StoredCheckpoint | None = None  # its weights; None if they are drawn
    left_out: tuple[str, ...] = ()  # modules of a multimodal checkpoint missing in `module`: text does not use them
    full_tensor: Callable[[Tensor], Tensor] = Tensor.detach  # unshards a parameter; collective if it is sharded

    @functools.cached_property
    def layers(self) -> nn.ModuleList:
        """The decoder layers in order."""
        return decoder_layers(self.module)

    @functools.cached_property
    def uses_te(self) -> bool:
        """True if decoder layers are those of te_llama.py."""
        return any(isinstance(module, te_llama.TEDecoderLayer) for module in self.module.modules())

    @functools.cached_property
    def layout(self) -> dict[str, tuple[Part, ...]]:
        """Name in `saved_tensors` -> the tensors in the model's files that it consists of.

        transformers 5 may fuse several tensors of the files (one per matrix); if `stored` has the fused tensor, it is
        the layout. Else we run the conversion for saving on tensors without memory: views show where results begin.
        Raises `UserError` if a tensor of the files is not a view of a model's tensor.
        """
        if self.uses_te:
            return te_llama.parameter_map(self.module)
        from transformers.core_model_loading import revert_weight_conversion

        # A parameter that DeepSpeed has sharded is empty and keeps its shape in `ds_shape`.
        shapes = {name: tuple(getattr(t, "ds_shape", t.shape)) for name, t in saved_tensors(self.module).items()}
        whole = {name: te_llama.stacked((name, shape)) for name, shape in shapes.items()}
        tensors = {name: torch.empty(part.shape, device="meta") for name, (part,) in whole.items()}
        owners = {StorageWeakRef(tensor.untyped_storage()): name for name, tensor in tensors.items()}
        stored_names = self.stored.stored if self.stored else ()
        in_files = {spelling for name in stored_names for spelling in self._spellings(name)}
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
        """Name of a stored tensor -> the name in `saved_tensors` that it belongs to, and the part that it fills.

        As in `from_pretrained`, stored names may have or lack the base model's prefix, and a tied matrix may have any
        of its names. Raises `UserError` naming tensors that do not fit.
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
            names = {name: next(filter(accepted.__contains__, candidates(name)), name) for name in stored.stored}
            unknown = [name for name in names if names[name] not in accepted and not passed_over.search(name)]
            if surplus := sorted(set(unknown).difference(self.left_out_of(unknown))):
                problem = f"the checkpoint holds '{surplus[0]}', which this architecture does not have"
                raise UnsupportedArchitecture(problem)
            present = set(names.values())
            targets: dict[str, tuple[str, Part]] = {}
            for stored_name, name in names.items():
                if (target := accepted.get(name)) is None or (name != target and target in present):
                    continue  # not a tensor of the model, or a tied matrix stored twice
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
        """transformers' renaming of stored tensors, built only if a stored name is unknown."""
        return renaming_on_load(self.module)

    @functools.cached_property
    def source_names(self) -> dict[str, str]:
        """transformers' name of a stored tensor -> its name in the source: a family may have an older layout."""
        return {part.hf_name: name for name, (_, part) in self.targets.items()}

    def file_name(self, hf_name: str) -> str:
        """Return a tensor's name in an export: transformers', or the source's if tensors left out are exported too."""
        return self.source_names.get(hf_name, hf_name) if self.left_out else hf_name

    def read(self, hf_name: str, device: torch.device) -> Any:
        """Read the whole stored tensor that transformers calls `hf_name`."""
        assert self.stored is not None
        return self.stored.read(self.source_names[hf_name], device)

    def left_out_of(self, names: Iterable[str]) -> list[str]:
        """Return those of `names`, names of stored tensors, that belong to modules left out."""
        pattern = re.compile(rf"({'|'.join(map(re.escape, self.left_out))})(\.|$)")
        return [name for name in names if self.left_out and (pattern.match(name) or pattern.match(self._renamed(name)))]

    @functools.cached_property
    def left_out_tensors(self) -> dict[str, Tensor]:
        """Stored tensors of modules left out, without memory, by name in the files; an export copies them."""
        stored = self.stored
        return {} if stored is None else {name: stored.on_meta(name) for name in self.left_out_of(stored.stored)}

    def describe_left_out(self) -> str:
        """Return the line for the start of a run, or "" if nothing is left out or weights are drawn."""
        if not self.left_out or self.stored is None:
            return ""
        tensors = self.left_out_tensors.values()
        size = f"{len(tensors)} tensors, {sum(tensor.nbytes for tensor in tensors) / 1e6:,.1f} MB"
        return f"only the text model is trained: {', '.join(self.left_out)} ({size}) are exported unchanged"


def text_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the innermost model with the embedding: it maps input ids to the last hidden states."""
    embedding = model.get_input_embeddings()
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part for part in models if any(module is embedding for module in part.modules())][-1]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers in order; raise `UserError` for an architecture without a single list of layers."""
    decoder = text_decoder(model)
    layers = getattr(decoder, "layers", getattr(decoder, "h", None))
    if not isinstance(layers, nn.ModuleList):
        problem = f"{type(model).__name__} has no list of decoder layers"
        raise UserError(f"--model_name {model.config.name_or_path}: {problem}; give a Llama, Qwen or Mistral.")
    return layers


def is_adapter(name: str) -> bool:
    """Return True if `name` is that of an adapter's parameter or module, PEFT's or the TE decoder's."""
    return ".lora_A." in name or ".lora_B." in name or name.endswith(".adapters")


def name_without_adapter(name: str) -> str:
    """Return the name in the model without adapters; PEFT's is `...q_proj.base_layer.weight`."""
    return name.replace(".base_layer", "")


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name in the model without adapters; a tied parameter appears once."""
    tensors: dict[str, Tensor] = {name: tensor for name, tensor in model.named_parameters() if not is_adapter(name)}
    for prefix, module in model.named_modules():
        if buffers := dict(module.named_buffers(recurse=False)):
            persistent = buffers.keys() & module.state_dict(keep_vars=True).keys()
            tensors |= {f"{prefix}.{name}".lstrip("."): buffers[name] for name in buffers if name in persistent}
    return {name_without_adapter(name): tensor for name, tensor in tensors.items()}


class _CopiesAreViews(TorchFunctionMode):
    """A mode in which `Tensor.contiguous` returns the tensor unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _part_of(name: str, view: Tensor, shape: tuple[int, ...]) -> Part | None:
    """Return the part for `name`, a `view` of a contiguous tensor of `shape`; None if the view cuts across rows."""
    if view.shape == shape and view.is_contiguous():
        return Part(name, 0, shape[0] if shape else 1, shape)
    row, offset = math.prod(shape[1:]), int(view.storage_offset())
    last = offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    start, stop = offset // row, last // row + 1
    if stop - start > 1 and (view.shape[0], view.stride(0)) != (stop - start, row):
        return None
    return Part(name, start, stop, tuple(view.shape), view.stride(), offset - start * row)
