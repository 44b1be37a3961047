"""The requested and the effective precision of a run, and the recipe object of its fp8 library."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from llm_fp8.config.options import Config
from llm_fp8.config.recipes import Backend, precision_name, row_of
from llm_fp8.config.validation import refusal

MIN_FP8_CAPABILITY = (8, 9)


def choose_backend(config: Config, hindrance: str | None, recipe: str | None = None) -> tuple[Backend, str | None]:
    """Return the library that computes in fp8 and, for --fp8_backend auto, why it was chosen instead of the other one.
    `hindrance` is why torchao's layers do not run here, or are not compiled, without which they are not faster.
    `recipe` is that of the checkpoint to continue, if it is in fp8.
    """
    if (backend := config.precision.fp8_backend) != "auto":
        return backend, None
    if reason := refusal(config.with_options(fp8_backend="te")):
        return "torchao", reason
    if reason := refusal(config.with_options(fp8_backend="torchao")):
        return "te", reason
    if recipe:
        return row_of(recipe).backend, "the checkpoint is in this recipe"
    hindrance = "--no_compile" if config.model.compile is False else hindrance
    return ("te", hindrance) if hindrance else ("torchao", "it is faster, compiled")


@dataclass(frozen=True)
class PrecisionPlan:
    """Requested and effective precision. run.json, the trackers' config and the summary contain it."""

    requested: str
    effective: str  # no, bf16, fp16 or fp8
    requested_scenario: str | None = None
    effective_scenario: str | None = None  # key in `RECIPES`, or None without fp8
    fallback_reason: str | None = None
    recipe: Any = field(default=None, repr=False)  # object of the library that computes in fp8, or None without fp8
    backend: str | None = None  # library that computes in fp8, or None without fp8
    backend_reason: str | None = None  # why --fp8_backend auto chose this library

    @property
    def in_fp8(self) -> bool:
        """True if linear layers compute in fp8, by `recipe`."""
        return self.recipe is not None

    @property
    def emulated(self) -> bool:
        """True if operands are rounded to fp8 and multiplied in high precision."""
        return bool(getattr(self.recipe, "emulate", False))

    @property
    def compute_name(self) -> str:
        """Precision of linear layers outside fp8: fp32, bf16 or fp16."""
        return {"no": "fp32", "fp16": "fp16"}.get(self.effective, "bf16")

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations between linear layers."""
        return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[self.compute_name]

    @property
    def has_fp8_peak(self) -> bool:
        """True if the GPU's fp8 peak FLOP/s is the reference for utilisation (in fp8, but not in fp4)."""
        return self.in_fp8 and row_of(self.effective_scenario).has_fp8_peak

    @property
    def name(self) -> str:
        """Short name for tables, for example 'bf16' or 'fp8 delayed'."""
        return precision_name(self.effective, self.effective_scenario)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for run.json."""
        return vars(self) | {"recipe": None if self.recipe is None else repr(self.recipe), "emulated": self.emulated}
