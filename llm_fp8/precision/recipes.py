"""The fp8 recipes."""

from __future__ import annotations

from typing import Any

from llm_fp8.config.options import PrecisionConfig

DEFAULT_SCENARIO = "delayed"
MIN_FP8_CAPABILITY = (8, 9)
TOKEN_MULTIPLE = {"delayed": 16, "current": 16, "block": 128, "mxfp8": 32, "nvfp4": 16}
"""The number of tokens of a micro-batch must be a multiple of this: the GEMM of the weight gradient runs along the
tokens.
"""


def _scenario_available(te: Any, scenario: str) -> tuple[bool, str]:
    """TE's own verdict on a scenario and its reason."""
    checks = {
        "block": te.is_fp8_block_scaling_available,
        "mxfp8": te.is_mxfp8_available,
        "nvfp4": te.is_nvfp4_available,
    }
    return checks.get(scenario, te.is_fp8_available)(return_reason=True)


def _build_recipe(options: PrecisionConfig, effective: str) -> Any:
    """The TE recipe of `effective`."""
    from transformer_engine.common import recipe as recipes

    delayed_only = {"amax_history_len": 1024, "amax_compute_algo": "max", "fp8_margin": 0}
    chosen: dict[str, Any] = {}
    if options.fp8_format is not None:
        chosen["fp8_format"] = getattr(recipes.Format, options.fp8_format)
    if effective == "delayed":
        values = {name: getattr(options, name) for name in delayed_only}
        values = {name: default if values[name] is None else values[name] for name, default in delayed_only.items()}
        return recipes.DelayedScaling(margin=values.pop("fp8_margin"), **values, **chosen)
    if effective == "current":
        return recipes.Float8CurrentScaling(**chosen)
    if effective == "block":
        return recipes.Float8BlockScaling(**chosen)
    if effective == "mxfp8":
        return recipes.MXFP8BlockScaling(**chosen)
    return recipes.NVFP4BlockScaling()
