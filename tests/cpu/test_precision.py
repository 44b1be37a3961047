"""Requests that a machine without an fp8 GPU must answer."""

from __future__ import annotations

import pytest
import torch

from llm_fp8.config import PrecisionConfig
from llm_fp8.errors import UserError
from llm_fp8.precision import Precision, resolve_precision

CPU = torch.device("cpu")


def test_default_on_the_cpu_is_fp32():
    plan = resolve_precision(PrecisionConfig(), CPU)
    assert (plan.effective, plan.compute_dtype, plan.recipe) == ("no", torch.float32, None)


def test_fp8_without_a_gpu_says_what_was_found():
    with pytest.raises(UserError, match="compute capability 8.9.*no CUDA GPU.*bf16"):
        resolve_precision(PrecisionConfig(mixed_precision="fp8"), CPU)


def test_fp16_needs_a_gpu():
    with pytest.raises(UserError, match="fp16 needs a CUDA GPU"):
        resolve_precision(PrecisionConfig(mixed_precision="fp16"), CPU)


@pytest.mark.parametrize("option", [dict(fp8_scenario="current"), dict(amax_history_len=4), dict(fp8_last_bf16_layers=1)])
def test_fp8_options_without_fp8_are_refused(option):
    with pytest.raises(UserError, match=f"--{next(iter(option))} has no effect"):
        resolve_precision(PrecisionConfig(mixed_precision="bf16", **option), CPU)


def test_bf16_with_fp32_parameters_computes_in_bf16():
    options = PrecisionConfig(mixed_precision="bf16")
    precision = Precision(resolve_precision(options, CPU), options, CPU, torch.float32)
    linear = torch.nn.Linear(8, 8)
    with precision.context(first_microbatch=None):
        assert linear(torch.ones(1, 8)).dtype == torch.bfloat16
    assert linear(torch.ones(1, 8)).dtype == torch.float32


def test_micro_batch_position_reaches_the_modules():
    options = PrecisionConfig()
    precision = Precision(resolve_precision(options, CPU), options, CPU, torch.float32)
    module = torch.nn.Linear(2, 2)
    module.is_first_microbatch = None
    model = torch.nn.Sequential(module)
    precision.attach(model, torch.nn.ModuleList([module]))
    for first in (True, False, None):
        with precision.context(first_microbatch=first):
            assert module.is_first_microbatch is first
