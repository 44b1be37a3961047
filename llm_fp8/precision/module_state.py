"""What linear modules say of their last step: whether it was in fp8, by which recipe, with which quantizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ModuleState:
    """Linear modules of one library, counted."""

    num_modules: int = 0
    num_in_fp8: int = 0
    """Their last forward pass ran in fp8."""
    num_unreadable: int = 0
    """They do not say whether it did."""
    num_recipe_unreadable: int = 0
    """In fp8, but without recipe and quantizers where they are looked for."""
    recipes: dict[str, int] = field(default_factory=dict)
    quantizers: dict[str, int] = field(default_factory=dict)
    """Class of quantizer -> how many, forward and backward; Transformer Engine only."""
    num_without_amax: int = 0
    library: str = "Transformer Engine"

    @property
    def num_outside_fp8(self) -> int:
        """They say that they did not compute in fp8."""
        return self.num_modules - self.num_in_fp8 - self.num_unreadable


_DIRECTIONS = ("scaling_fwd", "scaling_bwd")


def read_te_state(modules: Iterable[nn.Module]) -> ModuleState:
    """Read the modules after a step. One host synchronisation where there are amax histories."""
    asked = list(modules)
    flags = [getattr(module, "fp8", None) for module in asked]
    in_fp8 = [module for module, flag in zip(asked, flags, strict=True) if flag is True]
    recipes, quantizers = Counter[str](), Counter[str]()
    histories = []
    for module in in_fp8:
        meta: Any = getattr(module, "fp8_meta", {})
        own: Any = getattr(module, "quantizers", {})
        if "recipe" not in meta or not all(direction in own for direction in _DIRECTIONS):
            continue
        recipes[type(meta["recipe"]).__name__] += 1
        used = [quantizer for direction in _DIRECTIONS for quantizer in own[direction] if quantizer is not None]
        quantizers.update(type(quantizer).__name__ for quantizer in used)
        if hasattr(meta.get("scaling_fwd"), "amax_history"):
            histories.append(meta["scaling_fwd"].amax_history.amax())
    largest = torch.stack(histories).tolist() if histories else []
    return ModuleState(
        num_modules=len(asked),
        num_in_fp8=len(in_fp8),
        num_unreadable=sum(not isinstance(flag, bool) for flag in flags),
        num_recipe_unreadable=len(in_fp8) - sum(recipes.values()),
        recipes=dict(recipes),
        quantizers=dict(quantizers),
        num_without_amax=sum(not value > 0 for value in largest),
    )
