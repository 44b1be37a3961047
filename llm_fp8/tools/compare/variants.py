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

_CANONICAL = {"fp8": DEFAULTS["te"]}
VARIANT_FIELDS = ("mixed_precision", "fp8_backend", "fp8_scenario")
"""The options that make a variant."""
_RECIPE_OPTIONS = frozenset(option for recipe in RECIPES.values() for option in recipe.options)
_FP8_OPTIONS = tuple(field.name for field in dataclasses.fields(PrecisionConfig) if field.name not in VARIANT_FIELDS)


def variants() -> dict[str, tuple[str, ...]]:
    """Name of each variant -> its options. 'fp8' is another name of 'delayed'; 'no' is fp32."""
    recipes = {
        name: (
            *("--mixed_precision", "fp8"),
            *(("--fp8_backend", recipe.backend) if recipe.backend != PrecisionConfig.fp8_backend else ()),
            *("--fp8_scenario", name),
        )
        for name, recipe in RECIPES.items()
    }
    aliases = {alias: recipes[name] for alias, name in _CANONICAL.items()}
    return {"bf16": ("--mixed_precision", "bf16"), **aliases, **recipes, "no": ("--mixed_precision", "no")}


def parse_variants(text: str) -> list[str]:
    """The variants of a comma-separated list, the reference first. Raises `UserError` for an unknown or doubled one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UserError(f"--arms is empty; choose from {', '.join(variants())}.")
    if unknown := [name for name in names if name not in variants()]:
        raise UserError(f"--arms: {', '.join(unknown)} is unknown; choose from {', '.join(variants())}.")
    canonical = [_CANONICAL.get(name, name) for name in names]
    if doubled := {name for name in canonical if canonical.count(name) > 1}:
        raise UserError(
            f"--arms {text} names {', '.join(sorted(doubled))} twice ('fp8' is 'delayed'); name each variant once."
        )
    return sorted(canonical, key=lambda name: name != REFERENCE)


def variant_words(variant: str, words: list[str]) -> list[str]:
    """The options `words` of a training command for `variant`: with its precision, without the fp8 options that it does
    not take.
    """
    given, kept = _fp8_options(words)
    for name, value in given.items():
        if _takes(variant, name):
            kept += [f"--{name}"] if value is True else [f"--{name}", value]
    return [*kept, *variants()[variant]]


def require_takers(names: list[str], words: list[str]) -> None:
    """Raise `UserError` for an fp8 option in `words` that none of the variants `names` takes."""
    for option in _fp8_options(words)[0]:
        if not any(_takes(name, option) for name in names):
            takers = [name for name in variants() if _takes(name, option)]
            raise UserError(
                f"--train: --{option} has no effect on {' and '.join(names)}; leave it out, or add one of "
                f"{', '.join(takers)} to --arms."
            )


def _fp8_options(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The fp8 options in `words`, and the other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in _FP8_OPTIONS:
        parser.add_argument(f"--{name}", nargs="?", const=True, default=argparse.SUPPRESS)
    given, kept = parser.parse_known_args(words)
    return vars(given), kept


def _takes(variant: str, option: str) -> bool:
    """Whether a run of `variant` gets this fp8 option."""
    return variant in RECIPES and (option not in _RECIPE_OPTIONS or option in RECIPES[variant].options)


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
