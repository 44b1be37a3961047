"""The recipe table is the only list of recipes: a row that is made up here is known everywhere."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from llm_fp8.config.parser import build_parser, parse_config
from llm_fp8.config.recipes import RECIPES, Recipe, token_multiple
from llm_fp8.observability.kernel_trace import kernel_times
from llm_fp8.precision.certificate import ExpectedKernels, certify
from llm_fp8.precision.modules import ModuleState
from llm_fp8.precision.plan import PrecisionPlan, recipe_available
from llm_fp8.tools.compare.variants import describe_variant, parse_variants, variant_words
from llm_fp8.utils.errors import UserError
from tests.support.recorded_kernels import recorded

MADE_UP = Recipe(
    "made_up",
    "te",
    "a scale that nobody has",
    "MadeUpScaling",
    token_multiple=48,
    options={"amax_history_len": "length"},
    quantizer="MadeUpQuantizer",
    availability="is_made_up_available",
)


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, MADE_UP.name, MADE_UP)


def test_help_and_options():
    text = " ".join(build_parser().format_help().split())
    assert "made_up: a scale that nobody has" in text
    config = parse_config(["--mixed_precision=fp8", "--fp8_scenario=made_up", "--amax_history_len=1"])
    assert config.precision.fp8_scenario == "made_up"
    with pytest.raises(UserError, match="--fp8_format"):
        parse_config(["--mixed_precision=fp8", "--fp8_scenario=made_up", "--fp8_format=E4M3"])


def test_the_plan():
    plan = PrecisionPlan("fp8", "fp8", "made_up", "made_up", recipe=object(), backend="te")
    assert token_multiple("made_up") == 48
    assert plan.has_fp8_peak and not dataclasses.replace(plan, effective_scenario="nvfp4").has_fp8_peak
    te = SimpleNamespace(is_made_up_available=lambda return_reason: (False, "nobody has it"))
    assert recipe_available(te, MADE_UP) == (False, "nobody has it")


def test_compare():
    assert parse_variants("made_up,bf16") == ["bf16", "made_up"]
    words = variant_words("made_up", ["--amax_history_len", "1", "--fp8_format", "E4M3"])
    assert words == ["--amax_history_len", "1", "--mixed_precision", "fp8", "--fp8_scenario", "made_up"]
    assert describe_variant("made_up") == "fp8 made_up"


@pytest.mark.parametrize(("quantizer", "verdict"), [("MadeUpQuantizer", "certified"), ("Float8Quantizer", "failed")])
def test_the_certificate_compares_its_classes(quantizer, verdict):
    expected = ExpectedKernels(
        precision="fp8 made_up", compute="bf16", scenario="made_up", num_fp8_weights=1, fp8_linear_flop_share=1.0
    )
    state = ModuleState(num_modules=1, num_in_fp8=1, recipes={"MadeUpScaling": 1}, quantizers={quantizer: 1})
    gemm = "nvjet_qqtst_128x128_64x6_2x1_v_bz_TNN"
    kernels = kernel_times(recorded(*((gemm, start, start + 50) for start in (0, 100, 200))))
    found = certify(expected, kernels, state, num_micro_batches=1, recipe_inside_modules="MadeUpScaling")
    assert found.verdict == verdict, dataclasses.asdict(found)
