"""Checkpoints in fp8 are loaded as exactly value times scale in fp32; damaged and unsupported ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PretrainedConfig

from llm_fp8.models.fp8_checkpoint import dequantised, fp8_format
from llm_fp8.utils.errors import UserError
from tests.support.fp8_files import KINDS, quantise, quantization_config, write_fp8_model
from tests.support.ranks import full_parameters, run_on_ranks, sharded_model
from tests.support.small import assert_same_bits, built_model, final_weights, run_json, steps, stored_weights, train


def loaded_weights(name: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return built_model(name, dtype).module.state_dict()


# --- The arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(256, 128), (130, 200), (3, 5), (128, 129), (129, 128)])
@pytest.mark.parametrize("block", [(128, 128), (64, 48), (1, 7)])
def test_dequantised_rows_equal_value_times_scale(shape, block):
    generator = torch.Generator().manual_seed(0)
    # All finite e4m3 numbers, including subnormals and both zeros.
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    values = codes[torch.randint(len(codes), shape, generator=generator)].view(torch.float8_e4m3fn)
    scale = torch.rand(-(-shape[0] // block[0]), -(-shape[1] // block[1]), generator=generator) * 1e-3
    expected = (values.double() * scale.double().kron(torch.ones(block))[: shape[0], : shape[1]]).float()
    for first, last in ((0, shape[0]), (0, 1), (1, 3), (shape[0] - 1, shape[0]), (2, 2)):
        rows = dequantised(values[first:last], scale, block, first)
        assert rows.dtype == torch.float32 and torch.equal(rows, expected[first:last])


# --- Loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_model_loads_as_dequantised_weights(tmp_path, kind, dtype):
    fp8, plain = write_fp8_model(tmp_path, kind, "40KB")
    stored = [tensor.dtype for tensor in stored_weights(fp8).values()]
    assert stored.count(torch.float8_e4m3fn) == 14
    assert_same_bits(loaded_weights(fp8, dtype), loaded_weights(plain, dtype))


def all_parameters(rank: int, names: list[str]) -> list[dict[str, torch.Tensor]]:
    return [full_parameters(sharded_model(name)) for name in names]


@pytest.mark.slow
def test_sharded_ranks_load_dequantised_weights(tmp_path):
    # The ranks have 11, 11 and 10 of 32 rows, so that their borders lie inside blocks.
    written = [write_fp8_model(tmp_path / kind, kind, "40KB") for kind in KINDS]
    expected = [loaded_weights(plain) for _, plain in written]
    for rank_models in run_on_ranks(3, tmp_path / "run", all_parameters, [fp8 for fp8, _ in written]):
        for weights, dequantised_weights in zip(rank_models, expected, strict=True):
            assert_same_bits(weights, dequantised_weights)


def test_files_of_compressed_tensors_load_as_it_decompresses_them(tmp_path):
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    _, plain = write_fp8_model(tmp_path, "channel")
    for kind in ("channel", "compressed block"):
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        entries = quantization_config(kind)
        config = quantization.QuantizationConfig.model_validate(entries | {"quantization_status": "frozen"})
        quantization.apply_quantization_config(model, config)
        modules = [module for module in model.modules() if getattr(module, "quantization_scheme", None) is not None]
        assert len(modules) == 14
        for module in modules:
            with torch.no_grad():
                module.weight_scale.copy_(quantise(module.weight.detach().float(), kind)[1])
        compressor = compressors.ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        folder = tmp_path / kind
        model.save_pretrained(folder)
        compressor.update_config(folder)
        assert json.loads((folder / "config.json").read_text())["quantization_config"]["format"] == "float-quantized"
        weights = loaded_weights(str(folder))
        dequantise = CompressedTensorsConfig(dequantize=True)
        theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=dequantise, dtype=torch.bfloat16)
        # `bfloat16` rounds ties to even like compressed-tensors; `LocalShard.fill` rounds them away from zero.
        assert_same_bits({name: weight.bfloat16() for name, weight in weights.items()}, theirs.state_dict())


# --- Runs -------------------------------------------------------------------------------------------------------------

RUN = ["--validation_fraction=0", "--max_seq_length=256", "--batch_size=2", "--log_every=1", "--max_steps=3"]


@pytest.mark.slow
def test_run_on_fp8_weights_equals_run_on_dequantised_weights(tmp_path, rows):
    options = ["--mixed_precision=bf16", "--optimizer=adamw_master"]
    fp8, plain = write_fp8_model(tmp_path, "uneven block")
    for name in (fp8, plain):
        train(f"--model_name={name}", f"--dataset_name={rows}", *RUN, *options, f"--output_dir={name}-run")
    assert [step["loss"] for step in steps(f"{fp8}-run")] == [step["loss"] for step in steps(f"{plain}-run")]
    description = "fp8 (e4m3) with a scale for each block of 20 x 12 values"
    assert run_json(f"{fp8}-run")["model"]["dequantised_from"] == description
    assert_same_bits(final_weights(f"{fp8}-run"), final_weights(f"{plain}-run"))
    assert "quantization_config" not in json.loads((Path(f"{fp8}-run") / "final" / "config.json").read_text())


# --- Damage -----------------------------------------------------------------------------------------------------------

WEIGHT = "model.layers.0.mlp.up_proj.weight"
SCALE, HEAD = f"{WEIGHT}_scale_inv", "lm_head.weight"


def edit_tensors(folder: str, edit: Any) -> None:
    path = Path(folder) / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "message"),
    {
        "no scale": (lambda tensors: tensors.pop(SCALE), f"'{WEIGHT}'"),
        "wrong shape": (lambda tensors: tensors.update({SCALE: torch.ones(1, 4)}), "shape"),
        "whole numbers": (lambda tensors: tensors.update({HEAD: torch.ones(1024, 32, dtype=torch.int8)}), f"'{HEAD}'"),
    }.values(),
)
def test_damaged_checkpoint_is_refused_by_name(tmp_path, edit, message):
    fp8, _ = write_fp8_model(tmp_path, "uneven block")
    edit_tensors(fp8, edit)
    with pytest.raises(UserError, match=f"{fp8}/model.safetensors.*{message}"):
        loaded_weights(fp8)


UNSUPPORTED = {
    "no method": {"bits": 4},
    "gptq": {"quant_method": "gptq"},
    "no blocks": quantization_config("block") | {"weight_block_size": None},
    "packed": quantization_config("channel") | {"format": "pack-quantized"},
    "rotated": quantization_config("channel") | {"transform_config": {"config_groups": {"u": {}}}},
}


@pytest.mark.parametrize("entries", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_quantisation_is_refused(entries):
    config = PretrainedConfig()
    config.name_or_path, config.quantization_config = "somewhere", entries
    with pytest.raises(UserError, match="--model_name somewhere: cannot read the quantised weights"):
        fp8_format(config)
