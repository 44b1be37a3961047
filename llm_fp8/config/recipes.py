"""The table of fp8 recipes. To add a recipe, add a row. Rows are plain data, so that `--help` reads them without torch.
Classes and functions are named as in Transformer Engine 2.20 and torchao 0.18; `llm_fp8.precision` resolves the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Backend = Literal["te", "torchao"]

DEFAULT = "default"  # value of --fp8_scenario for the back end's default recipe:
DEFAULTS: Mapping[Backend, str] = {"te": "delayed", "torchao": "tensorwise"}
EMULATING: tuple[Backend, ...] = ("torchao",)  # back ends that emulate fp8 without a GPU
FP8_SIZE_MULTIPLE = 16  # divides each dimension of an fp8 GEMM


@dataclass(frozen=True)
class Recipe:
    """A method of scaling tensors for their cast to fp8."""

    backend: Backend
    summary: str
    recipe_class: str
    """Class in `transformer_engine.common.recipe`, or torchao's name for the recipe. The certificate compares it with
    the recipe that modules report."""
    token_multiple: int = FP8_SIZE_MULTIPLE  # for a micro-batch's tokens, the wgrad GEMM's inner dimension
    size_multiple: int = FP8_SIZE_MULTIPLE  # for both dimensions of a weight; other layers stay in bf16
    options: tuple[str, ...] = ()  # named as in the recipe's class
    defaults: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments that replace the class's defaults
    availability: str = "is_fp8_available"  # TE's function that says whether a GPU supports it, and why not
    capability: tuple[int, int] = (8, 9)  # lowest that supports it, to judge a GPU that is not present
    scales_lag: bool = False  # scales come from earlier passes, so the first pass has none
    fp32_scales_on_hopper: bool = False  # instead of the class's powers of two: halves fp8's loss of quality
    one_scale_per_weight: bool = False  # as --fp8_params requires
    gemms_in_fp8: int = 3  # how many of a trained weight's fprop, dgrad and wgrad run in fp8
    has_fp8_peak: bool = True  # compare its GEMMs with the GPU's fp8 peak rate; False for fp4
    saved_bytes_per_element: float | None = None
    """Bytes per element of a GEMM input saved for the backward pass, scales included. None: not measured, so a run's
    memory is not estimated."""
    saves_fc2_input_twice: bool = False  # LayerNormMLP saves both layouts of its second GEMM's input


RECIPES: dict[str, Recipe] = {
    "delayed": Recipe(
        "te",
        "one scale per tensor from the amax history of past steps; fastest, but a spike beyond it is clipped",
        "DelayedScaling",
        options=("fp8_format", "amax_history_len", "amax_compute_algo"),
        defaults={"amax_history_len": 1024, "amax_compute_algo": "max", "margin": 0},
        scales_lag=True,
        one_scale_per_weight=True,
        saved_bytes_per_element=1,
    ),
    "current": Recipe(
        "te",
        "one scale per tensor from the tensor itself, at the cost of one more pass over it",
        "Float8CurrentScaling",
        options=("fp8_format",),
        one_scale_per_weight=True,
        saved_bytes_per_element=1,
    ),
    "block": Recipe(
        "te",
        "one scale per 128 values (128 x 128 for weights); Hopper with CUDA 12.9 or later",
        "Float8BlockScaling",
        token_multiple=128,
        options=("fp8_format",),
        availability="is_fp8_block_scaling_available",
        capability=(9, 0),
        fp32_scales_on_hopper=True,
        saved_bytes_per_element=1 + 4 / 128,
        saves_fc2_input_twice=True,
    ),
    "mxfp8": Recipe(
        "te",
        "one power-of-two scale per 32 values; Blackwell (compute capability 10)",
        "MXFP8BlockScaling",
        token_multiple=32,
        size_multiple=32,
        options=("fp8_format",),
        availability="is_mxfp8_available",
        capability=(10, 0),
    ),
    "nvfp4": Recipe(
        "te",
        "4-bit values with a scale per 16; Blackwell (compute capability 10)",
        "NVFP4BlockScaling",
        availability="is_nvfp4_available",
        capability=(10, 0),
        has_fp8_peak=False,
    ),
    "tensorwise": Recipe("torchao", "one scale per tensor", "tensorwise", one_scale_per_weight=True),
    "rowwise": Recipe("torchao", "one scale per row", "rowwise"),
    "rowwise_with_gw_hp": Recipe("torchao", "one scale per row, wgrad in bf16", "rowwise_with_gw_hp", gemms_in_fp8=2),
}
NO_RECIPE = Recipe("te", "", "", token_multiple=1, gemms_in_fp8=0)
RECIPE_OPTIONS = tuple(dict.fromkeys(name for recipe in RECIPES.values() for name in recipe.options))
"""Options that some recipes take and others do not."""


def recipe_names(backend: Backend | None = None) -> tuple[str, ...]:
    """Return the names of a back end's recipes, or of all recipes, in the table's order."""
    return tuple(name for name, recipe in RECIPES.items() if backend in (None, recipe.backend))


def chosen(scenario: str, backend: Backend) -> str:
    """Return the name of the recipe for a value of --fp8_scenario."""
    return DEFAULTS[backend] if scenario == DEFAULT else scenario


def row_of(name: str | None) -> Recipe:
    """Return the row of a recipe; for None or an unknown name, the row of a run without fp8."""
    return RECIPES.get(name or "", NO_RECIPE)


def precision_name(mixed_precision: str, scenario: str | None) -> str:
    """Return the display name of a --mixed_precision and --fp8_scenario; 'no' becomes 'fp32'."""
    return f"fp8 {scenario}" if mixed_precision == "fp8" else {"no": "fp32"}.get(mixed_precision, mixed_precision)


def recipe_argv(name: str) -> tuple[str, ...]:
    """Return the command-line arguments that select the recipe."""
    return ("--mixed_precision", "fp8", "--fp8_backend", RECIPES[name].backend, "--fp8_scenario", name)
