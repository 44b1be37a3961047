"""A causal language model and its facts: its layers, where its weights are stored, in which layout, what was left out.

`llm_fp8.models.build` makes it from a config, `llm_fp8.models.fill` gives it weights. Nothing of this is set on Hugging
Face's modules.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llm_fp8.models.layout import is_te_model, left_out_names, stored_parts, targets_of
from llm_fp8.models.weights import RELOAD, StoredCheckpoint
from llm_fp8.utils.errors import UserError, reading
from te_llama import Part


@dataclass(frozen=True, eq=False)
class Model:
    """A model and its facts, each worked out when it is first asked for and then the same for the whole run."""

    module: PreTrainedModel
    stored: StoredCheckpoint | None = None
    """Its weights; None where they are drawn."""
    left_out: tuple[str, ...] = ()
    """The modules of a multimodal checkpoint that text does not pass through, and that `module` does not have."""

    @functools.cached_property
    def layers(self) -> nn.ModuleList:
        """See `decoder_layers`."""
        return decoder_layers(self.module)

    @functools.cached_property
    def uses_te(self) -> bool:
        """Whether the decoder is that of te_llama.py."""
        return is_te_model(self.module)

    @functools.cached_property
    def layout(self) -> dict[str, tuple[Part, ...]]:
        """Name of a parameter or buffer (without adapters) -> the tensors of the files that it is made of."""
        return stored_parts(self.module, () if self.stored is None else self.stored.stored)

    @functools.cached_property
    def targets(self) -> dict[str, tuple[str, Part]]:
        """Name of a stored tensor -> the parameter or buffer that it belongs to, and as which part. Raises `UserError`
        where the files do not fit.
        """
        if self.stored is None:
            return {}
        shapes = {name: entry.shape for name, entry in self.stored.stored.items()}
        with reading("--model_name", self.module.config.name_or_path, "the weights", RELOAD):
            return targets_of(self.module, self.layout, shapes, self.left_out)

    @functools.cached_property
    def source_names(self) -> dict[str, str]:
        """transformers' name of a stored tensor -> the name in the source: families have older and newer layouts."""
        return {part.hf_name: name for name, (_, part) in self.targets.items()}

    def file_name(self, hf_name: str) -> str:
        """The name of a tensor in an export: transformers', but the source's where tensors left out go beside it."""
        return self.source_names.get(hf_name, hf_name) if self.left_out else hf_name

    def read(self, hf_name: str, device: torch.device) -> Tensor:
        """The stored tensor that transformers calls `hf_name`, whole."""
        assert self.stored is not None
        tensor: Tensor = self.stored.read(self.source_names[hf_name], device)
        return tensor

    def left_out_tensors(self) -> dict[str, Tensor]:
        """Stored tensors of modules that were left out, without memory, by their names in the files. An export copies
        them.
        """
        if self.stored is None:
            return {}
        names = left_out_names(self.module, self.left_out, self.stored.stored)
        return {name: self.stored.on_meta(name) for name in self.stored.stored if name in names}

    def read_left_out(self) -> Iterator[tuple[str, Tensor]]:
        """Name and values of `left_out_tensors`, one after the other."""
        for name in self.left_out_tensors():
            assert self.stored is not None
            yield name, self.stored.read(name, torch.device("cpu"))

    def describe_left_out(self) -> str | None:
        """The line for the start of a run; None where nothing is left out, and where weights are drawn."""
        if not self.left_out or self.stored is None:
            return None
        tensors = self.left_out_tensors().values()
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
