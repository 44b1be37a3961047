"""Answers generated in the middle of a Transformer Engine training are those of the exported checkpoint, and
training does not feel them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import te_llama
from llm_fp8.data import encode_prompt
from llm_fp8.data.embedded import DATASET_DIR
from llm_fp8.models.source import EMBEDDED_MODEL
from llm_fp8.models.weights import fill_te_model
from llm_fp8.observability.metrics import GIB
from llm_fp8.train.generate import HEADROOM_GIB, SMALLEST_BATCH, copy_for_generation, generate_greedy, memory_needed_gib
from tests.support.families import FAMILIES, family_config
from tests.support.generation import texts_of_family

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]

NUM_PROBLEMS = 40
"""More than one batch of generation."""


def script(name: str, *options: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script of the project; returns the finished process with its output."""
    variables = {key: value for key, value in os.environ.items() if key != "NVIDIA_TF32_OVERRIDE"} | (environment or {})
    command = [sys.executable, name, *map(str, options)]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Remainders: the form is learnt in some steps, and then a third of the answers is right by chance alone."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {
            "problem": f"What is the remainder of {a} + {b} divided by 3?",
            "generated_solution": f"It is that of {a} + {b}.\nThe answer is \\boxed{{{(a + b) % 3}}}.",
            "expected_answer": str((a + b) % 3),
        }
        for a in range(60)
        for b in range(20)
    ]
    held_out = [row for number, row in enumerate(rows) if number % 17 == 0][:NUM_PROBLEMS]
    kept = [row for row in rows if row not in held_out]
    (folder / "data").mkdir()
    for split, part in (("train", kept), ("validation", held_out)):
        (folder / "data" / f"{split}-00000-of-00001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


PRECISIONS = {
    "bf16": ["--use_te", "--mixed_precision", "bf16"],
    "delayed": ["--use_te", "--mixed_precision", "fp8"],
    "current": ["--use_te", "--mixed_precision", "fp8", "--fp8_scenario", "current"],
    "swapped": ["--mixed_precision", "fp8"],
}


def options(dataset: Path, precision: str) -> list[str]:
    return [
        *PRECISIONS[precision],
        "--dataset_name",
        str(dataset),
        "--max_seq_length",
        "128",
        "--batch_size",
        "32",
        "--learning_rate",
        "2e-3",
        "--max_steps",
        "120",
        "--num_epochs",
        "100",
        "--log_every",
        "20",
        "--eval_every",
        "60",
    ]


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_exported_folder_gives_the_answers_that_training_saw(precision, dataset, tmp_path):
    run = tmp_path / "run"
    asked = ["--eval_exact_match", NUM_PROBLEMS, "--eval_max_new_tokens", 40]
    done = script("train_fp8.py", *options(dataset, precision), *asked, "--output_dir", run)
    assert done.returncode == 0, done.stderr
    evaluations = [record for record in records(run) if "eval_loss" in record]
    assert [record["step"] for record in evaluations] == [60, 120]
    last = evaluations[-1]
    assert last["eval_num_problems"] == NUM_PROBLEMS and last["eval_exact_match"] > 0, (
        "something was learnt, or nothing is shown"
    )

    done = script(
        "scripts/evaluate.py", "--model", run / "final", "--num_problems", NUM_PROBLEMS, "--max_new_tokens", 40
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((run / "exact_match.json").read_text())
    assert written["dtype"] == "torch.bfloat16"
    assert written["exact_match"] == last["eval_exact_match"]
    in_training = [json.loads(line) for line in (run / "eval_answers" / "step-120.jsonl").read_text().splitlines()]
    assert written["answers"] == in_training


@pytest.mark.parametrize("precision", ["bf16", "delayed"])
def test_training_does_not_feel_the_evaluation(precision, dataset, tmp_path):
    """Delayed scaling's scales and histories included: they decide the steps behind the evaluation."""
    environment = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    losses = {}
    for name, asked in (("with", ["--eval_exact_match", 8, "--eval_max_new_tokens", 16]), ("without", [])):
        command = [*options(dataset, precision), *asked, "--max_steps", 12, "--eval_every", 4, "--eval_batches", 1]
        done = script("train_fp8.py", *command, "--output_dir", tmp_path / name, environment=environment)
        assert done.returncode == 0, done.stderr
        losses[name] = [record["loss"] for record in records(tmp_path / name) if "loss" in record]
    assert losses["with"] == losses["without"]
    ours, theirs = (load_file(tmp_path / name / "final" / "model.safetensors") for name in losses)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_graph_is_that_of_transformers(family, device):
    ours, theirs = texts_of_family(family, device)
    assert len(set(theirs)) == len(theirs) and ours == theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_the_copy_of_a_te_model_is_the_hugging_face_model(family, device, tmp_path):
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(family_config(family), dtype=torch.bfloat16)
    reference.save_pretrained(tmp_path)
    model = te_llama.build_te_model(family_config(family), torch.bfloat16, device)
    fill_te_model(model, [tmp_path / "model.safetensors"])
    state = torch.cuda.get_rng_state()
    copied = copy_for_generation(model, torch.Tensor.detach, torch.bfloat16, device)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tensors = copied.state_dict()
    assert all(torch.equal(tensor, tensors[name].cpu()) for name, tensor in loaded.state_dict().items())
    buffers = dict(copied.named_buffers())
    assert all(torch.equal(buffer, buffers[name].cpu()) for name, buffer in loaded.named_buffers())


def test_the_memory_that_is_asked_for_is_enough_and_not_far_too_much(device):
    """A batch of prompts of the longest kind that fits; a GPU that has what `memory_needed_gib` says must not run
    out.
    """
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    line = (DATASET_DIR / "data" / "validation-00000-of-00001.jsonl").read_text().splitlines()[0]
    prompt = (encode_prompt(json.loads(line)["problem"], tokenizer) * 40)[:1024]
    num_parameters = sum(math.prod(parameter.shape) for parameter in model.parameters())
    needed = memory_needed_gib(config, num_parameters, SMALLEST_BATCH * (len(prompt) + 64), device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() / GIB - num_parameters * 2 / GIB
    generate_greedy(model, tokenizer, [prompt] * SMALLEST_BATCH, 64, SMALLEST_BATCH)
    used = torch.cuda.max_memory_allocated() / GIB - before
    assert used <= needed <= used + 1.5 * HEADROOM_GIB
