"""An exported folder, of a model or of an adapter alone, as transformers loads it: the model, whole, and its tokenizer.

Any other Hugging Face folder and a hub id are loaded in the same way. The weights of an adapter are added to those of
its base model.
"""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from llm_fp8.config.options import ModelConfig
from llm_fp8.models.build import auto_class
from llm_fp8.models.source import ModelSource, is_adapter_folder, load_tokenizer, resolve_source
from llm_fp8.models.weights import finite
from llm_fp8.utils.errors import listed, reading
from llm_fp8.utils.json_files import read_json


def adapter_base(folder: str | Path) -> str | None:
    """Return the folder or hub id of the base model of the adapter in `folder`; None without an adapter."""
    if not is_adapter_folder(folder):
        return None
    with reading("--model_name", folder, "the base model's name in adapter_config.json"):
        name = read_json(Path(folder) / "adapter_config.json")["base_model_name_or_path"]
        return resolve_source(ModelConfig(model_name=name)).location


def load_exported(folder: str | Path, base: str | None, dtype: torch.dtype | str) -> PreTrainedModel:
    """Load the model in `folder`, or the `base` model with the adapter of `folder` added to its weights."""
    with reading("--model_name", folder, "the model", "Give an exported folder, such as runs/x/final, or a hub id."):
        config = AutoConfig.from_pretrained(base or folder)
        model: PreTrainedModel = auto_class(config).from_pretrained(base or folder, dtype=dtype)
        if base is None:
            return model
        model = merged_by_peft(model, folder, "--model_name")
        if (Path(folder) / GENERATION_CONFIG_NAME).is_file():  # which knows the EOS that was trained
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return model


def tokenizer_of(folder: str | Path, base: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder`, or that of the `base` model if an adapter has none."""
    has_tokenizer = base is None or (Path(folder) / "tokenizer_config.json").is_file()
    source = ModelSource(str(folder), str(folder) if has_tokenizer else str(base), is_random=False)
    return load_tokenizer(ModelConfig(model_name=str(folder)), source)[0]


def merged_by_peft(model: PreTrainedModel, folder: str | Path, flag: str) -> PreTrainedModel:
    """Add the PEFT adapter in `folder`, of any kind, to the weights of `model`. Raises `UserError`, which names `flag`,
    where it does not fit them, or makes them infinite.
    """
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    advice = "Give the base model that it was trained on, or use it with PEFT, unmerged."
    with reading(flag, folder, "the adapter into the model's weights", advice):
        adapted: Any = PeftModel.from_pretrained(model, str(folder))  # matrices in fp32, so that sums are rounded once
        result = adapted.load_adapter(str(folder), "default")  # again, as the first time does not tell what fits
        if misfits := [*result.missing_keys, *result.unexpected_keys]:
            raise ValueError(f"model and adapter do not both have {listed(misfits)}")
        uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        tuners: list[Any] = [module for module in adapted.modules() if isinstance(module, BaseTunerLayer)]
        for layer in (tuner.get_base_layer() for tuner in tuners):
            if uses[id(getattr(layer, "weight", None))] > 1:  # tied: PEFT adds to one, and would merge into both
                layer.weight = nn.Parameter(layer.weight.detach().clone())
        merged: PreTrainedModel = adapted.merge_and_unload()
    deque(finite(merged.named_parameters(), f"{flag} {folder}, merged"), maxlen=0)
    return merged
