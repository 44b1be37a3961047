"""Common user errors: each ends with exit code 2 and one line that names the option or file, and changes no file.

The tests run the code of train_fp8.py in this process, including the exit.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from llm_fp8.__main__ import PROGRAMS
from llm_fp8.models.source import EMBEDDED_MODEL
from llm_fp8.run import run_dir
from llm_fp8.run.timeline import Timeline
from llm_fp8.tools.script import run_script
from tests.support.small import records, steps, train, write_model


def listing(folder: Path) -> dict[str, bytes | None]:
    """Return {path: contents} of every file below `folder`, and {path: None} of every folder."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def valid_options(tmp_path, tiny_model, rows) -> list[str]:
    """Return valid options. A test appends an option with another value, which overrides the first value."""
    options = f"--model_name={tiny_model} --dataset_name={rows} --max_seq_length=128 --output_dir={tmp_path / 'run'}"
    return options.split()


@pytest.fixture
def refusal(capfd, valid_options, tmp_path) -> Callable[..., str]:
    """Return a function that takes further options, trains, checks that the run fails and returns the error line."""

    def run(*options: object, unchanged: bool = True) -> str:
        before = listing(tmp_path)
        capfd.readouterr()
        with pytest.raises(SystemExit) as system_exit:
            run_script(lambda: train(*valid_options, *options))
        err = capfd.readouterr().err
        assert system_exit.value.code == 2 and len(err.splitlines()) == 1 and err.startswith("error: "), err
        assert not unchanged or listing(tmp_path) == before
        return err

    return run


