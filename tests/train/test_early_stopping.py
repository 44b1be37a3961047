"""--early_stopping_patience: the run ends as after its last step when evaluations stop improving."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llm_fp8.config.parser import parse_config
from llm_fp8.train.callbacks import RunCallbacks
from llm_fp8.train.eval_history import EvalHistory
from llm_fp8.utils.errors import UserError
from tests.support.processes import exit_code, start_ranks
from tests.support.small import final_weights, records, steps, train

LOSSES = {1: 5.0, 2: 4.0, 3: 3.9, 4: 3.85, 5: 4.5, 6: 3.84, 7: 3.9, 8: 3.0}
"""Step -> the eval loss that the run is told. With a threshold of 0.12, steps 1, 2 and 4 are improvements."""


@pytest.fixture
def options(tiny_model, rows) -> list[str]:
    return [
        f"--model_name={tiny_model}",
        f"--dataset_name={rows}",
        "--max_seq_length=128",
        "--batch_size=8",
        "--max_steps=8",
        "--eval_every=1",
        "--save_every=4",
        "--early_stopping_patience=2",
    ]


@pytest.fixture
def eval_losses(monkeypatch) -> None:
    evaluate = RunCallbacks.evaluate

    def told(self, step: int) -> float:
        evaluate(self, step)
        return LOSSES[step]

    monkeypatch.setattr(RunCallbacks, "evaluate", told)


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def evaluated(folder: Path) -> list[int]:
    return [record["step"] for record in records(folder) if "eval_loss" in record]


@pytest.mark.parametrize(
    ("patience", "threshold", "stops_after"), [(1, 0.0, 5), (2, 0.0, None), (1, 0.12, 3), (2, 0.12, 6), (0, 0.0, None)]
)
def test_the_count_of_evaluations_without_improvement(patience, threshold, stops_after):
    history = EvalHistory(patience=patience, threshold=threshold)
    stopped = None
    for step, loss in LOSSES.items():
        history.add(step, loss)
        if history.stops_early:
            stopped = step
            break
    assert stopped == stops_after


def test_a_loss_that_is_not_finite_is_no_improvement():
    history = EvalHistory(patience=3)
    for step in (1, 2, 3):
        assert not history.stops_early
        history.add(step, float("nan"))
    assert history.stops_early and "did not improve on no finite eval loss" in history.describe_stop()


def test_the_run_ends_as_after_its_last_step(tmp_path, options, eval_losses, capsys):
    assert train(*options, "--early_stopping_threshold=0.12", f"--output_dir={tmp_path}") == 0
    assert steps(tmp_path)[-1]["step"] == 6 and evaluated(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000006\n"
    assert final_weights(tmp_path)
    found = summary(tmp_path)
    why = "2 evaluations in a row did not improve on eval loss 3.85 by more than 0.12 (--early_stopping_patience 2)"
    assert (found["steps"], found["total_steps"], found["exported_step"]) == (6, 8, 6)
    assert found["stopped_early"] == why and found["last_evaluation"]["step"] == 6
    assert f"stopped early: {why}" in capsys.readouterr().out.splitlines()

    resume = [*options, "--early_stopping_threshold=0.12", f"--output_dir={tmp_path}", "--resume_from=latest"]
    with pytest.raises(UserError, match="that run stopped early and is finished: .* raise --early_stopping_patience"):
        train(*resume)
    assert train(*resume, "--early_stopping_patience=4") == 0
    assert steps(tmp_path)[-1]["step"] == 8 and "stopped_early" not in summary(tmp_path)


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_an_interrupted_and_resumed_run_stops_at_the_same_step(tmp_path, options, eval_losses, stop):
    """A signal in step 6 comes before the evaluation that ends the run, which the resumed run makes up."""
    options = [*options, "--early_stopping_threshold=0.12"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(*options, f"--output_dir={whole}")
    with pytest.MonkeyPatch.context() as patch:
        calls = iter(range(1, 100))

        def agreed(self) -> bool:
            if next(calls) == stop:
                self.requested = "SIGTERM"
            return self.requested is not None

        patch.setattr("llm_fp8.train.graceful_stop.GracefulStop.agreed", agreed)
        assert train(*options, f"--output_dir={resumed}") == 143
    assert train(*options, f"--output_dir={resumed}", "--resume_from=latest") == 0
    assert [step["loss"] for step in steps(resumed)] == [step["loss"] for step in steps(whole)]
    assert evaluated(resumed) == evaluated(whole) == [1, 2, 3, 4, 5, 6]
    assert summary(resumed)["stopped_early"] == summary(whole)["stopped_early"]
    for name, tensor in final_weights(whole).items():
        assert torch.equal(final_weights(resumed)[name], tensor), name


def test_a_run_killed_before_its_export_is_finished(tmp_path, options, eval_losses):
    options = [*options, "--early_stopping_threshold=0.12", f"--output_dir={tmp_path}"]
    train(*options, "--no_export")
    expected = summary(tmp_path)["stopped_early"]
    (tmp_path / "summary.json").unlink()
    assert train(*options, "--resume_from=latest") == 0
    assert evaluated(tmp_path) == [1, 2, 3, 4, 5, 6] and steps(tmp_path)[-1]["step"] == 6
    assert summary(tmp_path)["stopped_early"] == expected and summary(tmp_path)["last_evaluation"]["step"] == 6
    assert final_weights(tmp_path)


def test_the_best_step_is_exported_after_an_early_stop(tmp_path, options, eval_losses):
    """Step 4 has the lowest loss so far, though it is no improvement by the threshold of its own."""
    train(*options, "--keep_best", "--early_stopping_threshold=0.2", f"--output_dir={tmp_path}")
    assert steps(tmp_path)[-1]["step"] == 4 and summary(tmp_path)["exported_step"] == 4
    train(*options, "--keep_best", "--early_stopping_patience=1", f"--output_dir={tmp_path / 'other'}")
    assert steps(tmp_path / "other")[-1]["step"] == 5 and summary(tmp_path / "other")["exported_step"] == 4


def test_all_ranks_stop_at_the_same_step(tmp_path, tiny_model, rows):
    """No loss falls by 100 nats: the second evaluation is the first without improvement."""
    options = [
        f"--model_name={tiny_model}",
        f"--dataset_name={rows}",
        "--max_seq_length=128",
        "--batch_size=4",
        "--max_steps=50",
        "--eval_every=2",
        "--early_stopping_patience=2",
        "--early_stopping_threshold=100",
        "--sharding_mode=fsdp_full",
        f"--output_dir={tmp_path}",
    ]
    codes = [exit_code(process) for process in start_ranks(2, tmp_path / "log", *options)]
    assert codes == [0, 0], (tmp_path / "log").read_text()
    assert steps(tmp_path)[-1]["step"] == 6 and evaluated(tmp_path) == [2, 4, 6]
    assert summary(tmp_path)["exported_step"] == 6 and final_weights(tmp_path)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--early_stopping_patience=3"], "--early_stopping_patience 3 counts evaluations .* needs --eval_every"),
        (
            ["--early_stopping_threshold=0.1"],
            "--early_stopping_threshold 0.1 has no effect without",
        ),
        (["--early_stopping_threshold=-1"], "--early_stopping_threshold must be a finite number that is not negative"),
        (["--early_stopping_patience=-1"], "--early_stopping_patience must be a finite number that is not negative"),
    ],
)
def test_what_cannot_take_effect_is_refused(argv, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_config(argv)
