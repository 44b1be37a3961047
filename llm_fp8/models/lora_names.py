"""Parameter names under LoRA, to tell adapters from the frozen model.

PEFT:        ...q_proj.weight becomes ...q_proj.base_layer.weight
             beside it ...q_proj.lora_A.default.weight and ...q_proj.lora_B.default.weight
TE decoder:  names stay; beside them ...adapters.lora_A.q_proj and ...adapters.lora_B.q_proj (models/lora.py)
"""

from __future__ import annotations


def is_adapter(name: str) -> bool:
    """Whether a parameter or module of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name or name.endswith(".adapters")


def name_without_adapter(name: str) -> str:
    """The name that a parameter or module has in the model without adapters."""
    return name.replace(".base_layer", "")
