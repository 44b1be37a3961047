"""What a user can get wrong ends with exit code 2 and one line that names it; nothing is written or deleted.

Each case runs what train_fp8.py runs, down to the exit, in this process; a few run the script itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from llm_fp8.train.callbacks import RunCallbacks
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoTokenizer

from llm_fp8.config.parser import parse_config
from llm_fp8.models.source import EMBEDDED_MODEL
from llm_fp8.train.loop import TrainingLoop
from llm_fp8.train.run_dir import with_output_dir
from llm_fp8.utils.errors import UserError, run_script
from llm_fp8.utils.ranks import LaunchRanks
from tests.support.scripts_as_main import run_as_main
from tests.support.small import records, steps, train, write_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def listing(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below `folder`, with contents."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def refuse(capfd, tmp_path) -> Callable[..., str]:
    """A function: train with these options, expect a refusal that leaves `tmp_path` as it was, and return its line."""

    def run(*options: object) -> str:
        before = listing(tmp_path)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run_script(lambda: train(*options))
        err = capfd.readouterr().err
        assert ended.value.code == 2, err
        assert len(err.splitlines()) == 1 and err.startswith("error: "), err
        assert listing(tmp_path) == before
        return err

    return run


@pytest.fixture
def common(tmp_path, tiny_model, rows) -> list[str]:
    """Options that work; a later option overrides an earlier one."""
    return [
        f"--model_name={tiny_model}",
        f"--dataset_name={rows}",
        "--max_seq_length=128",
        f"--output_dir={tmp_path / 'run'}",
    ]


# ---- models ----


def broken_model(folder: Path, how: str) -> str:
    """A model folder with one thing wrong."""
    write_model(folder, max_shard_size="40KB" if "shard" in how else "1GB")
    weights = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "config is not JSON":
        (folder / "config.json").write_text("{")
    elif how == "no weights":
        weights.unlink()
    elif how == "no shard":
        sorted(folder.glob("model-*.safetensors"))[1].unlink()
    elif how == "truncated shard":
        shard = sorted(folder.glob("model-*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-100])
    elif how == "truncated file":
        weights.write_bytes(weights.read_bytes()[:1000])
    elif how == "empty file":
        weights.write_bytes(b"")
    elif how == "index of shards is not JSON":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    elif how in ("shard outside", "pickled shard", "shards in a list"):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        first = min(index["weight_map"].values())
        if how == "shard outside":
            (folder / first).rename(folder.parent / first)
        other = {"shard outside": f"../{first}", "pickled shard": "pytorch_model.bin"}.get(how)
        names = {name: other if shard == first else shard for name, shard in index["weight_map"].items()}
        index["weight_map"] = list(names) if how == "shards in a list" else names
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "shard twice":
        first, *_, last = sorted(folder.glob("model-*.safetensors"))
        extra = {"model.norm.weight": torch.zeros(32)}
        for shard in (first, last):
            save_file({**load_file(shard), **extra}, shard, metadata={"format": "pt"})
    elif how == "code of its own":
        (folder / "config.json").write_text(
            json.dumps({**config, "auto_map": {"AutoConfig": "own.Own"}, "model_type": "own"})
        )
        (folder / "own.py").write_text(f"open({str(folder / 'executed')!r}, 'w')\n")
    elif how in ("missing tensor", "surplus tensor", "wrong shape"):
        tensors = load_file(weights)
        norm = tensors.pop("model.norm.weight")
        if how == "surplus tensor":
            tensors.update({"model.norm.weight": norm, "model.layers.7.mlp.up_proj.weight": torch.zeros(4)})
        elif how == "wrong shape":
            tensors["model.norm.weight"] = torch.zeros(33)
        save_file(tensors, weights, metadata={"format": "pt"})
    elif how == "quantised":
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
        (folder / "config.json").write_text(json.dumps(config))
    elif how == "unknown architecture":
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    elif how == "no tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    elif how == "tokenizer is not JSON":
        (folder / "tokenizer.json").write_text("{")
    elif how == "tokenizer too large":
        tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
        tokenizer.add_tokens(["<|one|>", "<|too many|>"])
        tokenizer.save_pretrained(folder)
    else:
        raise ValueError(how)
    return str(folder)


@pytest.mark.parametrize(
    ("how", "named"),
    {
        "no config": "config",
        "config is not JSON": "config",
        "no weights": "there is no model.safetensors",
        "no shard": "there is no model-00002",
        "truncated shard": "model-00002",
        "truncated file": "model.safetensors is truncated or corrupt",
        "empty file": "model.safetensors is truncated or corrupt",
        "index of shards is not JSON": "model.safetensors.index.json",
        "shard outside": "weight_map names '../model-00001",
        "pickled shard": "'pytorch_model.bin'",
        "shards in a list": "weight_map must be an object",
        "shard twice": "'model.norm.weight' twice",
        "code of its own": "contains custom code",
        "missing tensor": "lacks model.norm.weight",
        "surplus tensor": "holds 'model.layers.7.mlp.up_proj.weight', which",
        "wrong shape": "'model.norm.weight' has shape [33] in the checkpoint and [32] in the config",
        "quantised": "quantization_config",
        "unknown architecture": "nonesuch",
        "no tokenizer": "tokenizer",
        "tokenizer is not JSON": "tokenizer",
        "tokenizer too large": "1026 tokens",
    }.items(),
)
def test_a_broken_model_folder(tmp_path, refuse, common, how, named):
    folder = broken_model(tmp_path / "broken", how)
    message = refuse(*common, f"--model_name={folder}")
    assert named in message and folder in message
    assert not (Path(folder) / "executed").exists()


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "nobody/no-such-model", "no-such-model"])
def test_no_such_model(refuse, common, name):
    assert f"--model_name {name}" in refuse(*common, f"--model_name={name}")


def test_more_positions_than_the_model_has(refuse, common):
    message = refuse(*common, "--max_seq_length=512")
    assert "--max_seq_length 512" in message and "256" in message


# ---- data ----


@pytest.mark.parametrize("name", ["/no/such/rows.jsonl", "rows.jsonl", "nobody/no-such-dataset"])
def test_no_such_dataset(refuse, common, name):
    assert f"--dataset_name {name}" in refuse(*common, f"--dataset_name={name}")


def test_no_such_split_lists_those_there_are(refuse, common):
    message = refuse(*common, "--dataset_name=embedded", "--split_name=train_9M")
    assert "--split_name train_9M" in message and "train, validation" in message
    assert "--validation_split_name dev" in refuse(*common, "--dataset_name=embedded", "--validation_split_name=dev")


@pytest.mark.parametrize("streaming", [[], ["--streaming", "--max_steps=1"]], ids=["map", "stream"])
@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"text_of_a_kind": "a"}\n', "columns text_of_a_kind"),
        ('{"problem": "1 + 1?", "generated_solution": "2"}\n{"problem": "2 + \n', "line 2"),
        ('{"problem": "1 + 1?", "generated_solution": ""}\n', "no row of"),
        ("", "rows.jsonl"),
    ],
    ids=["columns", "broken line", "nothing to train on", "empty file"],
)
def test_a_dataset_that_cannot_be_used(tmp_path, refuse, common, content, named, streaming):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    message = refuse(*common, f"--dataset_name={path}", *streaming)
    assert named in message and ("--dataset_name" in message or str(path) in message)


def test_every_row_too_long(refuse, common):
    assert "no row of split train can be trained on" in refuse(*common, "--max_seq_length=16")


def test_evaluation_without_held_out_rows(refuse, common):
    assert "--eval_every 2" in refuse(*common, "--eval_every=2", "--validation_fraction=0")
    assert "--eval_batches 2" in refuse(*common, "--eval_batches=2", "--validation_fraction=0")


# ---- precision and hardware ----


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--mixed_precision=fp8"], ("--mixed_precision fp8", "bf16")),
        (["--mixed_precision=fp16"], ("--mixed_precision fp16", "bf16")),
        (["--use_te"], ("--use_te needs an NVIDIA GPU",)),
        (["--optimizer=adamw_master"], ("--optimizer adamw_master", "--mixed_precision bf16", "adamw_fp32")),
        (["--optimizer=adamw_8bit"], ("--optimizer adamw_8bit", "adamw_fp32")),
        (["--fp8_scenario=mxfp8"], ("--fp8_scenario", "--mixed_precision fp8")),
        (["--fp8_format=E4M3", "--mixed_precision=bf16"], ("--fp8_format", "--mixed_precision bf16")),
        (["--amax_history_len=4"], ("--amax_history_len",)),
        (["--amax_compute_algo=max"], ("--amax_compute_algo",)),
        (["--fp8_margin=1"], ("--fp8_margin",)),
        (["--fp8_strict"], ("--fp8_strict",)),
        (["--parity_check"], ("--parity_check", "--use_te")),
        (["--attn_implementation=flash_attention_2"], ("--attn_implementation flash_attention_2", "pip install")),
        (["--max_seq_length=100", "--batch_size=3", "--packing"], ("--max_seq_length", "multiple of 16")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_this_machine_or_these_options_cannot_do(refuse, common, options, named):
    message = refuse(*common, *options)
    assert all(name in message for name in named), message


@pytest.mark.parametrize(
    ("environment", "options", "named"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, ["--mixed_precision=no"], "--mixed_precision no contradicts"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "MSAMP"}, [], "backend MSAMP"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, [], "dynamo_config"),
    ],
)
def test_a_launcher_that_asks_for_something_else(monkeypatch, refuse, common, environment, options, named):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert named in refuse(*common, *options)


# ---- the output folder ----


def test_an_output_folder_that_holds_another_run(tmp_path, refuse, common):
    train(*common, "--max_steps=1", "--save_every=1")
    message = refuse(*common)
    assert f"--output_dir {tmp_path / 'run'}" in message and "--resume_from latest" in message


@pytest.mark.parametrize("below", ["", "/run", "/runs/run"])
def test_an_output_folder_that_is_a_file(tmp_path, refuse, common, below):
    (tmp_path / "file").write_text("precious")
    assert f"--output_dir {tmp_path / 'file'}{below}" in refuse(*common, f"--output_dir={tmp_path / 'file'}{below}")


def test_an_empty_output_folder_is_none(refuse, common):
    assert "--output_dir is empty" in refuse(*common, "--output_dir=")


def test_an_output_folder_whose_name_is_too_long(tmp_path, refuse, common):
    folder = tmp_path / ("x" * 256)
    assert f"--output_dir {folder}: File name too long" in refuse(*common, f"--output_dir={folder}")


def test_an_output_folder_that_is_not_utf_8(tmp_path, refuse, common):
    """The tokenizer's library cannot write to it, which would show at the export, after the last step."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/l\xe9")
    assert "its path is not UTF-8" in refuse(*common, f"--output_dir={folder}")


