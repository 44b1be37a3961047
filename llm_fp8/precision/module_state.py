"""What a library's linear modules say of the step behind them, added up: the account that a certificate holds
against the kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class ModuleState:
    """The state of some linear modules of one library."""

    num_modules: int = 0
    num_in_fp8: int = 0
    """Whose last forward pass ran in fp8."""
    num_unreadable: int = 0
    """Which do not say whether it did, where the version of the library that is known here does."""
    num_recipe_unreadable: int = 0
    """Which ran in fp8 and do not show recipe and quantizers, where that version does."""
    recipes: dict[str, int] = field(default_factory=dict)
    """Recipe in force (of Transformer Engine: its class) -> modules."""
    quantizers: dict[str, int] = field(default_factory=dict)
    """Class of quantizer -> how many, forward and backward; Transformer Engine only."""
    num_without_maxima: int = 0
    """Modules whose history of maxima in the forward pass holds nothing; delayed scaling only."""
    library: str = "Transformer Engine"

    @property
    def num_outside_fp8(self) -> int:
        """Modules which say that they did not compute in fp8."""
        return self.num_modules - self.num_in_fp8 - self.num_unreadable

    @property
    def all_in_fp8(self) -> bool:
        """Whether every module says that it computed in fp8."""
        return 0 < self.num_modules == self.num_in_fp8


# --- te_state --------------------------------------------------------------------------------------------
# What Transformer Engine's own modules say of the step behind them: whether they computed in fp8, by which recipe and
# with which quantizers.
#
# Only attributes are read, so nothing is imported; an attribute that a later version no longer has makes a module
# unreadable, not wrong.

_DIRECTIONS = ("scaling_fwd", "scaling_bwd")


def read_te_state(modules: Iterable[nn.Module]) -> ModuleState:
    """Read the modules after a step. One synchronisation with the GPU where there are histories of maxima."""
    num_modules = num_in_fp8 = num_unreadable = num_recipe_unreadable = 0
    recipes: Counter[str] = Counter()
    quantizers: Counter[str] = Counter()
    histories = []
    for module in modules:
        num_modules += 1
        in_fp8: Any = getattr(module, "fp8", None)
        if not isinstance(in_fp8, bool):
            num_unreadable += 1
            continue
        if not in_fp8:
            continue
        num_in_fp8 += 1
        meta: Any = getattr(module, "fp8_meta", {})
        own: Any = getattr(module, "quantizers", {})
        if "recipe" not in meta or not all(direction in own for direction in _DIRECTIONS):
            num_recipe_unreadable += 1
            continue
        recipes[type(meta["recipe"]).__name__] += 1
        used = [quantizer for direction in _DIRECTIONS for quantizer in own[direction] if quantizer is not None]
        quantizers.update(type(quantizer).__name__ for quantizer in used)
        history = getattr(meta.get("scaling_fwd"), "amax_history", None)
        if history is not None:
            histories.append(history.amax())
    largest = torch.stack(histories).tolist() if histories else []
    return ModuleState(
        num_modules=num_modules,
        num_in_fp8=num_in_fp8,
        num_unreadable=num_unreadable,
        num_recipe_unreadable=num_recipe_unreadable,
        recipes=dict(recipes),
        quantizers=dict(quantizers),
        num_without_maxima=sum(not value > 0 for value in largest),
    )
