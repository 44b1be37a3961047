"""train_fp8.py run as a user runs it, and the effects of options that a CPU can show."""

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

import train_fp8
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
    """Run train_fp8.py with neither --model_name nor --dataset_name. Return the finished process and its folder, in
    which the file `modules` lists the modules that the process imported.
    """
    folder = tmp_path_factory.mktemp("plain")
    options = ["--max_steps=8", "--max_seq_length=128", "--num_of_samples=200", "--learning_rate=5e-3"]
    options.append("--eval_batches=4")
    return subprocess.run(
        [sys.executable, "-c", PLAIN_RUN, str(ROOT / "train_fp8.py"), *options],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "default::FutureWarning", "PYTHONPATH": str(ROOT)},
    ), folder


def test_run_without_model_and_dataset_uses_the_embedded_ones(plain_run):
    process, folder = plain_run
    assert (process.returncode, process.stderr) == (0, ""), "no library prints anything"
    assert not any("\r" in line or "%|" in line or "arning" in line for line in process.stdout.splitlines())
    (run,) = (folder / "runs").iterdir()
    precision = run_json(run)["precision"]["effective"].replace("no", "fp32")  # bf16 on a GPU
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}\.\d{{3}}-embedded-{precision}", run.name)

    losses = [step["loss"] for step in steps(run)]
    assert len(losses) == 8 and losses[-1] < losses[0] - 1
    assert losses[0] == pytest.approx(math.log(1024), abs=0.3), "random weights predict a uniform distribution"
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


def test_bare_command_first_says_what_it_trains_and_how_long(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_fp8.py"])
    monkeypatch.setattr(train_fp8, "train", lambda description: print("training") or 0)
    assert train_fp8.main() == 0
    assert re.fullmatch("(?s)Without options.* 6,000 .* minutes.*\ntraining\n", capsys.readouterr().out)


def test_plain_run_imports_no_optional_package_and_no_unused_mode(plain_run):
    _, folder = plain_run
    loaded = (folder / "modules").read_text().split()
    modes = "distributed.deepspeed distributed.fsdp distributed.fp8_params "
    modes += "distributed.context_parallel precision.torchao precision.frozen observability.trackers optim.offload "
    modes += "config.accelerate_env models.fp8_checkpoint"
    unused = {"transformer_engine", "deepspeed", "peft", "wandb", *(f"llm_fp8.{mode}" for mode in modes.split())}
    assert not unused & set(loaded)


@pytest.fixture(scope="module")
def hub_dataset(tmp_path_factory) -> Path:
    """Return a folder of 300 rows in the layout of OpenMathInstruct-2, which the documented commands train on."""
    return write_dataset(tmp_path_factory.mktemp("dataset"), 300)


@pytest.fixture(scope="module")
def hub_models(tiny_model, tmp_path_factory) -> dict[str, str]:
    """Return the folders of tiny models by the owner of the models that they replace: "meta-llama" or "Qwen"."""
    # The tokenizer class of this model type adds a token.
    qwen = write_model(tmp_path_factory.mktemp("models") / "qwen", model_type="qwen2", vocab_size=1040)
    return {"meta-llama": tiny_model, "Qwen": qwen}


def cpu_run_key(name: str) -> str:
    """Return a key for a command, `TESTED_COMMANDS[name]`. Commands that differ only in what a CPU test replaces (model
    size, --use_te, precision, sequence length, W&B run name) have equal keys.
    """
    config = config_of(TESTED_COMMANDS[name])
    model = dataclasses.replace(config.model, model_name=config.model.model_name.partition("/")[0], use_te=False)
    data = dataclasses.replace(config.data, max_seq_length=128)
    run = dataclasses.replace(config.run, wandb_run_name=None)
    return repr(dataclasses.replace(config, model=model, data=data, run=run, precision=PrecisionConfig()))


@pytest.mark.parametrize("name", {cpu_run_key(name): name for name in reversed(ONE_GPU_COMMANDS)}.values())
def test_documented_command_runs(name, tmp_path, hub_models, hub_dataset, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    config, folder = config_of(TESTED_COMMANDS[name]), tmp_path / "run"
    options = cpu_options(TESTED_COMMANDS[name], hub_models[config.model.model_name.partition("/")[0]], hub_dataset)
    assert train(*options, "--max_steps=3", "--eval_batches=1", f"--output_dir={folder}") == 0
    wandb.teardown()
    recorded = run_json(folder)
    assert recorded["data"]["num_rows_read"] == 300 and recorded["precision"]["effective"] == "bf16"
    assert recorded["config"]["data"]["split_name"] == config.data.split_name
    assert recorded["effective"]["global_batch_size"] == config.data.batch_size
    assert len(steps(folder)) == 3 and (folder / "final" / "model.safetensors").exists()
    assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == config.run.use_wandb


# Options, one by one


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model, rows):
    """Return a cached function that takes further options, trains four steps and returns the folder of the run."""

    @functools.cache
    def start(*options: str) -> Path:
        folder = tmp_path_factory.mktemp("option") / "run"
        common = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--max_seq_length=128", "--max_steps=4"]
        assert train(*common, "--learning_rate=1e-2", f"--output_dir={folder}", *options) == 0
        return folder

    return start


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in steps(folder)]


def test_results_depend_on_the_seed_only(run):
    first, same_seed, other_seed = run(), run("--seed=42"), run("--seed=7")  # 42 is the default
    assert losses(first) == losses(same_seed) != losses(other_seed)
    for name, tensor in final_weights(first).items():
        assert torch.equal(tensor, final_weights(same_seed)[name])


def test_losses_in_bf16_and_fp32_differ_by_rounding(run):
    fp32, bf16 = (losses(run("--attn_implementation=eager", f"--mixed_precision={name}")) for name in ("no", "bf16"))
    assert fp32 != bf16
    assert bf16 == pytest.approx(fp32, rel=1e-2)


def test_evaluation_does_not_change_training(run):
    assert losses(run("--eval_every=1")) == losses(run())


def test_gradient_checkpointing_and_attention_do_not_change_losses(run):
    plain, checkpointed, eager = run(), run("--gradient_checkpointing"), run("--attn_implementation=eager")
    automatic = run("--gradient_checkpointing=auto")
    assert losses(checkpointed) == losses(plain) == losses(automatic)
    assert run_json(automatic)["config"]["model"]["gradient_checkpointing"] == 0, "there is no GPU"
    assert losses(eager) == pytest.approx(losses(plain), rel=1e-5)
    assert run_json(eager)["effective"]["attn_implementation"] == "eager"
    assert run_json(plain)["effective"]["attn_implementation"] == "sdpa"


def test_bf16_model_trains_in_fp32_and_exports_bf16(tmp_path, rows):
    model = write_model(tmp_path / "bf16", torch.bfloat16)
    options = [f"--model_name={model}", f"--dataset_name={rows}", "--max_seq_length=128", "--max_steps=2"]
    train(*options, f"--output_dir={tmp_path / 'run'}")
    assert run_json(tmp_path / "run")["precision"]["parameter_dtype"] == "torch.float32"
    assert {tensor.dtype for tensor in final_weights(tmp_path / "run").values()} == {torch.bfloat16}
    with safe_open(tmp_path / "run" / "final" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