@pytest.fixture
def ordinary_user():
    """Root may write anywhere, so where this process is root it is somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    yield
    os.setresuid(0, 0, 0)


@pytest.fixture
def locked_folder():
    """A folder that its visitors can enter and not change."""
    with tempfile.TemporaryDirectory() as outer:
        os.chmod(outer, 0o755)
        locked = Path(outer) / "locked"
        locked.mkdir(mode=0o555)
        yield locked


@pytest.mark.parametrize("below", ["", "run", "runs/run"])
def test_an_output_folder_that_cannot_be_written(locked_folder, ordinary_user, below):
    folder = locked_folder / below
    with pytest.raises(UserError) as error:
        with_output_dir(parse_config([f"--output_dir={folder}"]), LaunchRanks())
    assert str(error.value).startswith(f"--output_dir {folder}: {locked_folder} is not writable")


def end_of(capfd, *options: object) -> tuple[int, list[str]]:
    """Exit code and lines on stderr of a run."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        run_script(lambda: train(*options))
    return ended.value.code, capfd.readouterr().err.splitlines()


def test_a_full_disk_leaves_the_last_checkpoint_usable(tmp_path, small_disk, capfd, common):
    """A checkpoint is about one megabyte; the limit of nine is never reached."""
    run = small_disk / "run"
    options = [*common, "--save_every=1", "--save_total_limit=9", "--max_steps=8", f"--output_dir={run}"]
    code, lines = end_of(capfd, *options)
    assert code == 2 and len(lines) == 1
    assert "Checkpoints saved before are intact" in lines[0] and str(run) in lines[0]
    saved = sorted((run / "checkpoints").glob("step-*"))
    assert 1 <= len(saved) < 8
    assert not any((run / "checkpoints").glob(".*"))
    elsewhere = tmp_path / "elsewhere"
    assert train(*options, f"--resume_from={saved[-1]}", f"--output_dir={elsewhere}") == 0
    assert steps(elsewhere)[0]["step"] == int(saved[-1].name.removeprefix("step-")) + 1


