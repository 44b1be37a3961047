"""A reference for training that uses none of the package's code.

It runs Hugging Face's model on one unpadded document at a time, computes all logits, averages the loss over supervised
tokens, and uses torch's AdamW and clipping.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.small import final_weights, steps, train

NUM_ROWS = 16
NUM_STEPS = 3
OPTIONS = {
    "--learning_rate": 3e-3,
    "--weight_decay": 0.5,
    "--adam_beta2": 0.9,
    "--max_grad_norm": 0.3,
    "--num_warmup_steps": 0,
    "--lr_scheduler": "linear",
}


def learning_rate(step: int) -> float:
    """Return the learning rate of `step`, which counts from 0. The rate falls linearly to 0."""
    return OPTIONS["--learning_rate"] * (1 - step / NUM_STEPS)


@functools.cache
def documents(rows: str, tokenizer_folder: str, train_on_prompt: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (token ids [n], bool mask of supervised tokens [n]) for each row of the jsonl file `rows`."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    encoded_rows = []
    for line in Path(rows).read_text().splitlines():
        row = json.loads(line)
        prompt = f"Problem:\n{row['problem']}\n\nSolution:\n"
        encoded = tokenizer(prompt + row["generated_solution"], add_special_tokens=False, return_offsets_mapping=True)
        ids = [tokenizer.bos_token_id, *encoded.input_ids, tokenizer.eos_token_id]
        in_solution = [False, *[end > len(prompt) for _, end in encoded.offset_mapping], True]
        encoded_rows.append((torch.tensor(ids), torch.tensor([train_on_prompt or inside for inside in in_solution])))
    return encoded_rows


def mean_loss(model: torch.nn.Module, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return the mean cross entropy over the supervised tokens of `rows`. The first token of a row is not predicted."""
    total, count = torch.zeros(()), 0
    for ids, supervised in rows:
        logits = model(ids[None]).logits[0]
        losses = F.cross_entropy(logits[:-1].float(), ids[1:], reduction="none")
        total = total + losses[supervised[1:]].sum()
        count += int(supervised[1:].sum())
    return total / count


@functools.cache
def reference(
    model_folder: str, rows: str, train_on_prompt: bool
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train on the jsonl file `rows`. Return the losses and gradient norms of all steps, and the final weights."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIONS["--weight_decay"]}, {"params": norms, "weight_decay": 0.0}],
        betas=(0.9, OPTIONS["--adam_beta2"]),
    )
    losses, grad_norms = plain_steps(model, optimizer, documents(rows, model_folder, train_on_prompt))
    return losses, grad_norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def plain_steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[list[float], list[float]]:
    """Train `model` for `NUM_STEPS` steps on all `rows`. Return losses and gradient norms."""
    losses, grad_norms = [], []
    for step in range(NUM_STEPS):
        loss = mean_loss(model, rows)
        loss.backward()
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIONS["--max_grad_norm"])))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, grad_norms


def reference_options(model: str, rows: str, folder: Path) -> list[str]:
    """Return the options of a run that trains like `reference`. The caller adds those that set the micro-batches."""
    return [
        *(f"{name}={value}" for name, value in OPTIONS.items()),
        f"--model_name={model}",
        f"--dataset_name={rows}",
        "--validation_fraction=0",
        "--max_seq_length=256",
        f"--num_epochs={NUM_STEPS}",
        f"--output_dir={folder}",
    ]


def compare_with_reference(folder: Path, model: str, rows: str, train_on_prompt: bool, *options: str) -> None:
    """Train in this process with `reference_options` and `options`, and check that the run equals `reference`."""
    train(*reference_options(model, rows, folder), *options)
    check_against_reference(folder, model, rows, train_on_prompt)


def check_against_reference(folder: Path, model: str, rows: str, train_on_prompt: bool) -> None:
    """Check that losses, gradient norms, learning rates and weights of the run in `folder` equal `reference`."""
    losses, grad_norms, weights = reference(model, rows, train_on_prompt)
    recorded = steps(folder)
    assert len(recorded) == NUM_STEPS
    assert [step["loss"] for step in recorded] == pytest.approx(losses, rel=1e-5)
    assert [step["grad_norm"] for step in recorded] == pytest.approx(grad_norms, rel=1e-4)
    assert [step["learning_rate"] for step in recorded] == pytest.approx(
        [learning_rate(i) for i in range(NUM_STEPS)], rel=1e-6
    )
    assert min(grad_norms) > 2 * OPTIONS["--max_grad_norm"], "clipping must change the gradient"
    exported = final_weights(folder)
    assert exported.keys() == weights.keys()
    for name, weight in weights.items():
        # A root mean square, because the sign of AdamW's step depends on the CPU if a gradient is close to zero.
        difference = (exported[name] - weight).square().mean().sqrt()
        assert difference < 5e-6, f"{name}: {difference}"
