"""Requests that a machine without an fp8 GPU must answer."""

from __future__ import annotations

import contextlib
import os
import sys
from types import ModuleType

import pytest
import torch

import te_llama
from llm_fp8.config.options import PrecisionConfig
from llm_fp8.precision.context import Precision
from llm_fp8.precision.plan import PrecisionPlan, resolve_precision
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.te_import import require_te
from tests.support import stand_in_te
from tests.support.small import tiny_config

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


@pytest.mark.parametrize("recast", [False, True])
def test_no_cast_is_kept_with_fp8_recast_weights(recast, monkeypatch):
    """Neither for other micro-batches nor, as Transformer Engine does it for weights that FSDP2 shards, for the
    backward pass.
    """
    stand_in_te.install_stand_in(monkeypatch)
    base = ModuleType("transformer_engine.pytorch.module.base")
    base.TransformerEngineBaseModule = stand_in_te._LinearModule
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setattr(Precision, "_te_autocast", lambda *_, **__: contextlib.nullcontext())
    model = te_llama.build_te_model(tiny_config(hidden_size=64, intermediate_size=96), torch.bfloat16, CPU)
    linears = [module for module in model.modules() if isinstance(module, stand_in_te._LinearModule)]
    for linear in linears:
        linear._is_fsdp2 = False  # what a module of one GPU finds out by itself
    plan = PrecisionPlan("fp8", "fp8", effective_scenario="delayed", recipe=object(), backend="te")
    options = PrecisionConfig(mixed_precision="fp8", fp8_recast_weights=recast)
    precision = Precision(plan, options, CPU, torch.bfloat16)
    precision.attach(model, model.model.layers)
    with precision.context(first_microbatch=True):
        assert {layer.is_first_microbatch for layer in model.model.layers} == {None if recast else True}
    assert linears and {linear.is_fsdp2 for linear in linears} == {recast}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "torchs"),
        ({"CUDNN_HOME": "", "CUDNN_PATH": ""}, "torchs"),
        ({"CUDNN_HOME": "/mine"}, "mine"),
        ({"CUDNN_PATH": "/mine"}, "mine"),
    ],
    ids=["none", "empty", "home", "path"],
)
def test_transformer_engine_is_pointed_at_torchs_cudnn(environment, expected, tmp_path, monkeypatch):
    """A stand-in `nvidia.cudnn` and a stand-in Transformer Engine that notes where it would look; the first of the
    two variables counts.
    """
    (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    (tmp_path / "nvidia" / "cudnn" / "__init__.py").touch()
    engine = tmp_path / "transformer_engine"
    engine.mkdir()
    (engine / "__init__.py").touch()
    (engine / "pytorch.py").write_text(
        "import os\nlooked_in = [os.environ[n] for n in ('CUDNN_HOME', 'CUDNN_PATH') if n in os.environ]\n"
    )
    for name in [name for name in sys.modules if name.split(".")[0] in ("nvidia", "transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        looked_in = require_te("this test").looked_in
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in ("nvidia", "transformer_engine")]:
            del sys.modules[name]
        for name in ("CUDNN_HOME", "CUDNN_PATH"):
            os.environ.pop(name, None)
    torchs = str(tmp_path / "nvidia" / "cudnn")
    assert looked_in == ([torchs] if expected == "torchs" else ["/mine"])
