"""Training computes what the mathematics says, however the batch is cut.

The reference below shares no code with the project: Hugging Face's model on one unpadded document at a time, logits in full,
the mean over supervised tokens, torch's own AdamW and clipping. A step takes the whole dataset, so that the order of rows does
not matter.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_fp8.loop import Trainer
from tests.small import final_weights, records, run_json, steps, train, write_model, write_rows

NUM_ROWS = 16
NUM_STEPS = 10
OPTIONS = {
    "--learning_rate": 3e-3,
    "--weight_decay": 0.5,
    "--adam_beta1": 0.8,
    "--adam_beta2": 0.9,
    "--adam_epsilon": 1e-6,
    "--max_grad_norm": 0.3,
    "--num_warmup_steps": 100,
    "--lr_scheduler": "linear",
}
WARMUP_STEPS = 1
"""A tenth of the run, which is less than what was asked for."""


def learning_rate(step: int) -> float:
    """Rate of the step with this index: up in one step, then straight down to 0."""
    peak = OPTIONS["--learning_rate"]
    return peak if step < WARMUP_STEPS else peak * (1 - (step - WARMUP_STEPS) / (NUM_STEPS - WARMUP_STEPS))


@functools.cache
def documents(rows: str, tokenizer_folder: str, train_on_prompt: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids [n] and which of them are supervised [n], of every row."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    made = []
    for line in Path(rows).read_text().splitlines():
        row = json.loads(line)
        prompt = f"Problem:\n{row['problem']}\n\nSolution:\n"
        encoded = tokenizer(prompt + row["generated_solution"], add_special_tokens=False, return_offsets_mapping=True)
        ids = [tokenizer.bos_token_id, *encoded.input_ids, tokenizer.eos_token_id]
        in_solution = [False, *[end > len(prompt) for _, end in encoded.offset_mapping], True]
        made.append((torch.tensor(ids), torch.tensor([train_on_prompt or inside for inside in in_solution])))
    return made


def mean_loss(model: torch.nn.Module, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Mean cross entropy over all supervised tokens of all documents; the first token is never predicted."""
    total, count = torch.zeros(()), 0
    for ids, supervised in rows:
        logits = model(ids[None]).logits[0]
        losses = F.cross_entropy(logits[:-1].float(), ids[1:], reduction="none")
        total = total + losses[supervised[1:]].sum()
        count += int(supervised[1:].sum())
    return total / count


@functools.cache
def reference(model_folder: str, rows: str, train_on_prompt: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of every step, and the final weights."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIONS["--weight_decay"]}, {"params": norms, "weight_decay": 0.0}],
        betas=(OPTIONS["--adam_beta1"], OPTIONS["--adam_beta2"]),
        eps=OPTIONS["--adam_epsilon"],
    )
    losses, grad_norms = [], []
    for step in range(NUM_STEPS):
        loss = mean_loss(model, documents(rows, model_folder, train_on_prompt))
        loss.backward()
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIONS["--max_grad_norm"])))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, grad_norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def sixteen_rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("exact") / "rows.jsonl", NUM_ROWS)


@pytest.mark.parametrize("cut", ["16x1", "8x2", "4x4", "3x6", "1x16"])
def test_a_padded_step_is_the_reference_however_it_is_cut(tmp_path, tiny_model, sixteen_rows, cut):
    batch_size, accumulation = cut.split("x")
    options = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}"]
    compare_with_reference(tmp_path, tiny_model, sixteen_rows, False, *options)


@pytest.mark.parametrize("cut", ["8x1", "4x2", "2x4", "1x8"])
def test_a_packed_step_is_the_reference_however_it_is_cut(tmp_path, tiny_model, sixteen_rows, cut):
    batch_size, accumulation = cut.split("x")
    options = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}", "--packing"]
    compare_with_reference(tmp_path, tiny_model, sixteen_rows, False, *options)
    assert 4 < run_json(tmp_path)["data"]["num_rows_of_batches"] <= 8


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_with_the_loss_on_the_prompt_too(tmp_path, tiny_model, sixteen_rows, packing):
    compare_with_reference(
        tmp_path, tiny_model, sixteen_rows, True, "--train_on_prompt", "--batch_size=16", f"--packing={packing}"
    )


@pytest.mark.parametrize("options", [["--gradient_checkpointing"], ["--attn_implementation=eager", "--packing"]], ids=str)
def test_what_saves_memory_changes_nothing(tmp_path, tiny_model, sixteen_rows, options):
    compare_with_reference(tmp_path, tiny_model, sixteen_rows, False, "--batch_size=16", *options)