OPTIONS = [
    # options -> text in the error; test_parser.py and test_validation.py have further errors
    ("--batch_sise 3", "--batch_size"),
    ("--bf16", "--mixed_precision bf16"),
    ("--validation_fraction=1", "--validation_fraction"),
    ("--mixed_precision=fp4", "--mixed_precision"),
    ("--config=/no/such.yaml", "/no/such.yaml"),
    # errors that need the model, the data or the machine
    ("--model_name=/no/such/folder", "--model_name /no/such/folder"),
    ("--model_name=nobody/no-such-model", "--model_name nobody/no-such-model"),
    ("--max_seq_length=512", "--max_seq_length 512"),
    ("--dataset_name=/no/such/rows.jsonl", "--dataset_name /no/such/rows.jsonl"),
    ("--dataset_name=nobody/no-such-dataset", "--dataset_name nobody/no-such-dataset"),
    ("--dataset_name=nobody/no-such-dataset:main", "--dataset_name nobody/no-such-dataset"),
    ("--dataset_name=data/*.jsonl", "--dataset_name"),
    ("--dataset_name=embedded --split_name=train_9M", "--split_name train_9M"),
    ("--dataset_name=embedded --validation_split_name=dev", "--validation_split_name dev"),
    ("--eval_dataset_name=/no/such.jsonl", "--eval_dataset_name /no/such.jsonl"),
    ("--dataset_weights=0.5,0.5", "--dataset_weights"),
    ("--columns=problem=question", "--columns"),
    ("--max_seq_length=16", "train"),
    ("--eval_every=2 --validation_fraction=0", "--eval_every"),
    ("--eval_batches=2 --validation_fraction=0", "--eval_batches"),
    ("--resume_from=/no/such/checkpoint", "/no/such/checkpoint"),
    ("--attn_implementation=flash_attention_2", "--attn_implementation flash_attention_2"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[options for options, _ in OPTIONS])
def test_wrong_option_is_refused(refusal, options, message):
    assert message in refusal(*options.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "option",
    ["--mixed_precision=fp8", "--mixed_precision=fp16", "--optimizer=adamw_8bit", "--certify", "--batch_size=auto"],
)
def test_option_that_needs_a_gpu_is_refused(refusal, option):
    assert option.partition("=")[0] in refusal(option)


FILES = [
    # option, file name, content, text in the error besides the file name
    ("--config", "run.yaml", "batchsize: 4\n", "batchsize"),
    ("--config", "run.yaml", "- 1\n- 2\n", "run.yaml"),
    ("--config", "run.yaml", "a: [1\n", "run.yaml"),
    ("--config", "run.yaml", "batch_size: eight\n", "batch_size"),
    ("--config", "run.yaml", "batch_size: [1, 2]\n", "batch_size"),
    ("--config", "run.yaml", "no_export: true\n", "no_export"),
    # datasets; test_load.py and test_prepare.py have further errors
    ("--dataset_name", "rows.jsonl", "", "rows.jsonl"),
    ("--dataset_name", "rows.jsonl", '{"text_of_a_kind": "a"}\n', "text_of_a_kind"),
    ("--dataset_name", "rows.jsonl", '{"problem": "1 + 1?", "generated_solution": ""}\n', "rows.jsonl"),
    ("--dataset_name", "rows.csv", "a,b\n1,2\n", "rows.csv"),
    ("--output_dir", "file", "precious", "file"),
]


@pytest.mark.parametrize(
    "flag, name, content, message", FILES, ids=[f"{name}: {text!r:.40}" for _, name, text, _ in FILES]
)
def test_invalid_file_is_refused(tmp_path, refusal, flag, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    line = refusal(flag, path)
    assert message in line and (flag in line or str(path) in line)


def edit_json(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def edit_weights(path: Path, **added: torch.Tensor) -> None:
    tensors = load_file(path)
    save_file({**tensors, **{name.replace("__", "."): each for name, each in added.items()}}, path, {"format": "pt"})


def store_as(folder: Path, dtype: torch.dtype) -> None:
    edit_weights(folder / "model.safetensors", model__layers__0__mlp__up_proj__weight=torch.ones(48, 32).to(dtype))


def write_index(folder: Path, text: str | None = None, **names: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text or json.dumps({"metadata": {}, "weight_map": names}))


def write_larger_tokenizer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    tokenizer.add_tokens(["<|one|>", "<|too many|>"])
    tokenizer.save_pretrained(folder)


BROKEN_MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "config"),
    "unknown architecture": (lambda f: edit_json(f / "config.json", model_type="nonesuch"), "nonesuch"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "cut weights": (lambda f: os.truncate(f / "model.safetensors", 1000), "model.safetensors"),
    "int8": (lambda f: store_as(f, torch.int8), "torch.int8"),
    "float8": (lambda f: store_as(f, torch.float8_e4m3fn), "F8_E4M3"),
    "index without weights": (lambda f: write_index(f), "the checkpoint lacks"),
    "index that names missing files": (lambda f: write_index(f, x="model-7.safetensors"), "model-7.safetensors"),
    "index without its map": (lambda f: write_index(f, "{}"), "weight_map"),
    "no tokenizer": (lambda f: [path.unlink() for path in f.glob("tokenizer*")], "tokenizer"),
    "damaged tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer"),
    "tokenizer of another model": (write_larger_tokenizer, "1026"),
}


@pytest.mark.parametrize("kind", BROKEN_MODELS)
def test_broken_model_folder_is_refused(tmp_path, refusal, kind):
    folder = Path(write_model(tmp_path / "broken"))
    damage, message = BROKEN_MODELS[kind]
    damage(folder)
    line = refusal(f"--model_name={folder}")
    assert message in line and str(folder) in line


def test_int8_expert_weights_are_refused(tmp_path, refusal):
    folder = Path(write_model(tmp_path / "moe", model_type="mixtral", num_local_experts=2))
    expert = {"model__layers__0__block_sparse_moe__experts__0__w1__weight": torch.ones(48, 32, dtype=torch.int8)}
    edit_weights(folder / "model.safetensors", **expert)
    assert "torch.int8" in refusal(f"--model_name={folder}")


def test_gated_repository_is_refused_with_login_command(refusal, monkeypatch):
    def gated(*_: object, **__: object) -> None:
        raise OSError("You are trying to access a gated repo.\nMake sure to have access to it")

    refused = HfHubHTTPError("403 Forbidden", response=mock.MagicMock())
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", mock.Mock(side_effect=refused))
    monkeypatch.setattr(AutoConfig, "from_pretrained", gated)
    line = refusal("--model_name=meta-llama/Llama-3.2-1B")
    assert "--model_name meta-llama/Llama-3.2-1B" in line and "gated" in line and "hf auth login" in line


def test_output_folder_of_another_or_finished_run_is_refused(tmp_path, valid_options, refusal):
    train(*valid_options, "--max_steps=2", "--save_every=1")
    assert "--resume_from latest" in refusal()
    assert "--max_steps" in refusal("--max_steps=2", "--resume_from=latest")
    first = f"--resume_from={tmp_path / 'run' / 'checkpoints' / 'step-00000001'}"
    assert "learning_rate" in refusal("--max_steps=2", first, "--learning_rate=3e-3")
    next((tmp_path / "run" / "checkpoints" / "step-00000001").glob("*.distcp")).write_bytes(b"")
    assert "step-00000001" in refusal("--max_steps=2", first)


def test_finished_run_without_checkpoints_is_not_overwritten(valid_options, refusal):
    """A run in the same --output_dir is refused, resumed or new, unless it is a dry run, which writes nothing."""
    train(*valid_options, "--max_steps=2")
    for options, message in (([], "choose another"), (["--resume_from=latest"], "--save_every")):
        assert message in refusal("--max_steps=2", *options)
        assert train(*valid_options, "--max_steps=2", *options, "--dry_run") == 0


@pytest.mark.parametrize("folder", ["link", "link/run", "x" * 300, "file/run"])
def test_output_folder_that_cannot_be_created_is_refused(tmp_path, refusal, folder):
    (tmp_path / "link").symlink_to("/no/such/place")
    (tmp_path / "file").write_text("")
    assert "--output_dir" in refusal("--max_steps=1", f"--output_dir={tmp_path / folder}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_output_folder_without_write_permission_is_refused(tmp_path, refusal):
    (tmp_path / "locked").mkdir(mode=0o555)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    os.setresuid(65534, 65534, 0)
    try:
        assert "locked" in refusal(f"--output_dir={tmp_path / 'locked' / 'run'}")
    finally:
        os.setresuid(0, 0, 0)


def test_full_disk_is_reported(tmp_path, valid_options, refusal, monkeypatch):
    replace = os.replace

    def fail_for_run_json(source: object, target: object) -> None:
        if Path(str(target)).name == "run.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_for_run_json)
    line = refusal(unchanged=False)
    assert str(tmp_path / "run") in line and "No space left" in line


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("gemm.cu:12 in function cublas_gemm: cuBLAS Error: the resource allocation failed"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=lambda error: f"{type(error).__name__} {error}"[:50],
)
def test_out_of_memory_suggests_smaller_batch_size(refusal, monkeypatch, error):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Timeline, "take_step", fail)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 15 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Gpu", (), {"total_memory": 2**34}))
    line = refusal("--batch_size=4", unchanged=False)
    assert "out of memory" in line and "--batch_size" in line


def test_nonfinite_loss_ends_the_run_and_is_not_saved(tmp_path, valid_options, refusal):
    folder = Path(write_model(tmp_path / "nan"))
    edit_weights(folder / "model.safetensors", model__norm__weight=torch.full((32,), float("nan")))
    line = refusal(f"--model_name={folder}", f"--output_dir={tmp_path / 'one'}", "--batch_size=3", unchanged=False)
    assert "step 1" in line and "rows" in line and not list(tmp_path.glob("one/checkpoints/step-*"))
    options = ("--learning_rate=1e20", "--lr_scheduler=constant", "--max_steps=6", "--save_every=1")
    assert "--learning_rate" in refusal(*options, unchanged=False)
    assert all(torch.tensor(record["loss"]).isfinite() for record in steps(tmp_path / "run"))
    assert len(records(tmp_path / "run")) < 6 and not (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize("command", PROGRAMS)
def test_every_program_refuses_unknown_option(command, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", [f"llm-fp8 {command}", "--no_such_option"])
    with pytest.raises(SystemExit) as system_exit:
        run_script(importlib.import_module(PROGRAMS[command][0]).main)
    (line,) = capfd.readouterr().err.splitlines()
    assert system_exit.value.code == 2 and line.startswith("error: ")


def test_ranks_with_different_options_are_refused(refusal, monkeypatch):
    """Rank 1 was started with another learning rate than rank 0."""
    monkeypatch.setattr(run_dir, "gathered", lambda options: [options, {**options, "learning_rate": 3.0}])
    assert "--learning_rate" in refusal("--max_steps=2")
