"""How benchmarks/fp8_head_rounding.py scales the operands of a pretrained model's head, and what it makes of them."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from benchmarks import fp8_head_rounding, pretrained
from benchmarks.fp8_head_rounding import BLOCK, E4M3, SCALES, batch, block_amax, cast_by_scales
from llm_fp8.kernels.softmax import IGNORE_INDEX
from tests.support.fp8_head_reference import MODES, head_of, run


@pytest.mark.parametrize("shape", [(1, 128), (128, 1), (128, 128), (1, 200), (130, 1)])
def test_every_block_has_its_own_maximum_also_those_cut_off(shape):
    tensor = torch.randn(130, 200, generator=torch.Generator().manual_seed(0))
    got = block_amax(tensor, *shape)
    for row, column in ((0, 0), (127, 127), (128, 128), (129, 199)):
        top, left = row // shape[0] * shape[0], column // shape[1] * shape[1]
        assert got[row, column] == tensor[top : top + shape[0], left : left + shape[1]].abs().max()


@pytest.mark.parametrize("contracted", [0, 1])
def test_a_large_value_flushes_what_shares_its_scale_and_no_more(contracted):
    """Lines across the contracted dimension have their own scales but with one for all; blocks cut them to 128."""
    lines = torch.ones(200, 300)
    lines[0, 0] = 1e9
    tensor = lines if contracted == 1 else lines.t()
    zeros = {}
    for scales in SCALES:
        values = cast_by_scales(tensor, scales, contracted).dequantized(torch.float32)
        zeros[scales] = int((values == 0).sum())
        assert torch.allclose(values[values != 0], tensor[values != 0], rtol=2**-4)
    assert zeros == {"tensor": lines.numel() - 1, "row": 299, "block": BLOCK - 1}
    square = cast_by_scales(tensor, "block", contracted, square=True).dequantized(torch.float32)
    assert int((square == 0).sum()) == BLOCK * BLOCK - 1


@pytest.mark.parametrize("scales", SCALES)
def test_a_shift_moves_the_values_and_not_what_they_stand_for(scales):
    tensor = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    plain, shifted, halved = (cast_by_scales(tensor, scales, 1, shift=shift) for shift in (0.0, 0.5, 1.0))
    limit = torch.finfo(E4M3).max
    assert plain.values.float().abs().max() == limit and halved.values.float().abs().max() == limit / 2
    rounded = [cast.dequantized(torch.float32) for cast in (plain, shifted, halved)]
    assert (rounded[0] - rounded[2]).abs().max() < 2e-3 * tensor.abs().max(), "a power of two moves what is tiny"
    assert not torch.allclose(rounded[0], rounded[1], rtol=2**-6)
    assert torch.allclose(rounded[1], tensor, rtol=2**-4, atol=2e-3)


def test_a_loss_is_the_mean_of_the_rows_and_exact_where_nothing_is_rounded(monkeypatch):
    """Powers of two, none far from the largest, lie in E4M3 themselves: with one scale and with more."""
    monkeypatch.setattr(fp8_head_rounding, "SHIFTS", (0.0, 1.0))
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (2.0 ** torch.randint(-2, 2, (n, 160), generator=generator) for n in (96, 512))
    hidden, weight = hidden.bfloat16(), (weight / 16).bfloat16()
    labels, lengths = torch.arange(96), [10, 80, 6]
    found = fp8_head_rounding.loss_by_scales(hidden, weight, labels, lengths)
    losses = F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="none").split(lengths)
    assert found["bf16"] == pytest.approx(sum(float(row.mean()) for row in losses) / 3, rel=1e-5)
    # 448 over a power of two is no power of two, and its inverse is rounded: an ulp of bf16 here and there.
    assert all(abs(way["value"]) < 1e-4 for way in found["added"].values())
    monkeypatch.setattr(fp8_head_rounding, "SHIFTS", (0.0, 0.5))
    for way in fp8_head_rounding.loss_by_scales(*batch(4.0, 96, 512, 160), lengths)["added"].values():
        assert way["low"] < way["value"] < way["high"] and abs(way["value"]) > 1e-4
        assert way["value"] == pytest.approx(sum(way["by_shift"]) / 2) and len(set(way["by_shift"])) == 2


@pytest.mark.parametrize("mode", MODES)
def test_one_scale_is_what_training_computes(mode):
    """`--fp8_lm_head` itself errs by the same: operands, bound, layouts and the modes' logits are those of a run."""
    hidden, weight, labels = batch(4.0, 128, 512, 64)
    want, _ = fp8_head_rounding.exact_gradients(hidden, weight, labels)
    ways = fp8_head_rounding.gradients_by_scales(hidden, weight, labels)["ways"]
    trained = run(hidden.requires_grad_(), weight.requires_grad_(), labels, head_of(weight, mode))[1:]
    for side, got in zip(("hidden", "weight"), trained, strict=True):
        error = fp8_head_rounding.compared(got, want[side])
        assert {name: ways[f"{mode}, tensor, e5m2"][side][name] for name in error} == pytest.approx(error, rel=1e-3)


