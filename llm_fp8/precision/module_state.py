"""What linear modules say of the step behind them: whether they computed in fp8, by which recipe, with which
quantizers. The certificate holds it against the kernels.

Of Transformer Engine's modules only attributes are read, so nothing is imported; where a later version lacks one, the
module counts as unreadable, not as wrong.
"""

from __future__ import annotations

import dataclasses
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
    """Recipe in force (of Transformer Engine: its class) -> modules."""
    quantizers: dict[str, int] = field(default_factory=dict)
    """Class of quantizer -> how many, forward and backward; Transformer Engine only."""
    num_without_amax: int = 0
    """With an empty amax history of the forward pass; delayed scaling only. In JSON `num_without_maxima`."""
    library: str = "Transformer Engine"

    @property
    def num_outside_fp8(self) -> int:
        """They say that they did not compute in fp8."""
        return self.num_modules - self.num_in_fp8 - self.num_unreadable

    def to_dict(self) -> dict[str, Any]:
        """Plain values for certificate.json."""
        values = dataclasses.asdict(self)
        return {"num_without_maxima" if key == "num_without_amax" else key: values[key] for key in values}


_DIRECTIONS = ("scaling_fwd", "scaling_bwd")


def read_te_state(modules: Iterable[nn.Module]) -> ModuleState:
    """Read the modules after a step. One host synchronisation where there are amax histories."""
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
        num_without_amax=sum(not value > 0 for value in largest),
    )