def compare_with_reference(folder: Path, model: str, rows: str, train_on_prompt: bool, *cut: str) -> None:
    """Train with options `cut` and hold losses, norms, rates and weights against the reference."""
    options = [f"{name}={value}" for name, value in OPTIONS.items()]
    train(
        *options,
        *cut,
        f"--model_name={model}",
        f"--dataset_name={rows}",
        "--validation_fraction=0",
        "--max_seq_length=256",
        f"--num_epochs={NUM_STEPS}",
        f"--output_dir={folder}",
    )
    losses, grad_norms, weights = reference(model, rows, train_on_prompt)
    taken = steps(folder)
    assert len(taken) == NUM_STEPS
    assert [step["loss"] for step in taken] == pytest.approx(losses, rel=1e-5)
    assert [step["grad_norm"] for step in taken] == pytest.approx(grad_norms, rel=1e-4)
    assert [step["learning_rate"] for step in taken] == pytest.approx([learning_rate(i) for i in range(NUM_STEPS)], rel=1e-6)
    assert min(grad_norms) > 2 * OPTIONS["--max_grad_norm"], "clipping must have something to clip"
    exported = final_weights(folder)
    assert exported.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(exported[name], weight, rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_the_evaluation_is_the_mean_over_the_held_out_tokens(tmp_path, sixteen_rows):
    """In batches of unequal token counts, whose means must not be averaged; and without dropout."""
    model_folder = write_model(tmp_path / "model", attention_dropout=0.5)
    train(
        f"--model_name={model_folder}",
        "--dataset_name", folder_with_validation(tmp_path / "data", sixteen_rows),
        "--max_seq_length=256",
        "--batch_size=3",
        "--max_steps=2",
        "--learning_rate=0",
        f"--output_dir={tmp_path / 'run'}",
    )  # fmt: skip
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


@pytest.fixture
def taken_rows(monkeypatch) -> list[list[int]]:
    """Fills with the dataset rows of each optimizer step that is taken."""
    taken: list[list[int]] = []
    take_step = Trainer._take_step

    def remember_rows(self, batches, start):
        taken.append([row for batch in batches for row in batch.row_ids])
        return take_step(self, batches, start)

    monkeypatch.setattr(Trainer, "_take_step", remember_rows)
    return taken


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_the_loss_of_every_step_is_the_mean_over_its_rows(tmp_path, tiny_model, sixteen_rows, taken_rows, packing):
    train(
        f"--model_name={tiny_model}", f"--dataset_name={sixteen_rows}", "--validation_fraction=0", "--max_seq_length=256",
        "--batch_size=2", "--learning_rate=0", f"--output_dir={tmp_path}", "--no_export", f"--packing={packing}",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    of_all = documents(sixteen_rows, tiny_model, False)
    assert len(taken_rows) >= 3
    for step, rows in zip(steps(tmp_path), taken_rows, strict=True):
        with torch.no_grad():
            assert step["loss"] == pytest.approx(float(mean_loss(model, [of_all[row] for row in rows])), rel=1e-6)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_each_epoch_sees_each_row_once(tmp_path, tiny_model, sixteen_rows, taken_rows, packing):
    """--num_epochs 2 sees each row twice, and --max_steps goes on into further epochs."""
    common = [
        f"--model_name={tiny_model}", f"--dataset_name={sixteen_rows}", "--validation_fraction=0", "--max_seq_length=256",
        "--batch_size=3", "--no_export", f"--packing={packing}",
    ]  # fmt: skip
    train(*common, "--num_epochs=2", f"--output_dir={tmp_path / 'two'}")
    two = sum(taken_rows, [])
    assert sorted(two) == sorted([*range(NUM_ROWS), *range(NUM_ROWS)])
    assert sorted(two[:NUM_ROWS]) == list(range(NUM_ROWS))
    assert two[:NUM_ROWS] != two[NUM_ROWS:], "each epoch has its own order"
    taken = steps(tmp_path / "two")
    assert len(taken) == len(taken_rows) and taken[-1]["epoch"] == 2.0

    taken_rows.clear()
    train(*common, f"--max_steps={len(taken) + 1}", f"--output_dir={tmp_path / 'beyond'}")
    beyond = sum(taken_rows, [])
    assert beyond[: len(two)] == two and len(beyond) > len(two)
    assert 2.0 < steps(tmp_path / "beyond")[-1]["epoch"] < 3.0
