"""What accelerate launch asks for becomes the same settings as our flags, and leaves the environment."""

from __future__ import annotations

import pytest

from llm_fp8.config import PrecisionConfig
from llm_fp8.errors import UserError
from llm_fp8.launch_env import merge_launch_settings, take_launch_settings

FP8 = {
    "ACCELERATE_MIXED_PRECISION": "fp8",
    "ACCELERATE_FP8_BACKEND": "TE",
    "ACCELERATE_FP8_FORMAT": "HYBRID",
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": "16",
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "most_recent",
    "ACCELERATE_FP8_MARGIN": "1",
    "ACCELERATE_FP8_OVERRIDE_FPROP": "False",
    "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "False",
}


def test_fp8_settings_are_read_and_removed():
    environ = {**FP8, "PATH": "/bin"}
    settings = take_launch_settings(environ)
    assert environ == {"PATH": "/bin"}
    merged = merge_launch_settings(PrecisionConfig(), settings)
    assert merged == PrecisionConfig(
        mixed_precision="fp8", fp8_format="HYBRID", amax_history_len=16, amax_compute_algo="most_recent", fp8_margin=1
    )


def test_mxfp8_is_a_scenario_and_drops_the_launchers_delayed_defaults():
    settings = take_launch_settings({**FP8, "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "true"})
    assert settings == {"mixed_precision": "fp8", "fp8_scenario": "mxfp8", "fp8_format": "HYBRID"}


def test_a_bf16_launch_sheds_every_fp8_variable():
    environ = {**FP8, "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert take_launch_settings(environ) == {"mixed_precision": "bf16"}
    assert environ == {}


def test_no_means_nothing_was_said():
    assert take_launch_settings({"ACCELERATE_MIXED_PRECISION": "no"}) == {}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (PrecisionConfig(mixed_precision="bf16"), "--mixed_precision bf16"),
        (PrecisionConfig(mixed_precision="fp8", amax_history_len=4), "--amax_history_len 4"),
    ],
)
def test_a_flag_that_contradicts_the_launcher_is_an_error(flags, named):
    with pytest.raises(UserError, match=named):
        merge_launch_settings(flags, take_launch_settings(dict(FP8)))


def test_a_flag_that_agrees_is_fine():
    flags = PrecisionConfig(mixed_precision="fp8", amax_history_len=16)
    assert merge_launch_settings(flags, take_launch_settings(dict(FP8))).amax_history_len == 16


@pytest.mark.parametrize(("variable", "value"), [("BACKEND", "AO"), ("OVERRIDE_WGRAD", "True")])
def test_what_cannot_be_honoured_is_an_error(variable, value):
    with pytest.raises(UserError, match="fp8_config"):
        take_launch_settings({**FP8, f"ACCELERATE_FP8_{variable}": value})
