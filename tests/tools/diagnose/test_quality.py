"""`diagnose_fp8.py --quality`, on a CPU with torchao's emulated fp8."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from llm_fp8.config.parser import parse_config
from llm_fp8.tools.diagnose.quality import measure_quality
from llm_fp8.utils.errors import UserError
from tests.support.scripts_as_main import run_as_main
from tests.support.small import forget_accelerator, write_model

FP8 = ["--mixed_precision=fp8", "--fp8_backend=torchao", "--max_seq_length=256", "--batch_size=2"]
LINEARS = {f"self_attn.{name}_proj" for name in "qkvo"} | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}


def measured(model: str, rows: str, *more: str):
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
    tensors["model.layers.1.mlp.down_proj.weight"] *= 300  # what a random MLP adds to the residual stream is little
    for name in ("gate", "up"):
        tensors[f"model.layers.1.mlp.{name}_proj.weight"][3] *= 1e3
    tensors["model.layers.1.mlp.down_proj.weight"][:, 3] /= 1e6
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_it_finds_the_module_that_fp8_spoils(outlier_model, tiny_model, rows):
    found, plain = measured(outlier_model, rows), measured(tiny_model, rows)
    assert {kind.name for kind in found.kinds} == LINEARS
    assert found.kinds[0].name == "mlp.down_proj" and found.modules[0].name == "model.layers.1.mlp.down_proj"
    assert found.modules[0].relative_error > 10 * plain.modules[0].relative_error
    assert found.modules[0].input_peak > 5 * plain.modules[0].input_peak
    assert found.all_in_fp8.divergence > 2 * found.kinds[0].without.divergence
    # Alone or left out, every kind is measured against the same bf16 pass, and shares are of all linear weights.
    assert all(0 < kind.alone.divergence < found.all_in_fp8.divergence * 1.5 for kind in found.kinds)
    assert 0.1 < sum(kind.linear_flop_share for kind in found.kinds) < 1
    assert "--fp8_bf16_modules mlp.down_proj would take" in found.describe()
    kept = measured(outlier_model, rows, "--fp8_bf16_modules=mlp.down_proj")
    assert {kind.name for kind in kept.kinds} == LINEARS - {"mlp.down_proj"}
    assert kept.all_in_fp8.divergence == pytest.approx(found.kinds[0].without.divergence, rel=1e-6)


@pytest.mark.slow
def test_the_script_prints_and_writes_them(tiny_model, rows, tmp_path):
    path = tmp_path / "quality.json"
    options = [f"--model_name={tiny_model}", f"--dataset_name={rows}", *FP8, "--quality", f"--json={path}"]
    done = run_as_main("scripts/diagnose_fp8.py", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert measured(tiny_model, rows, "--validation_fraction=0").num_tokens > found["num_tokens"], "training's text"
    assert f"KL divergence from bf16 {found['all_in_fp8']['divergence']:.4f}" in done.stdout
    assert found["num_tokens"] > 0 and len(found["modules"]) == 14 and found["scenario"] == "tensorwise"


@pytest.mark.slow
def test_mistakes_are_one_sentence(tiny_model, rows, tmp_path):
    with pytest.raises(UserError, match="--quality compares fp8 with bf16; add --mixed_precision fp8"):
        measure_quality(parse_config([f"--model_name={tiny_model}", f"--dataset_name={rows}"]))
    done = run_as_main("scripts/diagnose_fp8.py", "--quality", f"--trace={tmp_path / 'trace.json'}")
    assert done.returncode == 2 and "--quality takes none" in done.stderr
