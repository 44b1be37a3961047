"""The private names of transformers that this project uses; no other file knows them. Read in versions 5.17 and 5.23.

name                                                          noticed by (else AttributeError)
config._attn_implementation                                   tests/models/test_build.py
model_class._supports_sdpa, ._supports_flash_attn             tests/models/test_build.py
model._keys_to_ignore_on_save,                                tests/models/test_weight_shards.py
  ._keys_to_ignore_on_load_unexpected
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel


def chosen_attention(config: PretrainedConfig) -> str:
    """The attention implementation that a built model runs, by transformers' name."""
    return str(config._attn_implementation)


def supports_attention(model_class: Any, implementation: str) -> bool:
    """Whether a `PreTrainedModel` class has 'sdpa' or 'flash_attention_2'; others it has in any case."""
    flag = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}.get(implementation)
    return flag is None or bool(getattr(model_class, flag))


def ignored_on_save(model: PreTrainedModel) -> set[str]:
    """Names of tensors that its files leave out."""
    return set(model._keys_to_ignore_on_save or ())


def ignored_on_load(model: PreTrainedModel) -> tuple[str, ...]:
    """Regular expressions of stored names that it passes over."""
    return tuple(model._keys_to_ignore_on_load_unexpected or ())
