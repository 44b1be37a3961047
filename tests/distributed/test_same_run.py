"""Processes of one launch train one run: with the same options, into one folder. gloo on the CPU."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import pytest

from llm_fp8.utils.json_files import read_json
from tests.support.processes import exit_code, run_ranks, start_ranks, start_training
from tests.support.small import steps

pytestmark = pytest.mark.slow

OPTIONS = (
    "--validation_fraction=0",
    "--max_seq_length=256",
    "--batch_size=2",
    "--max_steps=2",
    "--save_every=2",
    "--log_every=1",
    "--sharding_mode=fsdp_full",
    "--no_export",
)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ("--seed=7", "--seed 7, and rank 0 with --seed 42"),
        ("--learning_rate=1e-2", "--learning_rate 0.01, and rank 0 with --learning_rate 1e-05"),
        ("--max_steps=3", "--max_steps 3, and rank 0 with --max_steps 2"),
        ("--use_wandb", "--use_wandb True, and rank 0 with --use_wandb False"),
    ],
)
def test_a_process_with_other_options_is_refused(tmp_path, tiny_model, rows, other, named):
    folder, log = tmp_path / "run", tmp_path / "log"
    options = [f"--model_name={tiny_model}", f"--dataset_name={rows}", f"--output_dir={folder}", *OPTIONS]
    ranks = start_ranks(2, log, *options, of_last=[other])
    assert [exit_code(rank) for rank in ranks] == [2, 2], log.read_text()
    assert f"error: rank 1 was started with {named}" in log.read_text()
    assert "Traceback" not in log.read_text() and not folder.exists()


def test_hosts_may_cache_in_different_places_and_name_the_wandb_run_differently(
    tmp_path, tiny_model, rows, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder, log = tmp_path / "run", tmp_path / "log"
    options = [f"--model_name={tiny_model}", f"--dataset_name={rows}", f"--output_dir={folder}", *OPTIONS]
    named = ["--use_wandb", "--wandb_run_name=first"]
    other = ["--wandb_run_name=second"]
    ranks = start_ranks(2, log, *options, *named, of_last=other)
    assert [exit_code(rank) for rank in ranks] == [0, 0], log.read_text()
    assert read_json(folder / "run.json")["config"]["run"]["wandb_run_name"] == "first"


def start_later(folder: Path) -> None:
    """Work in `folder`, and let each rank begin in another second, after which default folders are named."""
    os.chdir(folder)
    time.sleep(1.2 * int(os.environ["RANK"]))


def test_processes_of_no_launcher_take_one_default_folder(tmp_path, tiny_model, rows):
    options = [f"--model_name={tiny_model}", f"--dataset_name={rows}", *OPTIONS]
    run_ranks(2, tmp_path / "run", *options, first=functools.partial(start_later, tmp_path))
    (folder,) = (tmp_path / "runs").iterdir()
    names = {path.name for path in folder.glob("checkpoints/step-00000002/*.distcp")}
    assert names == {"__0_0.distcp", "__1_0.distcp"}
    assert len(steps(folder)) == 2


@pytest.mark.parametrize("left_over", [{"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0"}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_a_launchers_variables_that_are_left_over_do_not_stop_a_single_process(
    tmp_path, tiny_model, rows, monkeypatch, left_over
):
    for name, value in left_over.items():
        monkeypatch.setenv(name, value)
    log = tmp_path / "log"
    single = [option for option in OPTIONS if not option.startswith("--sharding_mode")]
    options = [f"--model_name={tiny_model}", f"--dataset_name={rows}", f"--output_dir={tmp_path / 'run'}", *single]
    assert exit_code(start_training(log, *options)) == 0, log.read_text()


def work_elsewhere(folder: Path) -> None:
    """Work in a folder of this rank's own, as a host does whose disk is not shared."""
    own = folder / os.environ["RANK"]
    own.mkdir(exist_ok=True)
    os.chdir(own)


def test_a_checkpoint_that_a_host_wrote_elsewhere_is_no_checkpoint(tmp_path, tiny_model, rows):
    log = tmp_path / "log"
    options = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--output_dir=run", *OPTIONS]
    ranks = start_ranks(2, log, *options, first=functools.partial(work_elsewhere, tmp_path))
    assert [exit_code(rank) for rank in ranks] == [2, 2], log.read_text()
    assert "lacks __1_0.distcp, which another process wrote" in log.read_text()
    assert "Traceback" not in log.read_text()
    assert not list(tmp_path.glob("0/run/checkpoints/step-*"))
