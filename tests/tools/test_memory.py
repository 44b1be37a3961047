"""llm-fp8 memory: names of models and GPUs, the figures of every training method, and the printed commands."""

from __future__ import annotations

import io
import json
import shlex
import sys

import pytest
from huggingface_hub import constants

from llm_fp8.config.options import ModelConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.data.embedded import MODEL_DIR
from llm_fp8.settle.memory import WAYS
from llm_fp8.tools import memory
from llm_fp8.tools.gpus import GPUS, named_machine
from llm_fp8.tools.memory import find_model
from llm_fp8.tools.programs import wide_console
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks
from tests.support.families import family_config
from tests.support.small import tiny_config


@pytest.fixture
def figures(tmp_path, call_main, capsys):
    def run(*options: str) -> dict:
        file = tmp_path / "figures.json"
        assert call_main(memory, *options, "--output", file) == 0
        content = json.loads(file.read_text())
        printed = capsys.readouterr().out
        assert all(f"{row['needed_gib']:.1f}" in printed for row in content["rows"])
        return content

    return run


@pytest.mark.parametrize(
    ("name", "gib"),
    [("H100", 79.2), ("h200", 139.8), ("NVIDIA H100 80GB HBM3", 79.2), ("80", 80), ("24GB", 24), ("44.5GiB", 44.5)]
    + [("rtx 4090", 23.5), ("A100-SXM4-80GB", 79.1), ("A100-40GB", 40), ("H100 94 GB", 94), ("80 GB", 80)]
    + [("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 94.9), ("NVIDIA GH200 480GB", 94.5)]
    + [("5090", 31.3), ("NVIDIA B300 SXM6 AC", 267.6), ("NVIDIA RTX 6000 Ada Generation", 47.4), ("L40S", 44.4)],
)
def test_gpu_is_a_name_or_a_number_of_gib(name, gib):
    assert named_machine(name, LaunchRanks()).gpu_gib == gib


def test_every_listed_name_is_known_and_others_are_refused():
    assert all(named_machine(f"NVIDIA {name}", LaunchRanks()).capability >= (8, 0) for name in GPUS)
    for name in ("H900", "H1000", "H100:2", "4090 Laptop GPU", "RTX 3090", "3090", "-3", "0", "nan", ""):
        with pytest.raises(UserError, match="--gpu"):
            named_machine(name, LaunchRanks())


def test_model_is_a_bundled_name_a_hub_id_or_a_folder():
    hub_name = "meta-llama/Meta-Llama-3.1-8B-Instruct"
    for name in (hub_name, "llama-3.1-8b-instruct", "Llama-57M", "embedded", str(MODEL_DIR)):
        hf_config, options = find_model(ModelConfig(model_name=name))
        assert hf_config.num_hidden_layers > 0
        assert options["model_name"] == ("meta-llama/Llama-3.1-8B" if name.startswith("llama-") else name)
        assert options["random_init"] == (name == "Llama-57M")


@pytest.mark.parametrize("name", ["lama-3.1-8b", "owner/name"])
def test_misspelt_name_and_unreachable_hub_name_bundled_models_at_once(monkeypatch, name):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("a request is repeated"))
    with pytest.raises(UserError, match="Llama-3.1-8B"):
        find_model(ModelConfig(model_name=name))


def test_rows_cover_every_method_and_sharding_mode_and_fitting_rows_come_first(figures):
    rows = figures("--model_name=Llama-3.1-8B", "--gpu=H100", "--num_gpus=2")["rows"]
    assert {(row["training"], row["sharding_mode"]) for row in rows} == {
        (way, mode) for way in WAYS for mode in (("ddp",) if "offload" in way else ("ddp", "fsdp_grad", "fsdp_full"))
    }
    fits = [row["fits"] for row in rows]
    assert fits == sorted(fits, key=lambda answer: ("yes", "with", "no").index(answer.split()[0]))
    assert fits[0] == "yes" and rows[0]["training"] == "full, recomputed" and rows[0]["needed_gib"] < 79.2
    assert all(sum(row["parts_gib"].values()) == pytest.approx(row["total_gib"]) for row in rows)


def test_rows_that_fit_may_reduce_gradients_after_each_micro_batch(figures):
    """Rows are ways to train. Some fit only with --sync_every_micro_batch, which avoids 53 GiB of gradients per GPU."""
    rows = figures("--model_name=Qwen2.5-14B", "--gpu=H100", "--num_gpus=4", "--gradient_accumulation_steps=4")["rows"]
    fitting = [row for row in rows if row["fits"] == "yes"]
    assert "adamw_8bit, recomputed" in {row["training"] for row in fitting if "sync_every" in row["command"]}
    assert all(row["needed_gib"] <= 79.2 for row in fitting)


def test_lora_needs_bf16_memory_while_loading_and_fp8_memory_in_training(figures):
    sizes = [f"--{name}" for name in ("gpu=H100", "batch_size=4", "max_seq_length=2048")]
    small, large = (
        next(row for row in figures(f"--model_name={name}", *sizes)["rows"] if row["training"] == "LoRA")
        for name in ("Qwen3-8B", "Llama-3.1-70B")
    )
    assert small["total_gib"] == pytest.approx(51.84, rel=0.02), "measured, in big_models.json"
    assert large["fits"] == "no" and large["total_gib"] > 131, "before its weights are cast"


def test_rows_say_so_if_activations_are_not_counted(figures, tmp_path):
    for config, fits in ((tiny_config("mixtral"), "without activations"), (family_config("qwen3_5_text"), "yes")):
        config.save_pretrained(tmp_path)
        rows = figures(f"--model_name={tmp_path}", "--gpu=24", "--max_seq_length=64")["rows"]
        assert {row["fits"] for row in rows} == {fits}


def test_printed_commands_parse(figures):
    schedule = ["--gpu=80", "--lr_scheduler=cosine_with_min_lr", '--lr_scheduler_kwargs={"min_lr_rate": 0.1}']
    for options in (["--gpu=H100"], ["--gpu=44", "--num_gpus=4"], ["--gpu=A100", "--mixed_precision=bf16"], schedule):
        for row in figures("--model_name=Llama-3.2-3B", "--batch_size=12", *options)["rows"]:
            command = shlex.split(row["command"])
            script = next(number for number, word in enumerate(command) if word.endswith(".py"))
            config = parse_config(command[script + 1 :], parallel="multi" in command[script])
            assert config.data.batch_size * config.optim.gradient_accumulation_steps == 12
            assert (command[script] == "train_multi_gpu.py") == ("--num_gpus=4" in options)


def test_options_of_the_run_hold_in_every_row_and_in_its_command(figures):
    options = "--model_name=Qwen3-8B --gpu=5090 --lora_rank=32 --batch_size=auto --dataset_name=a.jsonl"
    for row, way in zip(figures(*options.split())["rows"], ("LoRA", "LoRA, recomputed"), strict=True):
        config = parse_config(shlex.split(row["command"])[2:])
        assert (row["training"], config.lora.lora_rank, config.data.dataset_name) == (way, 32, "a.jsonl")
        assert row["fits"] == f"with --batch_size {config.data.batch_size}"


def test_gpu_without_fp8_trains_in_bf16_and_impossible_options_are_refused(figures):
    rows = figures("--model_name=Llama-3.2-1B", "--gpu=A100")["rows"]
    assert "--mixed_precision=bf16" in rows[0]["command"]
    rows = figures("--model_name=Llama-3.2-1B", "--gpu=A100", "--mixed_precision=no")["rows"]
    assert any(row["fits"].startswith("no: --optimizer adamw_8bit needs") for row in rows)
    for option, value in (("mixed_precision", "fp8"), ("max_seq_length", 999999), ("num_gpus", 0)):
        with pytest.raises(UserError, match=f"--{option}"):
            figures("--model_name=Llama-3.2-1B", "--gpu=A100", f"--{option}={value}")


@pytest.mark.parametrize(("columns", "width"), [("60", 60), (None, 160)])
def test_table_in_a_pipe_has_the_width_of_the_variable_columns(monkeypatch, columns, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert wide_console().width == width
