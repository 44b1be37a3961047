"""Load a model that a run has exported: a folder with a whole model, or with a PEFT adapter of another one."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from llm_fp8.config.options import ModelConfig
from llm_fp8.config.parser import is_adapter_folder
from llm_fp8.models.build import auto_class
from llm_fp8.models.source import ModelSource, finite, load_tokenizer, resolve_source
from llm_fp8.utils.errors import UserError, listed, reading


def adapter_base(folder: str | Path) -> str | None:
    """Return the folder or hub id of the base model of the adapter in `folder`, or None if there is no adapter."""
    return resolve_source(ModelConfig(model_name=str(folder))).location if is_adapter_folder(folder) else None


def load_exported(folder: str | Path, base: str | None, dtype: torch.dtype | str) -> PreTrainedModel:
    """Load the model in `folder`. If `base` is given, load the model `base` and merge the adapter in `folder`."""
    with reading("--model_name", folder, "the model", "Give an exported folder, such as runs/x/final, or a hub id."):
        config = AutoConfig.from_pretrained(base or folder)
        model: PreTrainedModel = auto_class(config).from_pretrained(base or folder, dtype=dtype)
        if base is None:
            return model
        model = merged_by_peft(model, folder, "--model_name")
        if (Path(folder) / GENERATION_CONFIG_NAME).is_file():  # it contains the EOS of the training data
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return model


def tokenizer_of(folder: str | Path, base: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder`. If `folder` has an adapter without a tokenizer, load that of the model `base`."""
    source = ModelSource(str(folder), str(base or folder), is_random=False, adapter=str(folder))
    return load_tokenizer(ModelConfig(model_name=str(folder)), source)[0]


def merged_by_peft(model: PreTrainedModel, folder: str | Path, flag: str) -> PreTrainedModel:
    """Merge the PEFT adapter in `folder` into `model`. Raise `UserError` about `flag` if they misfit or overflow."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(f"{flag} {folder}: its base model is stored in fp8; merge with the same model in bf16.")
    advice = "Give the base model that the adapter was trained on, or use the adapter unmerged, with PEFT."
    with reading(flag, folder, "the adapter into the model's weights", advice):
        adapted: Any = PeftModel.from_pretrained(model, str(folder))  # fp32 matrices, so sums are rounded once
        result = adapted.load_adapter(str(folder), "default")  # load again, since `from_pretrained` hides misfits
        if misfits := [*result.missing_keys, *result.unexpected_keys]:
            raise ValueError(f"model and adapter do not both have {listed(misfits)}")
        uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        tuners: list[Any] = [module for module in adapted.modules() if isinstance(module, BaseTunerLayer)]
        for layer in (tuner.get_base_layer() for tuner in tuners):
            if uses[id(getattr(layer, "weight", None))] > 1:  # tied; PEFT adapts one layer, but would merge into both
                layer.weight = nn.Parameter(layer.weight.detach().clone())
        merged: PreTrainedModel = adapted.merge_and_unload()
    deque(finite(merged.named_parameters(), f"{flag} {folder}, merged"), maxlen=0)
    return merged
