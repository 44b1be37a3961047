"""train_fp8.py as a user meets it, and every option that a CPU can show to have its effect."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wandb
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_fp8.config.options import PrecisionConfig
from tests.support.documented_commands import ONE_GPU_COMMANDS, TESTED_COMMANDS, config_of, cpu_options, write_dataset
from tests.support.small import final_weights, records, run_json, steps, train, write_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

PLAIN_RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    open("modules", "w").write(" ".join(sys.modules))
"""


# Whole runs


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A run without a model or dataset, in a process of its own, and the folder that it ran in; what it imported is in
    the file `modules` there.
    """
    folder = tmp_path_factory.mktemp("plain")
    words = ["--max_steps=8", "--max_seq_length=128", "--num_of_samples=200", "--learning_rate=5e-3"]
    words.append("--eval_batches=4")
    return subprocess.run(
        [sys.executable, "-c", PLAIN_RUN, str(ROOT / "train_fp8.py"), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "default::FutureWarning", "PYTHONPATH": str(ROOT)},
    ), folder


def test_without_a_model_or_dataset_the_embedded_ones_are_trained_evaluated_and_exported(plain_run):
    done, folder = plain_run
    assert (done.returncode, done.stderr) == (0, ""), "no word of any library"
    assert not any("\r" in line or "%|" in line or "arning" in line for line in done.stdout.splitlines())
    (run,) = (folder / "runs").iterdir()
    ran = run_json(run)["precision"]["effective"].replace("no", "fp32")  # bf16 on a GPU
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-embedded-{ran}", run.name)

    losses = [step["loss"] for step in steps(run)]
    assert len(losses) == 8 and losses[-1] < losses[0] - 1
    assert losses[0] == pytest.approx(math.log(1024), abs=0.3), "random weights guess among the vocabulary"
    assert losses[-1] - 1 < records(run)[-1]["eval_loss"] < losses[0] - 1

    model, info = AutoModelForCausalLM.from_pretrained(run / "final", output_loading_info=True)
    assert not any(info.values())
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    model.generate(**tokenizer("Compute 2 + 2.", return_tensors="pt"), max_new_tokens=2, do_sample=False)
    assert "| optimizer steps | 8 |" in (run / "final" / "README.md").read_text()

    recorded, summary = run_json(run), json.loads((run / "summary.json").read_text())
    assert recorded["precision"]["effective"] == "no" and recorded["precision"]["optimizer"] == "adamw_fp32"
    assert recorded["precision"]["coverage"]["num_fp8_weights"] == 0
    assert recorded["config"]["data"]["max_seq_length"] == 128 and recorded["config"]["optim"]["learning_rate"] == 5e-3
    assert recorded["effective"]["num_warmup_steps"] == 0 and recorded["effective"]["packing"] is False
    assert recorded["provenance"]["command"][1:3] == ["--max_steps=8", "--max_seq_length=128"]
    assert summary["steps"] == 8 and summary["exported"] == f"runs/{run.name}/final"
    assert min(summary["phases_s"].values()) >= 0
    assert summary["phases_s"]["first_step"] == records(run)[0]["step_time_s"]


def test_a_plain_run_loads_no_optional_package_and_no_mode_that_it_has_not(plain_run):
    _, folder = plain_run
    loaded = (folder / "modules").read_text().split()
    modes = "distributed.deepspeed distributed.fsdp distributed.fp8_params "
    modes += "distributed.context_parallel precision.torchao precision.frozen observability.trackers optim.offload "
    modes += "config.accelerate_env models.fp8_checkpoint"
    unused = {"transformer_engine", "deepspeed", "peft", "wandb", *(f"llm_fp8.{mode}" for mode in modes.split())}
    assert not unused & set(loaded)


@pytest.fixture(scope="module")
def hub_dataset(tmp_path_factory) -> Path:
    """A folder laid out as the hub lays out the dataset of the documented commands."""
    return write_dataset(tmp_path_factory.mktemp("dataset"), 300)


@pytest.fixture(scope="module")
def hub_models(tiny_model, tmp_path_factory) -> dict[str, str]:
    """Owner on the hub -> a model's folder, laid out as the hub lays them out."""
    # The tokenizer class that belongs to this type of model adds a token.
    qwen = write_model(tmp_path_factory.mktemp("models") / "qwen", model_type="qwen2", vocab_size=1040)
    return {"meta-llama": tiny_model, "Qwen": qwen}


