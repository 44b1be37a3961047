"""Exports in fp8: the stored tensors, the logits that transformers with compressed-tensors computes, and refusals."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import llm_fp8.models.export
from llm_fp8.tools.compressed_tensors import export_fp8, fp8_rows, round_inputs_
from llm_fp8.tools.export_fp8 import main as export_main
from llm_fp8.utils.errors import UserError
from tests.support.families import FAMILIES, family_config
from tests.support.fp8_files import quantization_config, set_quantization
from tests.support.small import stored_weights, write_model

IDS = torch.arange(3, 43)[None]


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_rows_are_the_nearest_fp8_numbers_at_the_stored_scale(scale_dtype):
    torch.manual_seed(0)
    weight = torch.randn(64, 33).to(torch.bfloat16) * torch.logspace(-6, 3, 64)[:, None].to(torch.bfloat16)
    values, scale = fp8_rows(weight, scale_dtype)
    assert values.dtype == torch.float8_e4m3fn and scale.dtype == scale_dtype and scale.shape == (64, 1)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    codes = codes[codes.isfinite()]
    exact = weight.double() / scale.double()
    nearest = (exact[..., None] - codes).abs().amin(-1)
    error = (values.double() - exact).abs()
    # The quotient is computed in fp32, so a near tie may go either way.
    assert (error <= nearest + 1e-6 * exact.abs()).all()
    assert (values.double().abs().amax(1) == 448).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("max_shard_size", ["1GB", "40KB"])
def test_export_writes_fp8_linear_weights_and_copies_everything_else(tmp_path, dtype, max_shard_size, monkeypatch):
    source = write_model(tmp_path / "source", dtype, max_shard_size)
    (tmp_path / "source" / "README.md").write_text("a card")
    (tmp_path / "source" / "pytorch_model.bin").write_text("a pickle")
    monkeypatch.setattr(llm_fp8.models.export, "MAX_FILE_SIZE", max_shard_size)
    size_before, size_after = export_fp8(Path(source), tmp_path / "out")
    before, after = stored_weights(source), stored_weights(tmp_path / "out")
    linear = {name for name in before if name.endswith("_proj.weight")}
    assert len(linear) == 14
    assert after.keys() == before.keys() | {f"{name}_scale" for name in linear}
    for name, tensor in before.items():
        if name not in linear:
            assert after[name].dtype == dtype and torch.equal(after[name], tensor)
            continue
        scale = after[f"{name}_scale"]
        assert scale.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        amax = tensor.float().abs().amax(1, keepdim=True)
        assert torch.equal(scale, (amax / 448).to(scale.dtype))
        half_spacing = 2**-4 * tensor.float().abs() + 2**-10 * scale.float()
        assert ((after[name].float() * scale.float() - tensor.float()).abs() <= half_spacing * 1.001).all()
    folders = (tmp_path / "source", tmp_path / "out")
    source_names, names = ({path.name for path in each.iterdir() if path.suffix != ".safetensors"} for each in folders)
    assert names == source_names - {"pytorch_model.bin"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"], "transformers 4 reads the top-level key"
    sizes = [sum(file.stat().st_size for file in each.glob("*.safetensors")) for each in folders]
    assert [size_before, size_after] == sizes and sizes[1] < sizes[0]
    if max_shard_size == "40KB":
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        shards = {file.name: load_file(file) for file in (tmp_path / "out").glob("*.safetensors")}
        assert index["weight_map"] == {name: file for file, contents in shards.items() for name in contents}


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.bfloat16) for family in FAMILIES), ("llama2", torch.float32), ("llama2", torch.float16)],
    ids=str,
)
def test_transformers_computes_the_same_logits_as_an_emulation_of_fp8(tmp_path, family, dtype):
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    hf_config = family_config(family, hidden_size=128, intermediate_size=256)
    source = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)
    source.save_pretrained(tmp_path / "source")
    export_fp8(tmp_path / "source", tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"] and config["format"] == "float-quantized"

    stored = stored_weights(tmp_path / "out")
    emulated = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32).eval()
    with torch.no_grad():
        changed = 0
        for name, parameter in emulated.named_parameters():
            if f"{name}_scale" in stored:
                parameter.copy_(stored[name].float() * stored[f"{name}_scale"].float())
                changed += 1
        assert changed
        logits_of_fp8_weights = emulated(IDS).logits
        round_inputs_(emulated)
        expected, logits = emulated(IDS).logits, exported(IDS).logits
        logits_of_source = source.float().eval()(IDS).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert (expected - logits_of_fp8_weights).abs().max() > 0.01
    assert (logits_of_fp8_weights - logits_of_source).abs().max() > 0.01


LINEAR = "model.layers.0.mlp.up_proj.weight"


def test_export_without_a_weight_is_refused_and_removes_its_folder(tmp_path):
    source = Path(write_model(tmp_path / "source"))
    weights = load_file(source / "model.safetensors")
    del weights[LINEAR]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"lack {LINEAR}"):
        export_fp8(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_export_refuses_an_existing_folder_non_finite_weights_and_quantised_models(tmp_path):
    source, out = Path(write_model(tmp_path / "source")), tmp_path / "out"
    out.mkdir()
    (out / "a").touch()
    with pytest.raises(UserError, match="--output .*out exists already"):
        export_fp8(source, out)
    weights = load_file(source / "model.safetensors")
    for name, value in ((LINEAR, torch.nan), ("model.norm.weight", torch.inf)):
        changed = {name: weights[name].clone().index_fill_(0, torch.tensor([1]), value)}
        save_file(weights | changed, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=f"source: {name}"):
            export_fp8(source, tmp_path / "other")
    set_quantization(source, quantization_config("block"))
    with pytest.raises(UserError, match="source is quantised already"):
        export_fp8(source, tmp_path / "other")


def test_loss_of_the_export_does_not_depend_on_the_number_of_rows(tmp_path, monkeypatch, capsys):
    """The rows have different lengths, and as many rows as --batch_size has by default would fit in a batch."""
    source, losses = write_model(tmp_path / "source"), []
    for copies in (1, 4):
        rows = [{"text": "one two three"}, {"text": "four five six seven eight nine"}] * copies
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        argv = ["export_fp8", str(source), f"--output={tmp_path / str(copies)}", f"--data={tmp_path / 'rows.jsonl'}"]
        monkeypatch.setattr(sys, "argv", argv)
        assert export_main() == 0
        losses.append(re.search(r": ([\d.]+) before", capsys.readouterr().out)[1])
    assert losses[0] == losses[1]
