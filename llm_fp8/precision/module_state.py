"""What linear modules say of their last step: whether it was in fp8, and by which recipe."""

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
    num_recipe_unreadable: int = 0
    """In fp8, by no recipe that is known."""
    recipes: dict[str, int] = field(default_factory=dict)
    num_without_amax: int = 0
    library: str = "Transformer Engine"

    @property
    def num_outside_fp8(self) -> int:
        """They say that they did not compute in fp8."""
        return self.num_modules - self.num_in_fp8


def read_te_state(modules: Iterable[nn.Module]) -> ModuleState:
    """Read the modules after a step. One host synchronisation where there are amax histories."""
    asked = list(modules)
    metas: list[Any] = [module.fp8_meta for module in asked if getattr(module, "fp8", False)]
    histories = []
    for meta in metas:
        if hasattr(meta.get("scaling_fwd"), "amax_history"):
            histories.append(meta["scaling_fwd"].amax_history.amax())
    largest = torch.stack(histories).tolist() if histories else []
    return ModuleState(
        num_modules=len(asked),
        num_in_fp8=len(metas),
        recipes=dict(Counter(type(meta["recipe"]).__name__ for meta in metas)),
        num_without_amax=sum(not value > 0 for value in largest),
    )
