"""Transformer Engine's recipe objects, built from the table of recipes."""

from __future__ import annotations

import dataclasses
import enum

import pytest
import torch

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import RECIPES
from llm_fp8.precision.te import TEBackend, format_name
from tests.support.stand_in_te import install_modules

Format = enum.Enum("Format", "E4M3 E5M2 HYBRID")


class Float8CurrentScaling:
    def __init__(self, fp8_format: Format = Format.HYBRID) -> None:
        assert isinstance(fp8_format, Format), "Transformer Engine needs the enum's member, not its name"
        self.fp8_format = fp8_format


@pytest.mark.parametrize(
    ("option", "default", "expected"), [(None, None, "HYBRID"), ("E4M3", None, "E4M3"), (None, "E4M3", "E4M3")]
)
def test_format_comes_from_the_option_or_the_recipes_row(monkeypatch, option, default, expected):
    modules = {"transformer_engine": {}, "transformer_engine.common": {}}
    members = {"Format": Format, "Float8CurrentScaling": Float8CurrentScaling}
    install_modules(monkeypatch, {**modules, "transformer_engine.common.recipe": members})
    row = dataclasses.replace(RECIPES["current"], defaults={"fp8_format": default} if default else {})
    built = TEBackend.build_recipe(PrecisionConfig(fp8_format=option), row, torch.device("cpu"))
    assert format_name(built) == expected
