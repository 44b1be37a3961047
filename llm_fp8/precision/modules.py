"""The linear modules of a model that can compute in fp8, and how many GEMMs each of them takes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

GEMMS_PER_WEIGHT = 3
"""GEMMs of a trained weight in a micro-batch: fprop, dgrad, wgrad."""


def linear_weights(module: nn.Module) -> list[Tensor]:
    """The GEMM weights [out, in] that this module itself holds: torch's and TE's linear modules, and adapters."""
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
    """Call `note` in the module's next forward pass with the class of the recipe in force there, or 'none' where
    something that wraps the model has lost the autocast context. Transformer Engine must be imported.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    def look(*_: object) -> None:
        handle.remove()
        enabled = FP8GlobalStateManager.is_fp8_enabled()
        note(type(FP8GlobalStateManager.get_fp8_recipe()).__name__ if enabled else "none")

    handle = module.register_forward_pre_hook(look)
