"""Precision on a machine without an fp8 GPU: the chosen precision, refused options, and modules that stay in bf16."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

import te_llama
from llm_fp8.config.options import PrecisionConfig
from llm_fp8.precision.context import Precision
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.precision.te import TEBackend
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.te_internals import prefer_torchs_cudnn
from tests.support import stand_in_te
from tests.support.small import precision_on, tiny_config

CPU = torch.device("cpu")


def test_default_on_the_cpu_is_fp32():
    plan = precision_on(PrecisionConfig(), CPU)
    assert (plan.effective, plan.compute_dtype, plan.recipe) == ("no", torch.float32, None)


def test_fp8_without_a_gpu_is_refused():
    with pytest.raises(UserError, match="compute capability 8.9.*no CUDA GPU.*bf16"):
        precision_on(PrecisionConfig(mixed_precision="fp8"), CPU)


def test_bf16_with_fp32_parameters_computes_in_bf16():
    options = PrecisionConfig(mixed_precision="bf16")
    precision = Precision(precision_on(options, CPU), options, CPU, torch.float32)
    linear = torch.nn.Linear(8, 8)
    with precision.context(first_microbatch=None):
        assert linear(torch.ones(1, 8)).dtype == torch.bfloat16
    assert linear(torch.ones(1, 8)).dtype == torch.float32


def install_te(monkeypatch):
    """Install the stand-in for TE, and set `fp8_meta` on the base class of the linear modules, as TE does."""
    stand_in_te.install_stand_in(monkeypatch)
    monkeypatch.setattr(stand_in_te._LinearModule, "fp8_meta", {}, raising=False)


def te_precision(scenario: str = "delayed", inner: int = 96, **options):
    """Return a TE decoder with MLPs of width `inner`, and an fp8 run's `Precision`, not yet attached to the decoder."""
    model = te_llama.build_te_model(tiny_config(hidden_size=64, intermediate_size=inner), torch.bfloat16, CPU)
    plan = PrecisionPlan("fp8", "fp8", effective_scenario=scenario, recipe=object(), backend="te")
    return model, Precision(plan, PrecisionConfig(mixed_precision="fp8", **options), CPU, torch.bfloat16)


@pytest.mark.parametrize(
    ("scenario", "inner", "misfits"),
    [
        ("mxfp8", 48, {"mlp": "size 48 x 64 is not a multiple of 32"}),
        ("mxfp8", 96, {}),
        ("delayed", 48, {}),
        ("delayed", 40, {"mlp": "size 40 x 64 is not a multiple of 16"}),
    ],
)
def test_te_modules_of_unsupported_sizes_stay_in_bf16(scenario, inner, misfits, monkeypatch):
    """Transformer Engine would raise an error if a module with an unsupported size computed in fp8."""
    install_te(monkeypatch)
    entered = []
    monkeypatch.setattr(TEBackend, "autocast", lambda _, enabled: entered.append(enabled) or contextlib.nullcontext())
    model, precision = te_precision(scenario, inner)
    reasons = precision.attach(model, model.model.layers)
    assert {name.rpartition(".")[2]: reason for name, reason in reasons.items()} == misfits
    for layer in model.model.layers:
        assert (layer.mlp in precision.fp8_modules) == (not misfits) and layer.qkv in precision.fp8_modules
        entered.clear()
        layer.mlp(torch.ones(16, 64, dtype=torch.bfloat16))
        assert entered == [False] * len(misfits)


def test_fp8_bf16_modules_that_leave_nothing_in_fp8_are_refused(monkeypatch):
    install_te(monkeypatch)
    model, precision = te_precision(fp8_bf16_modules="qkv,output,mlp")
    with pytest.raises(UserError, match="--fp8_bf16_modules qkv,output,mlp keeps every linear layer in bf16"):
        precision.attach(model, model.model.layers)


def test_linear_layers_of_unsupported_sizes_are_not_swapped(monkeypatch):
    install_te(monkeypatch)
    reason = "size 48 x 64 is not a multiple of 32"
    model = torch.nn.ModuleDict({"fits": torch.nn.Linear(64, 32), "other": torch.nn.Linear(48, 64)})
    assert TEBackend(scenario="mxfp8").convert(model) == {"other": reason}
    assert type(model["other"]) is torch.nn.Linear and type(model["fits"]) is not torch.nn.Linear


@pytest.mark.parametrize("recast", [False, True])
def test_fp8_recast_weights_stores_no_cast(recast, monkeypatch):
    """With --fp8_recast_weights, every forward and backward pass casts weights again, as TE does under FSDP2."""
    install_te(monkeypatch)
    monkeypatch.setattr(TEBackend, "autocast", lambda *_, **__: contextlib.nullcontext())
    model, precision = te_precision(fp8_recast_weights=recast)
    linears = [module for module in model.modules() if isinstance(module, stand_in_te._LinearModule)]
    for linear in linears:
        linear._is_fsdp2 = False  # as a module on one GPU sets it
    precision.attach(model, model.model.layers)
    with precision.context(first_microbatch=True):
        assert {layer.is_first_microbatch for layer in model.model.layers} == {None if recast else True}
    assert linears and {linear.is_fsdp2 for linear in linears} == {recast}


@pytest.mark.parametrize(
    ("environment", "is_set"),
    [({}, True), ({"CUDNN_HOME": "", "CUDNN_PATH": ""}, True), ({"CUDNN_HOME": "/mine"}, False)],
    ids=["none", "empty", "the user's"],
)
def test_cudnn_home_is_torchs_cudnn_unless_the_user_set_it(environment, is_set, tmp_path, monkeypatch):
    (tmp_path / "nvidia" / "cudnn").mkdir(parents=True)
    (tmp_path / "nvidia" / "cudnn" / "__init__.py").touch()
    nvidia = ModuleType("nvidia")
    nvidia.__path__, nvidia.__spec__ = [str(tmp_path / "nvidia")], ModuleSpec("nvidia", None)
    monkeypatch.setitem(sys.modules, "nvidia", nvidia)
    monkeypatch.delitem(sys.modules, "nvidia.cudnn", raising=False)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    for name in ("CUDNN_HOME", "CUDNN_PATH"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it at the end
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    prefer_torchs_cudnn()
    assert os.environ["CUDNN_HOME"] == (str(tmp_path / "nvidia" / "cudnn") if is_set else "/mine")
