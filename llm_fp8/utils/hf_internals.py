"""The private names of transformers that this project uses; no other file knows them. Read in versions 5.17 and 5.23.
A plain model trains without them: each is imported, or looked up, only by what needs it.

name                                                          noticed by
config._attn_implementation                                   tests/models/test_build.py
model_class._supports_flash_attn                              tests/models/test_build.py
auto_class._model_mapping                                     tests/models/test_build.py
get_model_conversion_mapping, WeightRenaming.rename_source_key tests/models/test_families.py
experts._apply_gate, .has_gate, .is_transposed and the like,  tests/models/test_experts.py
  config._experts_implementation, integrations.moe._grouped_linear
model._keys_to_ignore_on_save,                                tests/models/test_build.py
  ._keys_to_ignore_on_load_unexpected
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel


def chosen_attention(config: PretrainedConfig) -> str:
    """The attention implementation that a built model runs, by transformers' name."""
    return str(getattr(config.get_text_config(decoder=True), "_attn_implementation", "unknown"))


def supports_flash_attention(auto_class: Any, config: PretrainedConfig) -> bool:
    """Return True if the model class of `config` has 'flash_attention_2'."""
    model_class = auto_class._model_mapping.get(type(config), None)
    return model_class is not None and bool(model_class._supports_flash_attn)


def runs_grouped_gemms(module: Any) -> bool:
    """Return True if transformers runs `module` (experts with a gate_up weight, no biases) in grouped GEMMs."""
    if getattr(getattr(module, "config", None), "_experts_implementation", None) != "grouped_mm":
        return False
    is_plain = not getattr(module, "has_bias", True) and not getattr(module, "has_post_expert_norm", False)
    return is_plain and getattr(module, "has_gate", False) and hasattr(module, "gate_up_proj")


def grouped_linear(inputs: Tensor, weights: Tensor, offsets: Tensor, is_transposed: bool) -> Tensor:
    """Multiply `inputs` [rows, in], grouped by `offsets` (int32 [experts], the ends of groups), by `weights`
    [experts, out, in], or [experts, in, out] if they are transposed: [rows, out].
    """
    from transformers.integrations.moe import _grouped_linear

    return _grouped_linear(inputs, weights, offsets, is_transposed=is_transposed)


def renaming_on_load(model: PreTrainedModel) -> Callable[[str], str]:
    """From a name in the files to the model's, where `from_pretrained` renames without changing the tensor."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]

    def renamed(name: str) -> str:
        for one in renamings:
            name, _ = one.rename_source_key(name)
        return name

    return renamed


def ignored_on_save(model: PreTrainedModel) -> set[str]:
    """Names of tensors that its files leave out."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def ignored_on_load(model: PreTrainedModel) -> tuple[str, ...]:
    """Regular expressions of stored names that it passes over."""
    return tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
