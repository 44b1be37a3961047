"""The precision of a run: what was requested, what runs, and the recipe object of the library that computes it."""

from __future__ import annotations

import dataclasses
import os
import shutil
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import RECIPES, Recipe, precision_name
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import TORCHAO

MIN_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class PrecisionPlan:
    """The requested and the effective precision, as run.json, the trackers' config and the summary record them."""

    requested: str
    effective: str
    """no, bf16, fp16 or fp8."""
    requested_scenario: str | None = None
    effective_scenario: str | None = None
    """A name of `RECIPES`; None outside fp8."""
    fallback_reason: str | None = None
    recipe: Any = field(default=None, repr=False)
    """Transformer Engine's recipe object or torchao's Float8LinearConfig; None outside fp8."""
    backend: str | None = None
    """te or torchao: whose modules compute in fp8; None outside fp8."""

    @property
    def te_recipe(self) -> Any:
        """The recipe for te.autocast; None in a run that does not enter it."""
        return None if self.backend == "torchao" else self.recipe

    @property
    def emulated(self) -> bool:
        """True where operands are rounded to fp8 and multiplied in high precision, as torchao does on a CPU."""
        return self.backend == "torchao" and self.recipe is not None and bool(self.recipe.emulate)

    @property
    def compute_name(self) -> str:
        """The precision of linear layers outside fp8: fp32, bf16 or fp16."""
        return {"no": "fp32", "fp16": "fp16"}.get(self.effective, "bf16")

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of activations between the linear layers."""
        return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[self.compute_name]

    @property
    def has_fp8_peak(self) -> bool:
        """True where GEMMs are compared with the GPU's fp8 peak rate: in fp8, not in fp4."""
        return self.recipe is not None and RECIPES[self.effective_scenario or ""].has_fp8_peak

    @property
    def name(self) -> str:
        """A short name for tables: 'fp32', 'bf16', 'fp8 delayed', ..."""
        return precision_name(self.effective, self.effective_scenario)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"recipe": None if self.recipe is None else repr(self.recipe), "emulated": self.emulated}


def with_recipe(plan: PrecisionPlan, options: PrecisionConfig, device: torch.device) -> PrecisionPlan:
    """The plan with its library's recipe object for `device`; `UserError` where the library, or a compiler that it
    needs, is not installed.
    """
    if plan.effective != "fp8":
        return plan
    scenario, on_gpu = plan.effective_scenario or "", device.type == "cuda"
    if plan.backend == "te":
        recipe = build_recipe(options, RECIPES[scenario], torch.cuda.get_device_capability(device))
        return dataclasses.replace(plan, recipe=recipe)
    why = "--fp8_backend torchao"
    TORCHAO.require(why)
    if on_gpu and not any(map(shutil.which, (os.environ.get("CC") or "gcc", "clang", "cc"))):
        raise UserError(f"{why}: Triton needs a C compiler, and none is found; install gcc, or name one in CC.")
    from llm_fp8.precision.torchao import build_config

    return dataclasses.replace(plan, recipe=build_config(scenario, emulate=not on_gpu))


def recipe_available(te: Any, recipe: Recipe) -> tuple[bool, str]:
    """Transformer Engine's own verdict on a recipe for this GPU, and its reason; `te` is transformer_engine.pytorch."""
    return getattr(te, recipe.availability)(return_reason=True)


def build_recipe(options: PrecisionConfig, recipe: Recipe, capability: tuple[int, int]) -> Any:
    """Transformer Engine's recipe object for a GPU of this compute capability; options that it lacks are left out."""
    from transformer_engine.common import recipe as te_recipes

    keywords = dict(recipe.defaults)
    for name in recipe.options:
        value = getattr(options, name)
        if value is not None:
            keywords[name] = getattr(te_recipes.Format, value) if name == "fp8_format" else value
    built = getattr(te_recipes, recipe.recipe_class)(**keywords)
    if recipe.fp32_scales_on_hopper and capability == (9, 0):  # later GPUs scale by powers of two, as in MXFP8
        for operand in ("fwd_inp", "fwd_weight", "bwd_grad"):
            setattr(built, f"fp8_quant_{operand}", te_recipes.QParams(power_2_scale=False))
    return built
