"""The scripts that train a pair in bf16 and fp8: they differ in precision alone, options behind them win, and one
really trains.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llm_fp8.config.options import Config
from llm_fp8.config.parser import parse_config
from llm_fp8.tools.compare import cli
from llm_fp8.tools.compare.launch import plan_runs
from llm_fp8.utils.errors import UserError
from tests.support.made_up_runs import made_up_run, write_run_folder
from tests.support.small import run_json, steps

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
MULTI_GPU = ("train_bf16_multi_gpu", "train_fp8_multi_gpu")
PAIRS = [("train_bf16", "train_fp8"), MULTI_GPU, ("llama_8b_full_finetune_bf16", "llama_8b_full_finetune_fp8")]


@pytest.fixture
def stand_in(tmp_path) -> str:
    """A program in place of Python that prints the words it is given, one a line."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    return str(program)


def words_of(script: str, python: str, *options: str) -> list[str]:
    """What a script starts its Python with."""
    done = subprocess.run(
        [SCRIPTS / f"{script}.sh", *options],
        env={**os.environ, "PYTHON": python, "NPROC_PER_NODE": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout.splitlines()


def config_of(script: str, python: str, *options: str) -> Config:
    """What a script trains, as the training script itself reads it."""
    words = words_of(script, python, *options)
    training = "train_multi_gpu.py" if script in MULTI_GPU else "train_fp8.py"
    place = words.index(str(ROOT / training))
    if script in MULTI_GPU:
        assert words[:2] == ["-m", "torch.distributed.run"] and "--nproc_per_node=2" in words[:place]
    else:
        assert place == 0
    return parse_config(words[place + 1 :], parallel=script in MULTI_GPU)


@pytest.mark.parametrize("script", ["train_bf16", "train_fp8_multi_gpu"])
def test_an_exported_cdpath_does_not_move_the_repository(script, stand_in):
    done = subprocess.run(
        [f"scripts/{script}.sh"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": stand_in, "NPROC_PER_NODE": "2", "CDPATH": ".:/"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()  # a printed folder would be a line of its own
    assert str(ROOT / ("train_multi_gpu.py" if script in MULTI_GPU else "train_fp8.py")) in words
    assert str(ROOT) not in words


@pytest.mark.parametrize(("bf16", "fp8"), PAIRS, ids=lambda name: name)
def test_a_pair_differs_in_precision_alone(bf16, fp8, stand_in):
    baseline, other = config_of(bf16, stand_in), config_of(fp8, stand_in)
    assert (baseline.precision.mixed_precision, other.precision.mixed_precision) == ("bf16", "fp8")
    for name, config in ((bf16, baseline), (fp8, other)):
        assert config.run.output_dir == str(ROOT / "runs" / name)
        assert config.model.use_te, "the baseline trains the same modules"
    run = dataclasses.replace(other.run, output_dir=baseline.run.output_dir)
    assert dataclasses.replace(other, precision=baseline.precision, run=run) == baseline


@pytest.mark.parametrize("script", [name for pair in PAIRS for name in pair])
def test_options_behind_a_script_win_and_keep_their_blanks(script, stand_in):
    config = config_of(script, stand_in, "--model_name", "a folder/model", "--max_steps=7", "--use_te", "false")
    assert (config.model.model_name, config.optim.max_steps, config.model.use_te) == ("a folder/model", 7, False)


def test_the_twins_train_the_pair_of_one_gpu(stand_in):
    """So that what several GPUs bring can be told: everything but the sharding is the same."""
    one, several = config_of("train_fp8", stand_in), config_of("train_fp8_multi_gpu", stand_in)
    assert several.parallel.sharding_mode == "ddp"
    run = dataclasses.replace(several.run, output_dir=one.run.output_dir)
    assert dataclasses.replace(several, parallel=one.parallel, run=run) == one


def test_the_8b_pair_is_the_documented_one(stand_in):
    config = config_of("llama_8b_full_finetune_fp8", stand_in)
    assert config.model.model_name == "meta-llama/Llama-3.1-8B-Instruct"
    assert (config.optim.max_steps, config.data.batch_size, config.optim.gradient_accumulation_steps) == (100, 2, 8)


def test_a_dry_run_of_a_twin_prints_the_command(stand_in):
    (line,) = words_of("train_bf16_multi_gpu", sys.executable, "--dry_run", "--max_steps=7")
    words = shlex.split(line)
    assert words[0] == sys.executable and words[-1] == "--max_steps=7" and "--dry_run" not in words


def test_an_interpreter_that_is_not_there_is_one_sentence():
    done = subprocess.run(
        [SCRIPTS / "train_fp8.sh"], env={**os.environ, "PYTHON": "/no/python"}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "error: PYTHON=/no/python: no such program; set PYTHON to the interpreter that has torch.\n"


# ---- the comparison ----


@pytest.mark.parametrize(
    ("options", "num_runs", "optimizer"),
    [
        ([], 2, "auto"),
        (["--seeds", "3"], 6, "auto"),
        (["--seeds", "3", "--", "--optimizer", "adamw_8bit"], 6, "adamw_8bit"),
    ],
)
def test_one_command_compares_the_8b_pair(options, num_runs, optimizer, stand_in, tmp_path):
    words = words_of("compare_llama_8b", stand_in, *options)
    assert words[0] == str(SCRIPTS / "compare_performance.py")
    parsed = cli.parse(words[1:])
    assert (parsed.arms, parsed.output) == ("bf16,fp8", ROOT / "runs" / "compare_llama_8b")
    plan = plan_runs(parsed.train, parsed.arms.split(","), range(1, parsed.seeds + 1), 1, tmp_path)
    assert len(plan.runs) == num_runs
    for run in plan.runs:
        config = parse_config([*run.words, "--output_dir", "x"])
        script = config_of(f"llama_8b_full_finetune_{config.precision.mixed_precision}", stand_in)
        changed = dataclasses.replace(script.optim, seed=run.seed, optimizer=optimizer)
        assert (config.model, config.data, config.optim) == (script.model, script.data, changed)


def test_without_options_the_pairs_own_runs_are_compared(tmp_path, monkeypatch):
    assert [folder.relative_to(ROOT).as_posix() for folder in cli.PAIR] == ["runs/train_bf16", "runs/train_fp8"]
    monkeypatch.setattr(cli, "PAIR", (tmp_path / "train_bf16", tmp_path / "train_fp8"))
    write_run_folder(cli.PAIR[0], made_up_run("bf16"))
    options = cli.parse([])
    with pytest.raises(UserError, match=r"or run scripts/train_fp8.sh first"):
        cli.check(options)
    write_run_folder(cli.PAIR[1], made_up_run("delayed", rate=130_000.0))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare_performance.py"])
    assert cli.main() == 0
    comparison = json.loads((tmp_path / "compare_train" / "comparison.json").read_text())
    assert [arm["arm"] for arm in comparison["arms"]] == ["bf16", "delayed"]


# ---- a real run ----


def test_the_baseline_really_trains(tmp_path, warm_python):
    """The script itself, on the CPU, with the hub's model and dataset replaced by the embedded ones."""
    small = [
        "--model_name=embedded",
        "--dataset_name=embedded",
        "--split_name=train",
        "--use_te=false",
        "--num_of_samples=200",
    ]
    small += [
        "--max_seq_length=128",
        "--max_steps=3",
        "--eval_batches=1",
        "--preprocessing_workers=1",
        "--learning_rate=3e-3",
    ]
    done = subprocess.run(
        [SCRIPTS / "train_bf16.sh", *small, "--output_dir", tmp_path / "run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": warm_python, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert run_json(tmp_path / "run")["precision"]["effective"] == "bf16"
    assert len(steps(tmp_path / "run")) == 3 and (tmp_path / "run" / "final" / "model.safetensors").exists()
