"""What Transformer Engine's own modules say of the step behind them: whether they computed in fp8, by which recipe and with which quantizers.

Only attributes are read, so nothing is imported; an attribute that a later version no longer has makes a module unreadable, not wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from llm_fp8.module_state import ModuleState

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
