"""Names of variants: which options a run of each gets, and which variant a run that exists belongs to."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import DEFAULTS, RECIPES
from llm_fp8.utils.errors import UserError

REFERENCE = "bf16"
"""The baseline that the others are compared with."""

VARIANT_FIELDS = ("mixed_precision", "fp8_backend", "fp8_scenario")
"""The options that make a variant."""
_RECIPE_OPTIONS = frozenset(option for recipe in RECIPES.values() for option in recipe.options)


def variants() -> dict[str, tuple[str, ...]]:
    """Name of each variant -> its options. 'fp8' is another name of 'delayed'; 'no' is fp32."""
    recipes = {}
    for name, recipe in RECIPES.items():
        backend = () if recipe.backend == PrecisionConfig.fp8_backend else ("--fp8_backend", recipe.backend)
        recipes[name] = ("--mixed_precision", "fp8", *backend, "--fp8_scenario", name)
    bf16, fp32 = ("--mixed_precision", "bf16"), ("--mixed_precision", "no")
    return {REFERENCE: bf16, "fp8": recipes[DEFAULTS["te"]], **recipes, "no": fp32}


def parse_variants(text: str) -> list[str]:
    """The variants of a comma-separated list, the reference first. Raises `UserError` for an unknown or doubled one."""
    names = [DEFAULTS["te"] if name == "fp8" else name for name in map(str.strip, text.split(","))]
    if len(set(names) & variants().keys()) < len(names):
        raise UserError(f"--variants {text}: name each once, of {', '.join(variants())} ('fp8' is '{DEFAULTS['te']}').")
    return sorted(names, key=lambda name: name != REFERENCE)


def variant_words(variant: str, words: list[str]) -> list[str]:
    """The options `words` of a training command for `variant`: with its precision, without the fp8 options that it does
    not take.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for field in dataclasses.fields(PrecisionConfig):
        if field.name not in VARIANT_FIELDS:
            parser.add_argument(f"--{field.name}", nargs="?", const=True, default=argparse.SUPPRESS)
    given, kept = parser.parse_known_args(words)
    for name, value in vars(given).items():
        if variant in RECIPES and (name not in _RECIPE_OPTIONS or name in RECIPES[variant].options):
            kept += [f"--{name}"] if value is True else [f"--{name}", value]
    return [*kept, *variants()[variant]]


def requested_variant(precision: dict[str, Any]) -> str:
    """The variant that a run asked for, by the precision section of its run.json."""
    if precision["requested"] != "fp8":
        return str(precision["requested"])
    scenario = precision.get("requested_scenario") or "default"
    if scenario != "default":
        return str(scenario)
    return str(precision["effective_scenario"]) if precision.get("backend") == "torchao" else DEFAULTS["te"]


def describe_variant(variant: str) -> str:
    """A variant's name in a sentence: 'bf16', 'fp8 delayed', 'fp32'."""
    return f"fp8 {variant}" if variant in RECIPES else {"no": "fp32"}.get(variant, variant)
