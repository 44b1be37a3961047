"""The linear modules of a model that can compute in fp8, and how many GEMMs each takes."""

from __future__ import annotations

from torch import Tensor, nn

GEMMS_PER_WEIGHT = 3
"""GEMMs of a trained weight in a micro-batch: fprop, dgrad, wgrad."""
HEAD_NAMES = ("lm_head", "embed_out", "output_layer", "score", "classifier")
"""Last name components of modules that produce logits, beside what `lm_head_of` finds."""


def lm_head_of(model: nn.Module) -> nn.Module | None:
    """lm_head: what transformers calls the model's output embeddings; None where `model` has none."""
    get = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()


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
