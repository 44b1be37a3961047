"""Training computes what the mathematics says, however the batch is cut.

The reference is that of tests/support/reference.py. A step takes the whole dataset, so that the order of rows does
not matter.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from llm_fp8.run.timeline import Timeline
from llm_fp8.settle.machine import Machine
from tests.support.reference import compare_with_reference, documents, mean_loss
from tests.support.small import records, run_json, steps, train, write_model
from tests.support.stand_in_te import install_stand_in

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cut", ["3x6", "1x16"])
def test_a_padded_step_is_the_reference_however_it_is_cut(tmp_path, tiny_model, sixteen_rows, cut):
    batch_size, accumulation = cut.split("x")
    options = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}"]
    compare_with_reference(tmp_path, tiny_model, sixteen_rows, False, *options)


@pytest.mark.parametrize("cut", ["8x1", "1x8"])
def test_a_packed_step_is_the_reference_however_it_is_cut(tmp_path, tiny_model, sixteen_rows, cut):
    batch_size, accumulation = cut.split("x")
    options = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}", "--packing"]
    compare_with_reference(tmp_path, tiny_model, sixteen_rows, False, *options)
    assert 4 < run_json(tmp_path)["data"]["num_rows_of_batches"] <= 8


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_the_te_decoder_of_gemma_takes_the_references_steps(tmp_path, gemma_model, sixteen_rows, packing, monkeypatch):
    """Transformer Engine's modules are stood in for; the parity check and the export are part of the run."""
    install_stand_in(monkeypatch)
    options = ["--use_te", "--batch_size=8", "--gradient_accumulation_steps=2", f"--packing={packing}"]
    compare_with_reference(tmp_path, gemma_model, sixteen_rows, False, *options)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_merged_micro_batches_take_the_same_steps(tmp_path, tiny_model, sixteen_rows, packing, monkeypatch):
    """A resumed run keeps the cut of its checkpoint, whatever fits its own GPU."""
    options = [f"--model_name={tiny_model}", f"--dataset_name={sixteen_rows}", "--validation_fraction=0", "--no_export"]
    options += ["--max_seq_length=256", "--batch_size=2", "--gradient_accumulation_steps=4", "--max_steps=4"]
    options += ["--learning_rate=1e-3", "--log_every=1", f"--packing={packing}"]
    apart, merged = tmp_path / "apart", tmp_path / "merged"
    train(*options, f"--output_dir={apart}")
    monkeypatch.setattr("llm_fp8.settle.plan.look", lambda *_: Machine(gpu_gib=80.0))
    monkeypatch.setattr("llm_fp8.models.memory.RunSize.is_bounded", True)  # in fp32 it is not
    train(*options, f"--output_dir={merged}", "--save_every=2", "--save_total_limit=2")
    assert [step["loss"] for step in steps(merged)] == pytest.approx([step["loss"] for step in steps(apart)], rel=1e-5)
    assert run_json(merged)["config"]["data"]["batch_size"] == 8
    assert run_json(merged)["effective"]["num_requested_micro_batches"] == 4
    whole = steps(merged)
    monkeypatch.setattr("llm_fp8.settle.plan.look", lambda *_: Machine(gpu_gib=2.1))
    train(*options, f"--output_dir={merged}", f"--resume_from={merged / 'checkpoints/step-00000002'}")
    assert run_json(merged)["resumes"][-1]["config"]["data"]["batch_size"] == 8
    assert [step["loss"] for step in steps(merged)[-2:]] == [step["loss"] for step in whole[-2:]]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_with_the_loss_on_the_prompt_too(tmp_path, tiny_model, sixteen_rows, packing):
    compare_with_reference(
        tmp_path, tiny_model, sixteen_rows, True, "--train_on_prompt", "--batch_size=16", f"--packing={packing}"
    )


def test_the_evaluation_is_the_mean_over_the_held_out_tokens(tmp_path, sixteen_rows):
    """In batches of unequal token counts, whose means must not be averaged; and without dropout."""
    model_folder = write_model(tmp_path / "model", attention_dropout=0.5)
    data = folder_with_validation(tmp_path / "data", sixteen_rows)
    options = f"--model_name={model_folder} --dataset_name={data} --max_seq_length=256 --batch_size=3 --max_steps=2"
    train(*options.split(), "--learning_rate=0", f"--output_dir={tmp_path / 'run'}")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        expected = float(mean_loss(model, documents(sixteen_rows, model_folder, False)[-4:]))
    evaluation = next(record for record in records(tmp_path / "run") if "eval_loss" in record)
    assert evaluation["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert evaluation["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


def folder_with_validation(folder: Path, rows: str) -> str:
    """A dataset whose last four rows are the validation split."""
    lines = Path(rows).read_text().splitlines(keepends=True)
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(lines[:-4]))
    (folder / "validation.jsonl").write_text("".join(lines[-4:]))
    return str(folder)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_the_loss_of_every_step_is_the_mean_over_its_rows(tmp_path, tiny_model, sixteen_rows, monkeypatch, packing):
    taken_rows: list[list[int]] = []
    take_step = Timeline.take_step

    def remember_rows(self, batches, start):
        taken_rows.append([row for batch in batches for row in batch.row_ids])
        return take_step(self, batches, start)

    monkeypatch.setattr(Timeline, "take_step", remember_rows)
    options = f"--model_name={tiny_model} --dataset_name={sixteen_rows} --validation_fraction=0 --packing={packing}"
    options += f" --max_seq_length=256 --batch_size=2 --learning_rate=0 --no_export --output_dir={tmp_path}"
    train(*options.split())
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    of_all = documents(sixteen_rows, tiny_model, False)
    assert len(taken_rows) >= 3
    for step, rows in zip(steps(tmp_path), taken_rows, strict=True):
        with torch.no_grad():
            assert step["loss"] == pytest.approx(float(mean_loss(model, [of_all[row] for row in rows])), rel=1e-6)