def on_a_cpu(name: str) -> str:
    """What tells a command's run on a CPU from others: all but the model's size, precision, length and W&B's name."""
    asked = config_of(TESTED_COMMANDS[name])
    model = dataclasses.replace(asked.model, model_name=asked.model.model_name.partition("/")[0], use_te=False)
    data = dataclasses.replace(asked.data, max_seq_length=128)
    run = dataclasses.replace(asked.run, wandb_run_name=None)
    return repr(dataclasses.replace(asked, model=model, data=data, run=run, precision=PrecisionConfig()))


@pytest.mark.parametrize("name", {on_a_cpu(name): name for name in reversed(ONE_GPU_COMMANDS)}.values())
def test_a_documented_command(name, tmp_path, hub_models, hub_dataset, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    asked, folder = config_of(TESTED_COMMANDS[name]), tmp_path / "run"
    words = cpu_options(TESTED_COMMANDS[name], hub_models[asked.model.model_name.partition("/")[0]], hub_dataset)
    assert train(*words, "--max_steps=3", "--eval_batches=1", f"--output_dir={folder}") == 0
    wandb.teardown()
    recorded = run_json(folder)
    assert recorded["data"]["num_rows_read"] == 300 and recorded["precision"]["effective"] == "bf16"
    assert recorded["config"]["data"]["split_name"] == asked.data.split_name
    assert recorded["effective"]["global_batch_size"] == asked.data.batch_size
    assert len(steps(folder)) == 3 and (folder / "final" / "model.safetensors").exists()
    assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == asked.run.use_wandb


# Options, one by one


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model, rows):
    """A function: train a few steps with these options in a new folder, which it returns; but for options that were
    asked for before the folder of then.
    """

    @functools.cache
    def start(*options: str) -> Path:
        folder = tmp_path_factory.mktemp("option") / "run"
        common = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--max_seq_length=128", "--max_steps=4"]
        assert train(*common, "--learning_rate=1e-2", f"--output_dir={folder}", *options) == 0
        return folder

    return start


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in steps(folder)]


def test_the_same_options_give_the_same_bits_and_another_seed_does_not(run):
    first, again, other = run(), run("--seed=42"), run("--seed=7")  # 42 is the default
    assert losses(first) == losses(again) != losses(other)
    for name, tensor in final_weights(first).items():
        assert torch.equal(tensor, final_weights(again)[name])


def test_mixed_precision_bf16_rounds_and_no_does_not(run):
    fp32, bf16 = (losses(run("--attn_implementation=eager", f"--mixed_precision={name}")) for name in ("no", "bf16"))
    assert fp32 != bf16
    assert bf16 == pytest.approx(fp32, rel=1e-2)


def test_an_evaluation_changes_nothing(run):
    assert losses(run("--eval_every=1")) == losses(run())


def test_gradient_checkpointing_and_attention_are_recorded_and_change_no_result(run):
    plain, checkpointed, eager = run(), run("--gradient_checkpointing"), run("--attn_implementation=eager")
    automatic = run("--gradient_checkpointing=auto")
    assert losses(checkpointed) == losses(plain) == losses(automatic)
    assert run_json(automatic)["config"]["model"]["gradient_checkpointing"] == 0, "there is no GPU"
    assert losses(eager) == pytest.approx(losses(plain), rel=1e-5)
    assert run_json(eager)["effective"]["attn_implementation"] == "eager"
    assert run_json(plain)["effective"]["attn_implementation"] == "sdpa"


def test_a_bf16_model_is_trained_in_fp32_and_exported_in_bf16(tmp_path, rows):
    model = write_model(tmp_path / "bf16", torch.bfloat16)
    options = [f"--model_name={model}", f"--dataset_name={rows}", "--max_seq_length=128", "--max_steps=2"]
    train(*options, f"--output_dir={tmp_path / 'run'}")
    assert run_json(tmp_path / "run")["precision"]["parameter_dtype"] == "torch.float32"
    assert {tensor.dtype for tensor in final_weights(tmp_path / "run").values()} == {torch.bfloat16}
    with safe_open(tmp_path / "run" / "final" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