def test_scales_of_their_own_keep_rows_that_one_scale_loses():
    """Tokens of a vocabulary that are all but never predicted: E4M3 with one scale gives them no gradient."""
    hidden, weight, _ = batch(2.0, 128, 512, 64)
    hidden[:, 0], weight[:64, 0] = 4.0, -3.0
    labels = torch.arange(128) + 100
    ways = fp8_head_rounding.gradients_by_scales(hidden, weight, labels)["ways"]
    lost = {scales: ways[f"gradients, {scales}, e4m3"]["weight"] for scales in SCALES}
    assert lost["tensor"]["zero_rows"] == 64 / 512 and lost["row"]["zero_rows"] == lost["block"]["zero_rows"] == 0
    assert lost["tensor"]["flushed"] > lost["row"]["flushed"] > 0
    assert all(way["hidden"]["error"] > ways["bf16"]["hidden"]["error"] for name, way in ways.items() if name != "bf16")


def test_a_pretrained_model_is_measured_on_its_held_out_rows(tmp_path, tiny_model, rows, monkeypatch, capsys):
    monkeypatch.setattr(fp8_head_rounding, "SCALES_RESULT", tmp_path / "scales.json")
    monkeypatch.setattr(fp8_head_rounding, "NUM_ROWS", 3)
    monkeypatch.setattr(pretrained, "SEQ_LENGTH", 128)
    monkeypatch.setattr("sys.argv", ["fp8_head_rounding.py", f"--model={tiny_model}", f"--text={rows}"])
    assert fp8_head_rounding.main() == 0 and "all, block, e4m3" in capsys.readouterr().out
    record = json.loads((tmp_path / "scales.json").read_text())
    settings = pretrained.make_parser().parse_args([f"--model={tiny_model}", f"--data={rows}", "--output=unused"])
    settings.data_cache_dir = tmp_path / "cache"
    padded = pretrained.held_out_batches(settings)[0]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(input_ids=padded.input_ids, attention_mask=padded.attention_mask).logits.float()
    losses = F.cross_entropy(logits.transpose(1, 2), padded.labels, reduction="none")[:3]
    means = [row[own != IGNORE_INDEX].mean() for row, own in zip(losses, padded.labels, strict=False)]
    assert record["loss"]["bf16"] == pytest.approx(float(torch.stack(means).mean()), rel=2e-3)
    assert record["shape"]["rows"] == 3 and record["shape"]["tokens"] == int((padded.labels[:3] >= 0).sum())


def test_a_model_without_text_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["fp8_head_rounding.py", "--model", "somewhere"])
    with pytest.raises(SystemExit) as ended:
        fp8_head_rounding.main()
    assert ended.value.code == 2 and "--model and --text go together" in capsys.readouterr().err
