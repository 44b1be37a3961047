"""--batch_size auto and --mixed_precision auto in a run, and the refusal of one that cannot fit."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from llm_fp8.config.options import Config
from llm_fp8.config.parser import parse_config
from llm_fp8.tools.predict.after_run import PREDICTOR
from llm_fp8.train import setup
from llm_fp8.train.prediction import Machine, RunDescription
from llm_fp8.train.run import run_training
from llm_fp8.utils.errors import UserError


@pytest.fixture
def gpu_of(monkeypatch):
    """Lets a run without a GPU ask what it would of one with so much memory."""

    def pretend(memory_gib: float) -> None:
        monkeypatch.setattr(setup, "smallest_gpu_gib", lambda device: memory_gib)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")

    return pretend


def test_a_run_that_cannot_fit_ends_before_anything_is_prepared(gpu_of, small_run, tmp_path, capsys):
    options = [*small_run, "--max_steps=1", f"--output_dir={tmp_path / 'run'}"]
    gpu_of(2.0)
    with pytest.raises(UserError, match="^this run cannot fit: weights, gradients and optimizer state of 0.00 billion"):
        run_training(parse_config(options), predictor=PREDICTOR)
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()
    gpu_of(2.1)
    assert run_training(parse_config(options), predictor=PREDICTOR) == 0


def test_what_auto_came_to_is_printed_and_recorded(gpu_of, small_run, tmp_path, capsys):
    """The predictor's answer replaces the options; run.json has what was asked for beside what runs."""

    def settle(run: RunDescription, machine: Machine) -> tuple[Config, list[str]]:
        assert run.recipe == "delayed" and machine == Machine(2.5, has_fp8=True)
        precision = dataclasses.replace(run.config.precision, mixed_precision="bf16")
        data = dataclasses.replace(run.config.data, batch_size=4)
        return dataclasses.replace(run.config, precision=precision, data=data), ["what auto came to"]

    gpu_of(2.5)
    folder = tmp_path / "run"
    options = [*small_run, f"--output_dir={folder}", "--batch_size=auto", "--mixed_precision=auto", "--max_steps=1"]
    config = parse_config(options)
    assert run_training(config, predictor=dataclasses.replace(PREDICTOR, settle=settle)) == 0
    said = capsys.readouterr().out
    assert "what auto came to\n" in said and "precision: bf16 (asked for: auto)\n" in said
    record = json.loads((folder / "run.json").read_text())
    assert record["config"]["data"]["batch_size"] == 4 and record["effective"]["global_batch_size"] == 4
    assert (record["precision"]["requested"], record["precision"]["effective"]) == ("auto", "bf16")


@pytest.mark.parametrize("flag", ("--batch_size", "--mixed_precision"))
def test_without_a_gpu_auto_is_refused(flag, small_run, tmp_path):
    config = parse_config([*small_run, f"--output_dir={tmp_path / 'run'}", f"{flag}=auto"])
    with pytest.raises(UserError, match=f"^{flag} auto is settled by a training script on a GPU; give a value"):
        run_training(config, predictor=PREDICTOR)
