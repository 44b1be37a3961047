"""RECIPES is the only list of recipes: a recipe that the test adds there is available everywhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llm_fp8.config.parser import OptionsParser, parse_config
from llm_fp8.config.recipes import RECIPES, Recipe, row_of
from llm_fp8.settle.machine import detect_machine
from llm_fp8.tools.compare.run_record import parse_variants, variant_argv
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks

MADE_UP = Recipe(
    "te",
    "a scale that nobody has",
    "MadeUpScaling",
    token_multiple=48,
    options={"amax_history_len": "length"},
    availability="is_made_up_available",
)


@pytest.fixture(autouse=True)
def add_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "made_up", MADE_UP)


def test_new_recipe_is_in_the_help_and_restricts_options():
    assert "made_up (te): a scale that nobody has" in " ".join(OptionsParser().format_help().split())
    argv = ["--mixed_precision=fp8", "--fp8_scenario=made_up"]
    assert parse_config([*argv, "--amax_history_len=1"]).precision.fp8_scenario == "made_up"
    with pytest.raises(UserError, match="--fp8_format"):
        parse_config([*argv, "--fp8_format=E4M3"])


def test_availability_comes_from_the_function_of_the_row(monkeypatch):
    available = dict.fromkeys((row.availability for row in RECIPES.values()), lambda return_reason: (True, ""))
    te = SimpleNamespace(**available | {"is_made_up_available": lambda return_reason: (False, "nobody has it")})
    monkeypatch.setattr("llm_fp8.settle.machine.require_te", lambda feature: te)
    monkeypatch.setattr("llm_fp8.settle.machine.device_of_process", lambda: None)
    gpu = SimpleNamespace(name="a GPU", total_memory=80 * 2**30)
    for name, value in (("is_available", True), ("get_device_capability", (9, 0)), ("get_device_properties", gpu)):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, value=value: value)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: gpu.name)
    lacking = detect_machine(parse_config(["--mixed_precision=fp8", "--use_te"]), LaunchRanks()).lacking
    assert lacking == {"made_up": "nobody has it"} and row_of("made_up").token_multiple == 48


def test_new_recipe_is_a_variant_of_a_comparison():
    assert parse_variants("made_up,bf16") == ["bf16", "made_up"]
    argv = variant_argv("made_up", ["--amax_history_len", "1", "--fp8_format", "E4M3"])
    assert argv[-4:] == ["--fp8_backend", MADE_UP.backend, "--fp8_scenario", "made_up"]
    assert argv[:-4] == ["--amax_history_len", "1", "--mixed_precision", "fp8"]
