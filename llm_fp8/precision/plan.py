"""The precision that was asked for -> the one that runs on this machine, with the reason."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import DEFAULTS, RECIPES, Recipe, chosen, precision_name, recipe_names
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import TORCHAO
from llm_fp8.utils.te_internals import require_te

MIN_FP8_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class PrecisionPlan:
    """What was asked for and what runs; stored in run.json, the trackers' config and the summary."""

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
        """Whether operands are rounded to fp8 and multiplied in high precision, as torchao does on a CPU."""
        return self.backend == "torchao" and self.recipe is not None and bool(self.recipe.emulate)

    @property
    def compute_name(self) -> str:
        """What linear layers outside fp8 compute in: fp32, bf16 or fp16."""
        return {"no": "fp32", "fp16": "fp16"}.get(self.effective, "bf16")

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of activations between the linear layers."""
        return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[self.compute_name]

    @property
    def has_fp8_peak(self) -> bool:
        """Whether GEMMs are compared with the GPU's fp8 peak rate: in fp8, not in fp4."""
        return self.recipe is not None and RECIPES[self.effective_scenario or ""].has_fp8_peak

    @property
    def name(self) -> str:
        """A short name for tables: 'fp32', 'bf16', 'fp8 delayed', ..."""
        return precision_name(self.effective, self.effective_scenario)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"recipe": None if self.recipe is None else repr(self.recipe), "emulated": self.emulated}


def resolve_precision(options: PrecisionConfig, device: torch.device) -> PrecisionPlan:
    """Check the request against the hardware and the installed TE. Raises `UserError`; prints nothing."""
    requested = options.mixed_precision
    if requested is None:
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        requested = "bf16" if has_bf16 else "no"
    if requested != "fp8":
        if requested == "fp16" and device.type != "cuda":
            raise UserError("--mixed_precision fp16 needs a CUDA GPU; use bf16 or no (fp32) on the CPU.")
        return PrecisionPlan(requested=requested, effective=requested)
    if options.fp8_backend == "torchao":
        return _resolve_torchao(options, device)
    require_fp8_gpu(device)
    te = require_te("--mixed_precision fp8")
    wanted = effective = chosen(options.fp8_scenario, "te")
    fallback = None
    available, reason = recipe_available(te, RECIPES[wanted])
    if not available:
        others = ", ".join(name for name in recipe_names("te") if recipe_available(te, RECIPES[name])[0])
        where = torch.cuda.get_device_name(device)
        fallback = f"{wanted} is not available on {where}: {reason} Available here: {others}."
        if options.fp8_strict:
            raise UserError(f"--fp8_scenario {wanted} with --fp8_strict: {fallback}")
        effective = DEFAULTS["te"]
    return PrecisionPlan(
        requested="fp8",
        effective="fp8",
        requested_scenario=options.fp8_scenario,
        effective_scenario=effective,
        fallback_reason=fallback,
        recipe=build_recipe(options, RECIPES[effective], torch.cuda.get_device_capability(device)),
        backend="te",
    )


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


def require_fp8_gpu(device: torch.device) -> None:
    """Raise a `UserError` where `device` is no GPU with fp8 units."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < MIN_FP8_CAPABILITY:
        found = torch.cuda.get_device_name(device) if device.type == "cuda" else "no CUDA GPU"
        raise UserError(
            f"--mixed_precision fp8 needs a GPU of compute capability 8.9 or later; found {found}. Use bf16."
        )


def _resolve_torchao(options: PrecisionConfig, device: torch.device) -> PrecisionPlan:
    """torchao's recipes need no fallback: all run on every GPU with fp8, and on a CPU, emulated, by torchao alone."""
    why, on_gpu = "--fp8_backend torchao", device.type == "cuda"
    TORCHAO.require(why)
    if on_gpu:
        require_fp8_gpu(device)
        if not any(map(shutil.which, (os.environ.get("CC") or "gcc", "clang", "cc"))):
            raise UserError(f"{why}: Triton needs a C compiler, and none is found; install gcc, or name one in CC.")
    from llm_fp8.precision.torchao import build_config

    scenario = chosen(options.fp8_scenario, "torchao")
    return PrecisionPlan(
        requested="fp8",
        effective="fp8",
        requested_scenario=options.fp8_scenario,
        effective_scenario=scenario,
        recipe=build_config(scenario, emulate=not on_gpu),
        backend="torchao",
    )
