"""The table of fp8 recipes. To add a recipe, add a row. Rows are plain data, so that `--help` works without torch.
Names of classes and functions are those of Transformer Engine 2.20 and torchao 0.18. `llm_fp8.precision` imports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Backend = Literal["te", "torchao"]
RequestedPrecision = Literal["fp8", "bf16", "fp16", "no"]  # a value of --mixed_precision

DEFAULT = "default"  # value of --fp8_scenario that selects the back end's entry in `DEFAULTS`
DEFAULTS: Mapping[Backend, str] = {"te": "delayed", "torchao": "tensorwise"}
GEMMS = ("fprop", "dgrad", "wgrad")  # of a linear layer, in their order; frozen weights need no wgrad
FP8_SIZE_MULTIPLE = 16  # each dimension of an fp8 GEMM must be a multiple of this


@dataclass(frozen=True)
class Recipe:
    """A method to scale tensors for the cast to fp8."""

    backend: Backend
    summary: str
    recipe_class: str
    """The class in `transformer_engine.common.recipe` or `llm_fp8.precision.backward`, or torchao's name of the recipe.
    The check of the recorded step (certificate) compares it to the recipe that modules report."""
    token_multiple: int = FP8_SIZE_MULTIPLE  # of tokens in a micro-batch, the inner dimension of wgrad GEMMs
    size_multiple: int = FP8_SIZE_MULTIPLE  # of both dimensions of a weight; layers of other sizes stay in bf16
    options: tuple[str, ...] = ()  # that the recipe accepts, by their names in the class
    defaults: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments that replace the class's defaults
    availability: str = "is_fp8_available"  # TE's function that returns whether a GPU supports it, and why not
    capability: tuple[int, int] = (8, 9)  # minimum, to judge a GPU that is not present
    capability_below: tuple[int, int] = (99, 0)  # Transformer Engine lacks the kernels from here on
    scales_lag: bool = False  # scales come from earlier passes, so the first pass has no scales
    fp32_scales_on_hopper: bool = False  # not powers of two as in the class; halves the loss of quality
    one_scale_per_weight: bool = False  # as --fp8_params requires
    gemms_in_fp8: tuple[str, ...] = GEMMS  # the other GEMMs run in bf16
    has_fp8_peak: bool = True  # False if the fp8 peak rate is not that of its GEMMs (fp4)
    saved_bytes_per_element: float | None = None
    """Bytes per element, scales included, of a GEMM input that is saved for the backward pass. If None, they are not
    measured, and the memory of a run is not estimated."""
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
    "backward": Recipe(
        "te",
        "forward pass in bf16, dgrad and wgrad in fp8 with one scale per tensor: the loss of bf16",
        "BackwardRecipe",
        options=("fp8_format",),
        defaults={"fp8_format": "E4M3"},
        gemms_in_fp8=("dgrad", "wgrad"),
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
        capability_below=(12, 0),
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
    "rowwise_with_gw_hp": Recipe(
        "torchao", "one scale per row, wgrad in bf16", "rowwise_with_gw_hp", gemms_in_fp8=GEMMS[:2]
    ),
}
NO_RECIPE = Recipe("te", "", "", token_multiple=1, gemms_in_fp8=())
RECIPE_OPTIONS = tuple(dict.fromkeys(name for recipe in RECIPES.values() for name in recipe.options))
"""Options that only some recipes accept."""


def recipe_names(backend: Backend | None = None) -> tuple[str, ...]:
    """Return the names of a back end's recipes, or of all recipes, in the table's order."""
    return tuple(name for name, recipe in RECIPES.items() if backend in (None, recipe.backend))


def recipe_for(scenario: str, backend: Backend) -> str:
    """Return the name of the recipe for `scenario`, a value of --fp8_scenario. 'default' depends on `backend`."""
    return DEFAULTS[backend] if scenario == DEFAULT else scenario


def row_of(name: str | None) -> Recipe:
    """Return the recipe `name`. For None or an unknown name, return the row for a run without fp8."""
    return RECIPES.get(name or "", NO_RECIPE)


def precision_name(mixed_precision: str, scenario: str | None) -> str:
    """Return the name of a precision to show to users, for example 'bf16', 'fp32' or 'fp8 delayed'."""
    return f"fp8 {scenario}" if mixed_precision == "fp8" else {"no": "fp32"}.get(mixed_precision, mixed_precision)