def test_a_file_system_without_room_for_another_file_says_so(small_disk, capfd, common):
    subprocess.run(["mount", "-o", "remount,nr_inodes=12", str(small_disk)], check=True)
    code, lines = end_of(
        capfd,
        *common,
        "--save_every=1",
        "--save_total_limit=9",
        "--max_steps=8",
        "--no_export",
        f"--output_dir={small_disk / 'run'}",
    )
    assert code == 2 and len(lines) == 1 and "no room for another file (df -i)" in lines[0]


def test_a_cache_that_cannot_be_written_is_named(small_disk, capfd, common, tmp_path):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    code, lines = end_of(capfd, *common, f"--data_cache_dir={small_disk / 'cache'}", f"--output_dir={tmp_path / 'run'}")
    assert code == 2 and len(lines) == 1
    assert f"error: {small_disk / 'cache'}" in lines[0] and "Read-only file system" in lines[0]
    assert "--data_cache_dir" in lines[0]


def test_a_disk_too_small_for_the_model_is_refused_before_training(small_disk, capfd, common):
    (small_disk / "ballast").write_bytes(bytes(4 * 2**20 - 2**16))
    code, lines = end_of(capfd, *common, f"--output_dir={small_disk / 'run'}")
    assert code == 2 and len(lines) == 1 and "--no_export" in lines[0] and "GiB" in lines[0]
    assert not (small_disk / "run").exists()


