"""--dry_run: the counts and the prediction of a run that does not take place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llm_fp8.config.parser import parse_config
from llm_fp8.train import run
from llm_fp8.train.prediction import Predictor, RunDescription
from llm_fp8.train.run import run_training
from llm_fp8.train.run_record import describe_dry_run
from llm_fp8.train.setup import RunPlan, plan_run
from llm_fp8.utils.ranks import LaunchRanks


def _refuse(*arguments: object) -> None:
    raise AssertionError("a dry run came here")


@pytest.fixture
def dry(small_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for step in ("build_setup", "run_lock", "prepare_hub_repo"):
        monkeypatch.setattr(run, step, _refuse)
    return [*small_run, "--dry_run", f"--output_dir={tmp_path / 'run'}"]


def test_it_counts_and_writes_nothing(dry, tmp_path, capsys):
    config = parse_config([*dry, "--num_epochs=3", "--push_to_hub"])
    assert run_training(config) == 0
    said = capsys.readouterr().out
    assert "64 rows read, 49 used, 6 held out, 9 dropped as longer than 128 tokens" in said
    assert " sequences of 128: " in said and "% filled" in said
    assert said.splitlines()[-2:] == [
        "dry run: 21 steps of 8 sequences; no weight was loaded and no run written",
        "no prediction without a GPU: 'llm-fp8 predict' predicts for one by its name",
    ]
    assert not (tmp_path / "run").exists()


def test_the_beginning_of_a_stream_is_counted(dry, capsys):
    assert run_training(parse_config([*dry, "--streaming", "--max_steps=5"])) == 0
    said = capsys.readouterr().out
    assert "the beginning of the stream: 64 rows read, " in said and "dry run: 5 steps of 8 sequences;" in said


def test_on_a_gpu_the_first_step_is_predicted(dry, monkeypatch):
    """The predictor gets the positions and lengths of the packed micro-batches; where it knows none, that is said."""
    config = parse_config([*dry, "--packing", "--gradient_accumulation_steps=2"])
    plan, data = _planned(config, monkeypatch)
    batches = run.first_step(data.train)
    asked = []

    def predict(described: RunDescription, *figures: float) -> str:
        asked.append((described.gpu_name, *figures))
        return "predicted: so"

    assert describe_dry_run(plan, data, 9, batches, _only(predict)).splitlines()[-1] == "predicted: so"
    lengths = torch.cat([batch.cu_seqlens.diff() for batch in batches]).double()
    mean_length = (lengths.square().sum() / lengths.sum()).item()
    assert asked == [("a GPU", 8 * 128, pytest.approx(mean_length), 9)]
    last = describe_dry_run(plan, data, 9, batches, _only(lambda *figures: None)).splitlines()[-1]
    assert last == "no prediction: nothing that was measured is like this run (docs/tools.md)"


def _only(describe_steps):
    """A predictor that answers nothing else."""
    return Predictor(_refuse, describe_steps, _refuse)


def _planned(config, monkeypatch):
    plan = plan_run(config, LaunchRanks())
    tokenizer = run._checked_tokenizer(plan)
    data = run._prepare_data(plan, tokenizer, run.ContextGroup.of_rank(1, 0))
    monkeypatch.setattr(RunPlan, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    return plan, data
