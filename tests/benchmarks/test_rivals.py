"""Ours beside other trainers: the variants, what the probe reads, the rows, and a run of what is installed here."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.rival_automodel import config_of
from benchmarks.rival_torchtitan import words_02
from benchmarks.rival_trainings import TRAININGS, describe_kernels, our_words, storage_of
from benchmarks.rivals import (
    FULL_TOKENS,
    VARIANTS,
    chosen,
    command_of,
    describe,
    full_rows,
    kept,
    next_try,
    num_chat_tokens,
    parse,
    settings_of,
    write_model,
    write_rows,
)
from llm_fp8.config.parser import parse_config
from llm_fp8.data.embedded import DATASET_DIR
from llm_fp8.optim.adamw import EightBitAdamW, MasterAdamW
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_jsonl
from tests.support.small import tiny_config
from tests.support.small import write_rows as write_short_rows

ROOT = Path(__file__).resolve().parents[2]
NAMED = {variant.name: variant for variant in VARIANTS}
JOB = {
    "package": "ours",
    "architecture": "Llama-3.2-1B",
    "model": "m",
    "rows": "r.jsonl",
    "folder": "f",
    "options": {"mixed_precision": "fp8"},
    "num_gpus": 1,
    "seq_length": 64,
    "batch_size": 4,
    "micro_batches": 2,
    "light": False,
    "steps": 9,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_config().save_pretrained(folder / "config")
    write_model(str(folder / "config"), folder / "written")
    return folder / "written"


def test_every_package_has_a_training_and_a_bf16_variant():
    assert {variant.package for variant in VARIANTS} == set(TRAININGS)
    assert {variant.package for variant in VARIANTS if variant.asked == "bf16"} == set(TRAININGS)
    assert len(NAMED) == len(VARIANTS)


def test_variants_by_name_or_beginning():
    assert [variant.name for variant in chosen(["trl_te"])] == ["trl_te"]
    assert [variant.name for variant in chosen(["ours_", "trl_te"])] == ["ours_bf16", "ours_fp8", "trl_te"]
    assert chosen([""]) == list(VARIANTS)


def test_our_command_is_one_that_the_script_takes():
    config = parse_config(our_words(JOB)[1:])
    assert config.precision.mixed_precision == "fp8" and config.data.packing and config.optim.optimizer == "auto"
    script, *words = our_words({**JOB, "light": True, "num_gpus": 2})
    config = parse_config(words, parallel=True)
    assert script == "train_multi_gpu.py" and config.parallel.sharding_mode == "fsdp_full"
    assert config.optim.optimizer == "auto" and config.optim.gradient_accumulation_steps == 2
    assert parse_config(our_words({**JOB, "light": True})[1:]).optim.optimizer == "adamw_8bit"
    assert "--sync_every_micro_batch" in our_words({**JOB, "light": True, "num_gpus": 2})


def test_the_launchers(tmp_path):
    def command(name: str, num_gpus: int) -> list[str]:
        return command_of(NAMED[name], {**JOB, "num_gpus": num_gpus}, tmp_path / "job.json")[1:]

    assert command("ours_fp8", 1)[0] == "benchmarks/rivals.py"
    assert command("trl_te", 1)[:4] == [
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "configs/accelerate_fp8.yaml",
    ]
    assert "configs/accelerate_bf16_fsdp.yaml" in command("trl_bf16", 2) and "2" in command("trl_bf16", 2)
    for name in ("torchtitan_rowwise", "torchtitan02_rowwise"):
        assert "torch.distributed.run" in command(name, 1)


def test_torchtitan_02_gets_the_jobs_shape():
    words = words_02({**JOB, "options": {"compile": True, "recipe": "rowwise"}, "num_gpus": 2, "light": True})
    found = dict(zip(words[::2], words[1::2], strict=False))
    assert found["--training.global_batch_size"] == "16" and found["--training.dtype"] == "bfloat16"
    assert found["--quantize.linear.float8.recipe_name"] == "rowwise" and words[-1] == "--compile.enable"


def test_automodel_gets_the_jobs_shape():
    options = NAMED["automodel_rowwise"].options
    entries = config_of({**JOB, "options": options, "num_gpus": 2}, on_gpu=True)
    assert entries["step_scheduler"]["global_batch_size"] == 16 and entries["fp8"]["recipe_name"] == "rowwise"
    assert entries["model"]["backend"]["attn"] == "sdpa" and entries["distributed"]["enable_compile"]
    assert entries["packed_sequence"]["packing_strategy"] == "neat"
    te = config_of({**JOB, "options": NAMED["automodel_te"].options}, on_gpu=True)
    assert te["packed_sequence"]["packing_strategy"] == "thd" and te["model"]["backend"]["attn"] == "te"
    assert te["model"]["backend"]["te_fp8"] == {"recipe": "current"} and te["model"]["backend"]["linear"] == "te"


def test_a_failure_is_tried_again_with_fewer_rows_or_with_the_fallback():
    variant = NAMED["torchtitan_bf16"]
    job = {**JOB, "options": dict(variant.options)}
    smaller = next_try(variant, job, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate")
    assert smaller is not None and (smaller["batch_size"], smaller["micro_batches"]) == (2, 4)
    assert next_try(variant, {**job, "batch_size": 1}, "CUDA out of memory") is None
    plainer = next_try(variant, job, "RuntimeError: capture failed")
    assert plainer is not None and not plainer["options"]["cuda_graphs"] and plainer["options"]["compile"]
    assert next_try(variant, plainer, "RuntimeError: capture failed") is None
    assert next_try(NAMED["trl_te"], job, "RuntimeError: sizes") is None


@pytest.mark.parametrize(
    ("make", "dtype", "state", "total"),
    [
        (torch.optim.AdamW, torch.float32, {"exp_avg float32": 4, "exp_avg_sq float32": 4}, 16),
        (MasterAdamW, torch.bfloat16, {"exp_avg bfloat16": 2, "exp_avg_sq float32": 4, "remainder int16": 2}, 12),
    ],
)
def test_the_optimizers_storage_is_read_from_its_tensors(make, dtype, state, total):
    weight = torch.nn.Parameter(torch.randn(64, 64).to(dtype))
    optimizer = make([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    found = storage_of(optimizer)
    assert found["bytes_per_parameter"]["state"] == state and found["total_bytes_per_parameter"] == total
    assert found["num_parameters"] == 4096


def test_eight_bit_moments_count_with_their_scales():
    weight = torch.nn.Parameter(torch.randn(256, 256).bfloat16())
    optimizer = EightBitAdamW([weight], seed=1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    found = storage_of(optimizer)
    assert 6 < found["total_bytes_per_parameter"] < 6.2
    assert found["bytes_per_parameter"]["gradients"] == {"bfloat16": 2.0}


def test_kernels_are_counted_by_type():
    found = describe_kernels(
        {
            "nvjet_sm90_qqtst_128x256": (3, 0.3),
            "nvjet_sm90_tst_64x8": (1, 0.1),
            "triton_tem_fused_flex_attention_0": (2, 0.2),
        }
    )
    assert found["num_gemm_kernels"] == {"fp8": 3, "bf16": 1} and found["num_fp8_gemm_kernels"] == 3
    assert found["fp8_gemm_time_share"] == pytest.approx(0.75)
    assert found["attention_kernels"] == ["triton_tem_fused_flex_attention_0"]
    assert describe_kernels({})["fp8_gemm_time_share"] is None


def test_rows_of_the_text_and_full_ones(model, tmp_path):
    held = write_rows(tmp_path / "rows.jsonl", None, "text", model, 128, 5000)
    assert held["num_tokens"] >= 5000 and held["longest"] < 128
    tokenizer = AutoTokenizer.from_pretrained(model)
    known = read_jsonl(DATASET_DIR / "data" / "train-00000-of-00004.jsonl")
    lengths = num_chat_tokens(tokenizer, list(itertools.islice(full_rows(tokenizer, known, 128), 3)))
    assert all(128 - FULL_TOKENS < length < 128 for length in lengths)
    (tmp_path / "no_answers.jsonl").write_text('{"problem": "a", "generated_solution": ""}\n')
    with pytest.raises(UserError, match="no_answers.jsonl has rows without"):
        write_rows(tmp_path / "rows.jsonl", tmp_path / "no_answers.jsonl", "text", model, 128, 50)


@pytest.mark.slow
def test_ours_runs_and_a_trainer_that_is_missing_says_so(model, tmp_path, warm_python):
    """On the CPU, and again with --resume, which measures only what failed."""
    text, output = write_short_rows(tmp_path / "text.jsonl", 200), tmp_path / "rivals.json"
    command = [warm_python, "benchmarks/rivals.py", "--model", str(model), "--models", str(tmp_path / "models")]
    command += ["--text", text, "--output", str(output), "--variants", "ours_bf16,trl_bf16_liger", "--steps", "9"]
    command += ["--seq_length", "128", "--micro_batches", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ours, trl = json.loads(output.read_text())["entries"]
    assert ours["error"] is None and len(ours["losses"]) == 9 and ours["last_loss"] < ours["first_loss"]
    assert ours["tokens_per_s_per_gpu"] > 0 and ours["optimizer"]["total_bytes_per_parameter"] == 16
    assert ours["command"][1] == "train_fp8.py" and "16.0 bytes per parameter" in describe(ours)
    if trl["error"] is not None:
        assert "trl" in trl["error"]
    again = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "ours_bf16" not in again.stdout
    assert len(json.loads(output.read_text())["entries"]) == 2
    of_ours = parse([*command[2:], "--variants", "ours_bf16", "--resume"])
    earlier = kept(of_ours, settings_of(of_ours), json.loads(output.read_text())["provenance"]["gpus"])
    assert [entry["name"] for entry in earlier["entries"]] == ["ours_bf16", "trl_bf16_liger"]
    assert "trl" in earlier["versions"] and len(earlier["runs"]) == 2
    other = subprocess.run([*command, "--resume", "--light"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert other.returncode == 2 and "was measured with other settings" in other.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--output"),
        (["--output", "a.json", "--model", "Llama"], "--model Llama"),
        (["--output", "a.json", "--warmup", "7"], "--warmup 7"),
        (["--output", "a.json", "--seq_length", "100"], "--seq_length 100"),
        (["--output", "a.json", "--packages", "trl"], "--packages trl"),
        (["--output", "a.json", "--variants", "keras"], "--variants keras"),
        (["--output", "a.json", "--num_gpus", "99"], "--num_gpus 99"),
    ],
)
def test_mistakes_are_one_sentence(options, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=named):
        parse(options)