def test_a_disk_full_at_the_export_leaves_no_half_of_it(small_disk, capfd, common, monkeypatch):
    save = RunCallbacks.save

    def save_and_fill_disk(self, step):
        path = save(self, step)
        (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - 2**16))
        return path

    run = small_disk / "run"
    options = [*common, "--max_steps=2", "--save_every=2", f"--output_dir={run}"]
    with monkeypatch.context() as patch:
        patch.setattr(RunCallbacks, "save", save_and_fill_disk)
        code, lines = end_of(capfd, *options)
    assert code == 2 and len(lines) == 1 and str(run / "final") in lines[0] and "--resume_from latest" in lines[0]
    assert not any("final" in path.name for path in run.iterdir())
    (small_disk / "ballast").unlink()
    assert train(*options, "--resume_from=latest") == 0
    assert (run / "final" / "model.safetensors").exists()


# ---- trackers ----


def test_wandb_without_a_login_explains_itself(tmp_path, warm_python, common):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NETRC"))}
    environment.update(HOME=str(tmp_path), WANDB_BASE_URL="http://127.0.0.1:9")
    done = subprocess.run(
        [warm_python, str(ROOT / "train_fp8.py"), *common, "--use_wandb"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert (
        done.stderr.startswith("error: --use_wandb")
        and "wandb login" in done.stderr
        and "WANDB_MODE=offline" in done.stderr
    )
    assert not (tmp_path / "run").exists()


# ---- numbers that are not finite ----


def test_a_weight_that_is_not_a_number(tmp_path, capfd, common):
    folder = Path(write_model(tmp_path / "nan"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    code, lines = end_of(capfd, *common, f"--model_name={folder}", "--save_every=1", "--batch_size=3")
    assert code == 2 and len(lines) == 1
    assert "step 1: the loss is nan" in lines[0] and "dataset rows: " in lines[0]
    named = lines[0].partition("dataset rows: ")[2].partition(".")[0].split(", ")
    assert len(named) == 3 and all(0 <= int(row) < 64 for row in named)
    assert not list(tmp_path.glob("run/checkpoints/step-*")) and not (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize("save_every", [1, 100])
@pytest.mark.parametrize("learning_rate", ["1e20", "1e38"])
def test_a_learning_rate_that_blows_up(tmp_path, capfd, common, learning_rate, save_every):
    """What is saved is finite, and the run ends at the step where it no longer was."""
    options = [
        *common,
        f"--learning_rate={learning_rate}",
        f"--save_every={save_every}",
        "--lr_scheduler=constant",
        "--max_steps=6",
    ]
    code, lines = end_of(capfd, *options)
    assert code == 2 and len(lines) == 1
    assert "step " in lines[0] and "--learning_rate" in lines[0] and "checkpoint" in lines[0]
    assert not (tmp_path / "run" / "final").exists()
    assert all(torch.tensor(record["loss"]).isfinite() for record in records(tmp_path / "run"))
    if (refused := re.search(r"step (\d+): the loss is", lines[0])) is not None:
        assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, int(refused[1])))
    for checkpoint in tmp_path.glob("run/checkpoints/step-*"):
        dcp_to_torch_save(checkpoint, tmp_path / "merged.pt")
        for name, tensor in torch.load(tmp_path / "merged.pt").items():
            assert not name.startswith("model.") or tensor.isfinite().all(), name


def test_weights_broken_by_the_last_update_are_not_exported(tmp_path, capfd, common):
    code, lines = end_of(capfd, *common, "--learning_rate=3.4e38", "--weight_decay=1e30", "--max_steps=1")
    assert code == 2 and len(lines) == 1
    assert "step 1" in lines[0] and "not finite" in lines[0]
    assert not (tmp_path / "run" / "final").exists()


# ---- the script itself ----


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--batch_sise", "3"], "--batch_sise"),
        (["--config", "/no/such.yaml"], "/no/such.yaml"),
        (["--model_name", "/no/such/model"], "/no/such/model"),
    ],
    ids=["option", "config", "model"],
)
def test_the_script_says_it_in_one_line(tmp_path, warm_python, options, named):
    done = subprocess.run(
        [warm_python, str(ROOT / "train_fp8.py"), *options], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and named in done.stderr and len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "named"),
    [({"WORLD_SIZE": "2", "RANK": "0"}, "--num_processes 1"), ({"ACCELERATE_USE_FSDP": "true"}, "take it out")],
)
def test_the_script_is_for_one_process(tmp_path, environment, named):
    done = subprocess.run(
        [sys.executable, str(ROOT / "train_fp8.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and named in done.stderr and len(done.stderr.splitlines()) == 1


def test_out_of_memory_in_a_step_is_a_sentence(tmp_path, common, monkeypatch):
    """As a GPU raises it; its memory is made up."""

    def fail(self, batches, start):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(TrainingLoop, "take_step", fail)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 * 2**30))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 15 * 2**30)
    with pytest.raises(UserError) as error:
        train(*common)
    sentence = str(error.value)
    assert sentence.startswith(
        "the GPU is out of memory: weights, gradients and optimizer state of 0.00 billion parameters"
    )
    assert (
        "15.0 of 16.0 GiB were in use at the peak" in sentence
        and "train_multi_gpu.py --sharding_mode fsdp_full" in sentence
    )


WITHOUT_OPTIONS = {
    "container_requirements", "made_up_math", "colours", "moment_dtypes", "grad_accumulation", "prediction_records",
    "recorded_variants", "speed_table_rows", "other_trainers", "rival_automodel", "rival_torchtitan",
    "rival_trainings", "rival_unsloth",
}  # fmt: skip
"""Part of the image's build, modules, two computations that stand by themselves, and what benchmarks/rivals.py starts
with a file.
"""
PROGRAMS = [
    "train_fp8.py",
    "train_multi_gpu.py",
    *sorted(
        f"{folder}/{path.name}"
        for folder in ("scripts", "benchmarks")
        for path in (ROOT / folder).glob("*.py")
        if path.stem not in WITHOUT_OPTIONS
    ),
]
"""What is started with python."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_unknown_option_is_one_sentence_in_every_program(program):
    done = run_as_main(program, "--no_such_option")
    assert done.returncode == 2 and not done.stdout, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
