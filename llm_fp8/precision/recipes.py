"""From a row of the recipe table (`llm_fp8.config.recipes`) to Transformer Engine's recipe object."""

from __future__ import annotations

from typing import Any

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import Recipe

MIN_FP8_CAPABILITY = (8, 9)
HOPPER = (9, 0)
"""Compute capability. Later GPUs compute block scaling as MXFP8, whose scales are powers of two."""


def recipe_available(te: Any, recipe: Recipe) -> tuple[bool, str]:
    """Transformer Engine's own verdict on a recipe for this GPU, and its reason; `te` is transformer_engine.pytorch."""
    verdict: tuple[bool, str] = getattr(te, recipe.availability)(return_reason=True)
    return verdict


def build_recipe(options: PrecisionConfig, recipe: Recipe, capability: tuple[int, int]) -> Any:
    """Transformer Engine's recipe object for a GPU of this compute capability. Options that `recipe` does not take are
    left out, as after a fallback.
    """
    from transformer_engine.common import recipe as te_recipes

    keywords = dict(recipe.defaults)
    for option, keyword in recipe.options.items():
        value = getattr(options, option)
        if value is not None:
            keywords[keyword] = getattr(te_recipes.Format, value) if option == "fp8_format" else value
    built = getattr(te_recipes, recipe.recipe_class)(**keywords)
    if recipe.fp32_scales_on_hopper and capability == HOPPER:
        for operand in ("fwd_inp", "fwd_weight", "bwd_grad"):
            setattr(built, f"fp8_quant_{operand}", te_recipes.QParams(power_2_scale=False))
    return built
