"""`diagnose_fp8.py --quality`, on a CPU with torchao's emulated fp8."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from llm_fp8.config.parser import parse_config
from llm_fp8.tools.diagnose.quality import describe, measure_quality
from llm_fp8.utils.errors import UserError
from tests.support.small import forget_accelerator, write_model

FP8 = ["--mixed_precision=fp8", "--fp8_backend=torchao", "--max_seq_length=256", "--batch_size=2"]
LINEARS = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
HARMED = "model.layers.1.mlp.down_proj"


def measured(model: str, rows: str, *more: str) -> dict[str, Any]:
    forget_accelerator()
    return measure_quality(parse_config([f"--model_name={model}", f"--dataset_name={rows}", *FP8, *more]))


@pytest.fixture
def outlier_model(tmp_path):
    """One channel between up_proj and down_proj of the second layer is a million times as large, which fp8's one scale
    per tensor pays with all others.
    """
    folder = write_model(tmp_path / "outlier")
    path = tmp_path / "outlier" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{HARMED}.weight"] *= 300  # what a random MLP adds to the residual stream is little
    for name in ("gate", "up"):
        tensors[f"model.layers.1.mlp.{name}_proj.weight"][3] *= 1e3
    tensors[f"{HARMED}.weight"][:, 3] /= 1e6
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_quality_finds_the_module_with_the_largest_fp8_error(outlier_model, tiny_model, rows):
    found, plain = measured(outlier_model, rows), measured(tiny_model, rows)
    assert found["kinds"].keys() == LINEARS and len(found["modules"]) == 14
    worst, error = next(iter(found["modules"].items()))
    assert worst == HARMED
    assert error["relative_error"] > 10 * next(iter(plain["modules"].values()))["relative_error"]
    total, without = found["all_in_fp8"]["divergence"], found["kinds"]["mlp.down_proj"]["without"]["divergence"]
    assert total > 2 * without
    # Alone or left out, every kind is measured against the same bf16 pass, and shares are of all linear weights.
    assert all(0 < kind["alone"]["divergence"] < total * 1.5 for kind in found["kinds"].values())
    assert 0.1 < sum(kind["linear_flop_share"] for kind in found["kinds"].values()) < 1
    assert "--fp8_bf16_modules mlp.down_proj would lower" in describe(found)
    kept = measured(outlier_model, rows, "--fp8_bf16_modules=mlp.down_proj")
    assert kept["kinds"].keys() == LINEARS - {"mlp.down_proj"}
    assert kept["all_in_fp8"]["divergence"] == pytest.approx(without, rel=1e-4)


def test_quality_needs_fp8(tiny_model, rows):
    forget_accelerator()
    with pytest.raises(UserError, match="--mixed_precision fp8"):
        measure_quality(parse_config([f"--model_name={tiny_model}", f"--dataset_name={rows}"]))
