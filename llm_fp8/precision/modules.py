"""The linear modules of a model that can compute in fp8, and how many GEMMs each takes."""

from __future__ import annotations

from torch import Tensor, nn

from llm_fp8.models.model import is_adapter

GEMMS_PER_WEIGHT = 3
"""GEMMs of a trained weight in a micro-batch: fprop, dgrad, wgrad."""
_HEAD_NAMES = ("lm_head", "embed_out", "output_layer", "score", "classifier")
"""Last name components of modules that produce logits, beside what transformers calls the output embeddings."""


def never_in_fp8(model: nn.Module) -> dict[str, str]:
    """Name of each adapter and lm_head in `model` -> which of both it is."""
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    kinds = dict[str, str]()
    for name, module in model.named_modules():
        if is_adapter(name):
            kinds[name] = "adapter"
        elif module is outputs or name.rpartition(".")[2] in _HEAD_NAMES:
            kinds[name] = "lm_head"
    return kinds


def linear_weights(module: nn.Module) -> list[Tensor]:
    """The GEMM weights [out, in] that this module itself holds: torch's and TE's linear modules, and adapters."""
    if hasattr(module, "base_layer"):
        return []  # PEFT's: what it shows as its own is the layer's inside
    if isinstance(getattr(module, "lora_A", None), nn.ParameterDict):
        return [*module.lora_A.values(), *module.lora_B.values()]  # type: ignore[operator]
    if hasattr(module, "fc1_weight"):
        return [module.fc1_weight, module.fc2_weight]  # type: ignore[list-item]
    return [module.weight] if hasattr(module, "in_features") else []  # type: ignore[list-item]


def size_misfit(module: nn.Module, multiple: int) -> str | None:
    """Why fp8 GEMMs cannot take a weight of this linear module; None where all sizes are multiples of `multiple`."""
    for out_features, in_features in (weight.shape for weight in linear_weights(module)):
        if in_features % multiple or out_features % multiple:
            return f"size {in_features} x {out_features} is not a multiple of {multiple}"
    return None


def te_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> linear module of Transformer Engine in `model`, fused ones among them."""
    return {name: part for name, part in model.named_modules() if hasattr(part, "fp8_meta") and linear_weights(part)}
