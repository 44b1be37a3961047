"""However a batch is divided into micro-batches, training equals the reference in tests/support/reference.py.

A step uses the whole dataset, so that the order of rows does not matter.
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


@pytest.mark.parametrize("sizes", ["3x6", "1x16"])
def test_padded_steps_equal_reference(tmp_path, tiny_model, sixteen_rows, sizes):
    batch_size, accumulation = sizes.split("x")
    options = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}"]
    compare_with_reference(tmp_path, tiny_model, sixteen_rows, False, *options)


@pytest.mark.parametrize("sizes", ["8x1", "1x8"])
def test_packed_steps_equal_reference(tmp_path, tiny_model, sixteen_rows, sizes):
    batch_size, accumulation = sizes.split("x")
    options = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}", "--packing"]
    compare_with_reference(tmp_path, tiny_model, sixteen_rows, False, *options)
    assert 4 < run_json(tmp_path)["data"]["num_rows_of_batches"] <= 8


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_gemma_te_decoder_steps_equal_reference(tmp_path, gemma_model, sixteen_rows, packing, monkeypatch):
    """The run uses the stand-in for Transformer Engine, and includes the parity check and the export."""
    install_stand_in(monkeypatch)
    options = ["--use_te", "--batch_size=8", "--gradient_accumulation_steps=2", f"--packing={packing}"]
    compare_with_reference(tmp_path, gemma_model, sixteen_rows, False, *options)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_merged_micro_batches_give_the_same_losses(tmp_path, tiny_model, sixteen_rows, packing, monkeypatch):
    """On a large GPU, the run merges four micro-batches of 2 into one of 8. Resumed on a small GPU, it still uses 8."""
    options = [f"--model_name={tiny_model}", f"--dataset_name={sixteen_rows}", "--validation_fraction=0", "--no_export"]
    options += ["--max_seq_length=256", "--batch_size=2", "--gradient_accumulation_steps=4", "--max_steps=4"]
    options += ["--learning_rate=1e-3", "--log_every=1", f"--packing={packing}"]
    unmerged, merged = tmp_path / "unmerged", tmp_path / "merged"
    train(*options, f"--output_dir={unmerged}")
    monkeypatch.setattr("llm_fp8.settle.plan.detect_machine", lambda *_: Machine(gpu_gib=80.0))
    monkeypatch.setattr("llm_fp8.models.memory.RunSize.is_bounded", True)  # merging needs a bound, which fp32 lacks
    train(*options, f"--output_dir={merged}", "--save_every=2", "--save_total_limit=2")
    losses = [[step["loss"] for step in steps(folder)] for folder in (merged, unmerged)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert run_json(merged)["config"]["data"]["batch_size"] == 8
    assert run_json(merged)["effective"]["num_requested_micro_batches"] == 4
    monkeypatch.setattr("llm_fp8.settle.plan.detect_machine", lambda *_: Machine(gpu_gib=2.1))
    train(*options, f"--output_dir={merged}", f"--resume_from={merged / 'checkpoints/step-00000002'}")
    assert run_json(merged)["resumes"][-1]["config"]["data"]["batch_size"] == 8
    assert [step["loss"] for step in steps(merged)[-2:]] == losses[0][-2:]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_steps_with_loss_on_prompt_equal_reference(tmp_path, tiny_model, sixteen_rows, packing):
    compare_with_reference(
        tmp_path, tiny_model, sixteen_rows, True, "--train_on_prompt", "--batch_size=16", f"--packing={packing}"
    )


def test_eval_loss_is_the_mean_over_validation_tokens(tmp_path, sixteen_rows):
    """Batches have different numbers of tokens, so averaging their mean losses would be wrong. Dropout must be off."""
    model_folder = write_model(tmp_path / "model", attention_dropout=0.5)
    data = write_dataset_with_validation(tmp_path / "data", sixteen_rows)
    options = f"--model_name={model_folder} --dataset_name={data} --max_seq_length=256 --batch_size=3 --max_steps=2"
    train(*options.split(), "--learning_rate=0", f"--output_dir={tmp_path / 'run'}")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        expected = float(mean_loss(model, documents(sixteen_rows, model_folder, False)[-4:]))
    evaluation = next(record for record in records(tmp_path / "run") if "eval_loss" in record)
    assert evaluation["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert evaluation["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


def write_dataset_with_validation(folder: Path, rows: str) -> str:
    """Write the rows of a jsonl file to a dataset folder, the last four as validation split, and return the folder."""
    lines = Path(rows).read_text().splitlines(keepends=True)
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(lines[:-4]))
    (folder / "validation.jsonl").write_text("".join(lines[-4:]))
    return str(folder)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_loss_of_each_step_is_the_mean_over_its_rows(tmp_path, tiny_model, sixteen_rows, monkeypatch, packing):
    rows_by_step: list[list[int]] = []
    take_step = Timeline.take_step

    def take_step_and_record_rows(self, batches, start):
        rows_by_step.append([row for batch in batches for row in batch.row_ids])
        return take_step(self, batches, start)

    monkeypatch.setattr(Timeline, "take_step", take_step_and_record_rows)
    options = f"--model_name={tiny_model} --dataset_name={sixteen_rows} --validation_fraction=0 --packing={packing}"
    options += f" --max_seq_length=256 --batch_size=2 --learning_rate=0 --no_export --output_dir={tmp_path}"
    train(*options.split())
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    encoded = documents(sixteen_rows, tiny_model, False)
    assert len(rows_by_step) >= 3
    for step, rows in zip(steps(tmp_path), rows_by_step, strict=True):
        with torch.no_grad():
            assert step["loss"] == pytest.approx(float(mean_loss(model, [encoded[row] for row in rows])), rel=1e-6)
