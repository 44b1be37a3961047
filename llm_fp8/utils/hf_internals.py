"""Use private names of transformers (checked in 5.17 and 5.23), datasets (5.2) and Accelerate (1.15).
Each is imported or looked up only by the feature that needs it, so a plain model trains without them.

name                                                          test that notices a change
config._attn_implementation                                   tests/models/test_build.py
get_model_conversion_mapping, WeightRenaming.rename_source_key tests/models/test_families.py
experts._apply_gate, .has_gate, .is_transposed and the like,  tests/models/test_experts.py
  config._experts_implementation, integrations.moe._grouped_linear
model._keys_to_ignore_on_save,                                tests/models/test_build.py
  ._keys_to_ignore_on_load_unexpected
dataset._fingerprint                                          tests/data/test_tokenise.py
PartialState._shared_state, also of the other states          tests/tools/test_fine_tune.py
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel


def chosen_attention(config: PretrainedConfig) -> str:
    """Return transformers' name of the attention implementation that a model built from `config` uses."""
    return str(getattr(config.get_text_config(decoder=True), "_attn_implementation", "unknown"))


def runs_grouped_gemms(module: Any) -> bool:
    """Return True if `module` has experts, with a gate and without biases, that transformers runs in grouped GEMMs."""
    if getattr(getattr(module, "config", None), "_experts_implementation", None) != "grouped_mm":
        return False
    is_plain = not getattr(module, "has_bias", True) and not getattr(module, "has_post_expert_norm", False)
    return is_plain and getattr(module, "has_gate", False) and hasattr(module, "gate_up_proj")


def grouped_linear(inputs: Tensor, weights: Tensor, offsets: Tensor, is_transposed: bool) -> Tensor:
    """Multiply the rows of each expert by its matrix. Return [rows, out]. `inputs` [rows, in] are sorted by expert, and
    `weights` are [experts, out, in], or [experts, in, out] if `is_transposed`. int32 `offsets` [experts]: ends of rows.
    """
    from transformers.integrations.moe import _grouped_linear

    return _grouped_linear(inputs, weights, offsets, is_transposed=is_transposed)


def renaming_on_load(model: PreTrainedModel) -> Callable[[str], str]:
    """Return a function that maps a tensor's name in the files to its name in `model`. It ignores merges and splits."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamings = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]

    def renamed(name: str) -> str:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    return renamed


def ignored_on_save(model: PreTrainedModel) -> set[str]:
    """Return the names of tensors of `model` that its files do not contain."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def ignored_on_load(model: PreTrainedModel) -> tuple[str, ...]:
    """Return regular expressions for the names of tensors that are in the files but that loading ignores."""
    return tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def gated(experts: Any, hidden: Tensor) -> Tensor:
    """Apply the activation and gate of `experts` to `hidden` [rows, 2 * intermediate]. Return [rows, intermediate]."""
    return experts._apply_gate(hidden)


def fingerprint(dataset: Any) -> str:
    """Return the hash under which `datasets` caches results from `dataset`. If it has none, return a random one."""
    return getattr(dataset, "_fingerprint", None) or uuid.uuid4().hex


@contextlib.contextmanager
def fresh_accelerate() -> Iterator[None]:
    """In the block, reset Accelerate's global state to that of a new process. Restore it afterwards."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    with contextlib.ExitStack() as stack:
        for state in (PartialState, AcceleratorState, GradientState):
            stack.enter_context(patch.dict(state._shared_state, clear=True))
        yield
