"""What LoRA does to the names of parameters, for whoever tells adapters from the model that they belong to.

PEFT puts a linear layer and its adapter into a module of the layer's name:

    model.layers.0.self_attn.q_proj.weight   becomes   ...q_proj.base_layer.weight
                                             beside    ...q_proj.lora_A.default.weight, ...q_proj.lora_B.default.weight

The TE decoder keeps its own names and has `...adapters.lora_A.q_proj` and `...adapters.lora_B.q_proj` beside them
(llm_fp8/models/lora.py).
"""

from __future__ import annotations


def is_adapter(name: str) -> bool:
    """Whether a parameter or module of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name or name.endswith(".adapters")


def name_without_adapter(name: str) -> str:
    """The name of a parameter or module of the model as it is without adapters."""
    return name.replace(".base_layer", "")
