"""Transformer Engine as far as Accelerate's fp8 path and the certificate look at it, for machines without it.

A linear layer notes whether the autocast was open and which recipe was in force; nothing is rounded to fp8. The recipe
takes what Transformer Engine 2.20's takes and drops what it does not know, as that one does
(`tests/tools/test_hf_trainer_callback_gpu.py` asks the real one).
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import Any

import accelerate.accelerator
import accelerate.utils.dataclasses
import accelerate.utils.transformer_engine
import pytest
import torch
from torch import nn

from tests.support.stand_in_te import install_modules

Format = enum.Enum("Format", "E4M3 E5M2 HYBRID")
_IN_FORCE: list[Any] = []


def _recipe(name: str, defaults: dict[str, Any]) -> type:
    """A recipe class with these fields, which ignores other keyword arguments."""

    def initialise(self: Any, **given: Any) -> None:
        self.__dict__.update({key: given.get(key, default) for key, default in defaults.items()})

    return type(name, (), {"__init__": initialise})


DelayedScaling = _recipe(
    "DelayedScaling", {"margin": 0, "fp8_format": Format.HYBRID, "amax_history_len": 1024, "amax_compute_algo": "max"}
)
MXFP8BlockScaling = _recipe("MXFP8BlockScaling", {"margin": 0, "fp8_format": Format.E4M3})
Float8Quantizer = type("Float8Quantizer", (), {})


class Linear(nn.Linear):
    """te.Linear's constructor and the attributes that tell of its last forward pass."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, params_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype=params_dtype)
        self.fp8 = False
        self.fp8_meta: dict[str, Any] = {}
        self.quantizers: dict[str, Any] = {}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        recipe = _IN_FORCE[-1] if _IN_FORCE else None
        self.fp8 = recipe is not None
        if recipe is not None:
            self.fp8_meta = {"recipe": recipe}
            self.quantizers = {direction: [Float8Quantizer()] for direction in ("scaling_fwd", "scaling_bwd")}
        return super().forward(inputs)


@contextlib.contextmanager
def fp8_autocast(enabled: bool, fp8_recipe: Any) -> Iterator[None]:
    """While open, `Linear` computes by `fp8_recipe`."""
    _IN_FORCE.append(fp8_recipe if enabled else None)
    try:
        yield
    finally:
        _IN_FORCE.pop()


class FP8GlobalStateManager:
    """What is in force."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return bool(_IN_FORCE) and _IN_FORCE[-1] is not None

    @staticmethod
    def get_fp8_recipe() -> Any:
        return _IN_FORCE[-1]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Accelerate find it."""
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {
            "Format": Format,
            "DelayedScaling": DelayedScaling,
            "MXFP8BlockScaling": MXFP8BlockScaling,
        },
        "transformer_engine.pytorch": {
            "Linear": Linear,
            "LayerNorm": nn.LayerNorm,
            "TransformerLayer": type("TransformerLayer", (nn.Module,), {}),
            "fp8_autocast": fp8_autocast,
        },
        "transformer_engine.pytorch.fp8": {"check_mxfp8_support": lambda: (True, "")},
        "transformer_engine.pytorch.quantization": {"FP8GlobalStateManager": FP8GlobalStateManager},
    }
    install_modules(monkeypatch, contents)
    for module in (accelerate.accelerator, accelerate.utils.dataclasses, accelerate.utils.transformer_engine):
        monkeypatch.setattr(module, "is_transformer_engine_available", lambda: True)
