"""Mixtures of experts on GPUs: grouped GEMMs in bf16 next to linear layers in fp8, and sharding by FSDP2."""

from __future__ import annotations

import pytest
import torch

from tests.support.multi_gpu_training import NUM_STEPS, PRECISIONS, train
from tests.support.small import write_model

SIZES = dict(hidden_size=256, moe_intermediate_size=128, intermediate_size=256, num_experts=8, num_experts_per_tok=2)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64)


@pytest.fixture
def mixture(tmp_path) -> str:
    return write_model(tmp_path / "model", torch.bfloat16, model_type="qwen3_moe", **SIZES)


def losses(steps) -> list[float]:
    assert len(steps) == NUM_STEPS
    return [step["loss"] for step in steps]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "delayed", "current"])
def test_experts_compute_in_bf16_from_bf16_and_fp32_parameters(mixture, tmp_path, precision):
    losses_by_optimizer = {}
    for optimizer in ("adamw_master", "adamw_fp32"):
        options = [*PRECISIONS[precision], f"--optimizer={optimizer}", "--no_export"]
        steps, summary, output = train(1, tmp_path / optimizer, mixture, *options)
        certificate = summary["certificate"]
        assert certificate["verdict"] == "certified", certificate["reasons"]
        assert certificate["gemm_kernels_by_type"]["bf16"] > 0
        assert ("2 of 8 experts per token" in output) == (precision != "bf16")
        losses_by_optimizer[optimizer] = losses(steps)
    assert losses_by_optimizer["adamw_fp32"] == pytest.approx(losses_by_optimizer["adamw_master"], rel=1e-2)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("mode", ["fsdp_full", "fsdp_grad"])
@pytest.mark.parametrize("optimizer", ["adamw_master", "adamw_8bit"])
def test_losses_on_two_gpus_match_one_gpu(mixture, tmp_path, mode, optimizer):
    options = [*PRECISIONS["delayed"], f"--optimizer={optimizer}", "--gradient_checkpointing"]
    one_gpu, _, _ = train(1, tmp_path / "one", mixture, *options, "--no_export")
    two_gpus, summary, _ = train(2, tmp_path / "two", mixture, *options, f"--sharding_mode={mode}")
    assert summary["certificate"]["verdict"] == "certified"
    assert losses(two_gpus) == pytest.approx(losses(one_gpu), rel=1e-2)
