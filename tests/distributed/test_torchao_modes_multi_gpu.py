"""--fp8_backend torchao on two GPUs: the steps of one, in fp8 by the kernels of a recorded step; weights gathered in
bf16 and in fp8.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.families import family_config
from tests.support.multi_gpu_training import MICRO_BATCHES, train

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed"),
]

FP8 = ["--mixed_precision", "fp8", "--fp8_backend", "torchao", "--packing"]
CASES = [
    ("ddp", "tensorwise", []),
    ("ddp", "rowwise", ["--gradient_checkpointing"]),
    ("fsdp_full", "tensorwise", []),
    ("fsdp_full", "rowwise", []),
    ("fsdp_full", "rowwise_with_gw_hp", ["--gradient_checkpointing"]),
    ("fsdp_full", "tensorwise", ["--fp8_params"]),
    ("fsdp_grad", "tensorwise", ["--fp8_params"]),
    ("fsdp_full", "tensorwise", ["--fp8_params", "--gradient_checkpointing"]),
    ("fsdp_offload", "tensorwise", []),
]


@pytest.mark.parametrize(
    ("mode", "scenario", "options"),
    CASES,
    ids=["-".join([mode, s, *(o.strip("-") for o in more)]) for mode, s, more in CASES],
)
def test_two_gpus_take_the_steps_of_one(mode, scenario, options, models, single_gpu, tmp_path, record_property):
    model = models["llama3_rope_gqa"]
    precision = [*FP8, f"--fp8_scenario={scenario}"]
    expected = single_gpu(model, *precision)
    taken, summary, log = train(2, tmp_path / "two", model, *precision, *options, f"--sharding_mode={mode}")
    record_property("loss", [r["loss"] for r in taken])
    record_property("loss_on_one_gpu", [r["loss"] for r in expected])
    assert taken[0]["loss"] == pytest.approx(expected[0]["loss"], rel=2e-3)
    assert [r["loss"] for r in taken] == pytest.approx([r["loss"] for r in expected], rel=1e-2)
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.05, "training must move the loss for this to mean anything"
    certificate = summary["certificate"]
    record_property("certificate", certificate)
    num_gemms = 2 if scenario == "rowwise_with_gw_hp" else 3
    num_layers = family_config("llama3_rope_gqa").num_hidden_layers
    assert certificate["verdict"] == "certified", certificate["reasons"]
    assert certificate["num_expected_fp8_gemm_kernels"] == num_gemms * 7 * num_layers * MICRO_BATCHES
    assert "recompile_limit" not in log
    assert (tmp_path / "two" / "final" / "model.safetensors").exists()
