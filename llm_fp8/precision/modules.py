"""The linear modules of a model that can compute in fp8, and how many GEMMs each of them takes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

GEMMS_PER_WEIGHT = 3
"""GEMMs of a trained weight in a micro-batch: forward, gradient of the input, gradient of the weight."""


def linear_weights(module: nn.Module) -> list[Tensor]:
    """The GEMM weights that this module itself holds ([out, in] each), of torch's or TE's linear modules and of
    adapters; else empty.
    """
    if hasattr(module, "base_layer"):
        return []  # PEFT's: what it shows as its own is the layer's inside
    if isinstance(getattr(module, "lora_A", None), nn.ParameterDict):
        return [*module.lora_A.values(), *module.lora_B.values()]  # type: ignore[operator]
    names = ("fc1_weight", "fc2_weight") if hasattr(module, "fc1_weight") else ("weight",)
    if names == ("weight",) and not hasattr(module, "in_features"):
        return []
    return [getattr(module, name) for name in names]


def te_linears(model: nn.Module) -> list[nn.Module]:
    """The linear modules of Transformer Engine in `model`, fused ones among them."""
    return [module for module in model.modules() if hasattr(module, "fp8_meta") and linear_weights(module)]


def note_recipe_inside(module: nn.Module, note: Callable[[str], None]) -> None:
    """Have `note` called at the module's next forward pass with the class of the recipe in force there, or 'none'.

    Whatever wraps the model must not have lost it on the way. Transformer Engine is loaded already.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    def look(*_: object) -> None:
        handle.remove()
        enabled = FP8GlobalStateManager.is_fp8_enabled()
        note(type(FP8GlobalStateManager.get_fp8_recipe()).__name__ if enabled else "none")

    handle = module.register_forward_pre_hook(look)
