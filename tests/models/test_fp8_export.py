"""Models written in fp8: what is stored, what transformers with compressed-tensors computes from it, and refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import llm_fp8.models.fp8_export
from llm_fp8.models.fp8_export import export_fp8, fp8_rows, round_inputs_
from llm_fp8.tools.export_fp8 import main
from llm_fp8.utils.errors import UserError
from tests.support.families import FAMILIES, family_config
from tests.support.fp8_files import quantization_config, set_quantization
from tests.support.small import steps, train, write_model, write_rows
from tests.support.stored import stored_weights

IDS = torch.arange(3, 43)[None]


# --- Rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_the_nearest_fp8_to_the_stored_scale(scale_dtype):
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


def test_rows_without_a_scale_stay_zero_or_small():
    weight = torch.tensor([[0.0, -0.0], [1e-40, -1e-41], [3e38, -1e38], [1e-30, 0.0]])
    values, scale = fp8_rows(weight)
    assert scale[:2].eq(1).all() and values[:2].float().eq(0).all()
    assert values.float().isfinite().all() and scale.isfinite().all()
    torch.testing.assert_close(values.float() * scale, weight, rtol=0.07, atol=1e-39)


# --- The files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("max_shard_size", ["1GB", "40KB"])
def test_what_is_written(tmp_path, dtype, max_shard_size):
    source = write_model(tmp_path / "source", dtype, max_shard_size)
    (tmp_path / "source" / "README.md").write_text("a card")
    (tmp_path / "source" / "pytorch_model.bin").write_text("a pickle")
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
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in Path(source).iterdir()} - {"pytorch_model.bin"}
    sizes = [
        sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        for folder in (tmp_path / "source", tmp_path / "out")
    ]
    assert [size_before, size_after] == sizes and sizes[1] < sizes[0]
    if max_shard_size == "40KB":
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        held = {file.name: load_file(file) for file in (tmp_path / "out").glob("*.safetensors")}
        assert index["weight_map"] == {name: file for file, contents in held.items() for name in contents}
        assert index["metadata"]["total_size"] == size_after


def test_one_file_is_in_memory_at_a_time(tmp_path, monkeypatch):
    source = write_model(tmp_path / "source", max_shard_size="40KB")
    read: list[str] = []
    written: list[tuple[int, int]] = []
    in_fp8 = llm_fp8.models.fp8_export._in_fp8

    def watched(path: Path, *more: Any) -> Any:
        read.append(path.name)
        return in_fp8(path, *more)

    monkeypatch.setattr(llm_fp8.models.fp8_export, "_in_fp8", watched)
    monkeypatch.setattr(
        llm_fp8.models.fp8_export,
        "save_file",
        lambda contents, path, **more: (written.append((len(read), 1)), save_file(contents, path, **more)),
    )
    export_fp8(Path(source), tmp_path / "out")
    assert len(read) == 4 and [count for count, _ in written] == [1, 2, 3, 4]


# --- Who loads them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_transformers_computes_the_emulated_logits(tmp_path, family, dtype):
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    source = AutoModelForCausalLM.from_config(family_config(family), dtype=dtype)
    source.save_pretrained(tmp_path / "source")
    export_fp8(tmp_path / "source", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
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
        only_weights = emulated(IDS).logits
        round_inputs_(emulated)
        expected, found = emulated(IDS).logits, theirs(IDS).logits
        before = source.float().eval()(IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert (expected - only_weights).abs().max() > 0.01 and (only_weights - before).abs().max() > 0.01


@pytest.mark.slow
def test_the_export_of_a_run_trains_again(tmp_path, rows):
    options = [f"--dataset_name={rows}", "--validation_fraction=0", "--max_seq_length=256", "--batch_size=2"]
    options += ["--log_every=1", "--max_steps=2"]
    train(f"--model_name={write_model(tmp_path / 'model')}", *options, f"--output_dir={tmp_path / 'one'}")
    export_fp8(tmp_path / "one" / "final", tmp_path / "fp8")
    train(f"--model_name={tmp_path / 'fp8'}", *options, f"--output_dir={tmp_path / 'two'}")
    assert all(step["loss"] < 8 for step in steps(tmp_path / "two"))


# --- The command ------------------------------------------------------------------------------------------------------


def command(monkeypatch: pytest.MonkeyPatch, *options: object) -> int:
    monkeypatch.setattr(sys, "argv", ["export_fp8.py", *map(str, options)])
    return main()


def test_the_command_says_sizes_and_losses(tmp_path, monkeypatch, capsys):
    source, data = write_model(tmp_path / "source", initializer_range=0.3), write_rows(tmp_path / "rows.jsonl", 5)
    out = tmp_path / "deep" / "out"
    assert command(monkeypatch, source, "--output", out, "--data", data, "--max_seq_length=256") == 0
    said = capsys.readouterr().out
    assert f"{out}: " in said and " GiB of weights, " in said
    line = next(line for line in said.splitlines() if line.startswith("eval loss over "))
    before, after = float(line.split(": ")[1].split()[0]), float(line.split(", ")[1].split()[0])
    assert 5 < before < 9 and 0 < abs(after - before) < 0.2
    assert "both are computed in float32; fp8 is emulated: weights are dequantised" in said

    # The same loss from the logits, token by token.
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    total = count = 0
    for row in map(json.loads, Path(data).read_text().splitlines()):
        prompt = tokenizer(f"Problem:\n{row['problem']}\n\nSolution:\n")["input_ids"]
        whole = (
            prompt
            + tokenizer(row["generated_solution"], add_special_tokens=False)["input_ids"]
            + [tokenizer.eos_token_id]
        )
        with torch.no_grad():
            log_probabilities = model(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
        total -= float(log_probabilities.gather(1, torch.tensor(whole[1:])[:, None])[len(prompt) - 1 :].sum())
        count += len(whole) - len(prompt)
    assert f"eval loss over {count} tokens" in line and before == pytest.approx(total / count, abs=2e-4)


def test_a_validation_split_is_what_is_evaluated(tmp_path, monkeypatch, capsys):
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.jsonl", 8)
    lines = (tmp_path / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "data" / "train.jsonl").write_text("".join(lines[:5]))
    (tmp_path / "data" / "validation.jsonl").write_text("".join(lines[5:]))
    (tmp_path / "held_out.jsonl").write_text("".join(lines[5:]))
    source, said = write_model(tmp_path / "source"), []
    for number, data in enumerate(("data", "held_out.jsonl")):
        options = [source, "--output", tmp_path / f"out-{number}", "--data", tmp_path / data, "--max_seq_length=256"]
        command(monkeypatch, *options)
        said.append(next(line for line in capsys.readouterr().out.splitlines() if line.startswith("eval loss")))
    assert said[0].replace("/data:", "") == said[1].replace("/held_out.jsonl:", "")


UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
EDITS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "missing tensor": lambda held: held.pop(UP),
    "missing norm": lambda held: held.pop(NORM),
    "surplus tensor": lambda held: held.update(more=torch.ones(2)),
    "wrong shape": lambda held: held.update({NORM: torch.ones(3)}),
    "whole numbers": lambda held: held.update({NORM: torch.ones(32, dtype=torch.int32)}),
    "fp8 already": lambda held: held.update({UP: held[UP].to(torch.float8_e4m3fn)}),
    "NaN": lambda held: held[UP][3, 2].fill_(float("nan")),
    "infinite norm": lambda held: held[NORM][1].fill_(float("inf")),
}


@pytest.mark.parametrize(
    ("how", "words"),
    {
        "output holds files": "--output .*out exists already and is no empty folder",
        "output is a file": "--output .*out exists already and is no empty folder",
        "quantised": "source is quantised already",
        "no weights": "there is no model.safetensors",
        "missing tensor": "source: the checkpoint lacks model.layers.0.mlp.up_proj.weight; export it again",
        "missing norm": "source: the checkpoint lacks model.norm.weight; export it again",
        "surplus tensor": "source: the checkpoint holds 'more', which this architecture does not have",
        "wrong shape": r"'model.norm.weight' has shape \[3\] in the checkpoint and \[32\] in the config",
        "whole numbers": "'model.norm.weight' holds torch.int32 in the checkpoint",
        "fp8 already": "model.safetensors: 'model.layers.0.mlp.up_proj.weight' is fp8, and config.json has no quant",
        "NaN": "model.safetensors: 'model.layers.0.mlp.up_proj.weight' holds values that are not finite",
        "infinite norm": "model.safetensors: 'model.norm.weight' holds values that are not finite",
        "truncated": "model.safetensors is truncated or corrupt",
        "no folder": "FINAL_DIR .*nowhere: no such folder",
        "adapter": "holds a PEFT adapter and no model",
        "no place": r"source in fp8 could not be written to /proc/nowhere/out .* another --output",
        "no data": "--data .*none.jsonl",
        "too long": "--max_seq_length 512 is more than the 256 positions",
        "length without data": "--max_seq_length has no effect without --data",
    }.items(),
)
def test_what_cannot_be_exported_is_refused(tmp_path, monkeypatch, how, words):
    source, out = Path(write_model(tmp_path / "source")), tmp_path / "out"
    weights, more = source / "model.safetensors", []
    if how == "output holds files":
        out.mkdir()
        (out / "a").touch()
    elif how == "output is a file":
        out.touch()
    elif how == "quantised":
        set_quantization(source, quantization_config("block"))
    elif how == "no weights":
        weights.unlink()
    elif how in EDITS:
        held = load_file(weights)
        EDITS[how](held)
        save_file(held, weights, metadata={"format": "pt"})
    elif how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif how == "no folder":
        source = tmp_path / "nowhere"
    elif how == "adapter":
        (source / "config.json").rename(source / "adapter_config.json")
    elif how == "no place":
        out = Path("/proc/nowhere/out")
    elif how == "no data":
        more = ["--data", tmp_path / "none.jsonl", "--max_seq_length=256"]
    elif how == "length without data":
        more = ["--max_seq_length=512"]
    elif how == "too long":
        more = ["--data", write_rows(tmp_path / "rows.jsonl", 3), "--max_seq_length=512"]
    was = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UserError, match=words) as refused:
        command(monkeypatch, source, "--output", out, *more)
    assert "--model_name" not in str(refused.value) and "--dataset_name" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == was, "nothing is left behind"


def test_a_mixture_of_experts_is_refused(tmp_path):
    sizes = dict(vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    config = AutoConfig.for_model("mixtral", num_local_experts=4, num_key_value_heads=1, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "source")
    with pytest.raises(UserError, match="source: a mixture of experts"):
        export_fp8(tmp_path / "source", tmp_path / "out")


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    export_fp8(Path(write_model(tmp_path / "source")), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
