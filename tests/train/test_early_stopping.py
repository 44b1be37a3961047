"""--early_stopping_patience: the run ends as after its last step when evaluations stop improving."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from llm_fp8.train.eval_history import EvalHistory

from llm_fp8.config.parser import parse_config
from llm_fp8.utils.errors import UserError
from tests.support.processes import run_ranks
from tests.support.small import assert_same_tensors, final_weights, records, steps, summary_json, train

LOSSES = {1: 5.0, 2: 4.0, 3: 4.05, 4: 3.85, 5: 4.5, 6: 3.9, 7: 3.8, 8: 3.0}
"""Step -> the eval loss that the run is told. Steps 1, 2 and 4 are improvements, 5 and 6 are none."""


@pytest.fixture
def options(small_run) -> list[str]:
    return [*small_run, "--max_steps=8", "--eval_every=1", "--save_every=4", "--early_stopping_patience=2"]


@pytest.fixture
def eval_losses(tell_eval_losses) -> None:
    tell_eval_losses(LOSSES)


def evaluated(folder: Path) -> list[int]:
    return [record["step"] for record in records(folder) if "eval_loss" in record]


@pytest.mark.parametrize(("patience", "stops_after"), [(1, 3), (2, 6), (3, None), (0, None)])
def test_the_count_of_evaluations_without_improvement(patience, stops_after):
    history = EvalHistory(patience=patience)
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


@pytest.mark.slow
def test_the_run_ends_as_after_its_last_step(tmp_path, options, eval_losses, capsys):
    assert train(*options, f"--output_dir={tmp_path}") == 0
    assert steps(tmp_path)[-1]["step"] == 6 and evaluated(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-00000006\n"
    assert final_weights(tmp_path)
    found = summary_json(tmp_path)
    why = "2 evaluations in a row did not improve on eval loss 3.85 (--early_stopping_patience 2)"
    assert (found["steps"], found["total_steps"], found["exported_step"]) == (6, 8, 6)
    assert found["stopped_early"] == why and found["last_evaluation"]["step"] == 6
    assert f"stopped early: {why}" in capsys.readouterr().out.splitlines()

    resume = [*options, f"--output_dir={tmp_path}", "--resume_from=latest"]
    for more in ([], [f"--resume_from={tmp_path / 'checkpoints' / 'step-00000006'}"]):
        with pytest.raises(UserError, match="is finished[,:] .* raise --early_stopping_patience"):
            train(*resume, *more)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000006")
    with pytest.raises(UserError, match="is finished, after 6 steps; to train on, raise --early_stopping_patience"):
        train(*resume)
    assert train(*resume, "--early_stopping_patience=4") == 0
    assert steps(tmp_path)[-1]["step"] == 8 and "stopped_early" not in summary_json(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 4, 6])
def test_an_interrupted_and_resumed_run_stops_at_the_same_step(tmp_path, options, eval_losses, stop_after, stop):
    """A signal in step 6 comes before the evaluation that ends the run, which the resumed run makes up."""
    options = [*options]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(*options, f"--output_dir={whole}")
    stop_after(stop)
    assert train(*options, f"--output_dir={resumed}") == 143
    assert train(*options, f"--output_dir={resumed}", "--resume_from=latest") == 0
    assert [step["loss"] for step in steps(resumed)] == [step["loss"] for step in steps(whole)]
    assert evaluated(resumed) == evaluated(whole) == [1, 2, 3, 4, 5, 6]
    assert summary_json(resumed)["stopped_early"] == summary_json(whole)["stopped_early"]
    assert_same_tensors(final_weights(whole), final_weights(resumed))


@pytest.mark.slow
def test_a_run_killed_before_its_export_is_finished(tmp_path, options, eval_losses):
    options = [*options, f"--output_dir={tmp_path}"]
    train(*options, "--no_export")
    expected = summary_json(tmp_path)["stopped_early"]
    (tmp_path / "summary.json").unlink()
    assert train(*options, "--resume_from=latest") == 0
    assert evaluated(tmp_path) == [1, 2, 3, 4, 5, 6] and steps(tmp_path)[-1]["step"] == 6
    assert (
        summary_json(tmp_path)["stopped_early"] == expected and summary_json(tmp_path)["last_evaluation"]["step"] == 6
    )
    assert final_weights(tmp_path)


@pytest.mark.slow
def test_the_evaluation_after_the_last_step_ends_nothing_early(tmp_path, options, tell_eval_losses, capsys):
    """It is the second in a row without improvement, and comes when there is nothing left to save."""
    tell_eval_losses({1: 3.0, 2: 4.0, 3: 4.0, 4: 2.0})
    options = [*options, f"--output_dir={tmp_path}"]
    assert train(*options, "--max_steps=3") == 0
    assert (summary_json(tmp_path)["steps"], summary_json(tmp_path)["total_steps"]) == (3, 3)
    assert "stopped_early" not in summary_json(tmp_path) and "stopped early" not in capsys.readouterr().out
    assert train(*options, "--max_steps=4", "--resume_from=latest", "--allow_changed=total_steps") == 0
    assert steps(tmp_path)[-1]["step"] == 4


@pytest.mark.slow
def test_the_best_step_is_exported_after_an_early_stop(tmp_path, options, eval_losses):
    train(*options, "--keep_best", f"--output_dir={tmp_path}")
    assert steps(tmp_path)[-1]["step"] == 6 and summary_json(tmp_path)["exported_step"] == 4
    train(*options, "--keep_best", "--early_stopping_patience=1", f"--output_dir={tmp_path / 'other'}")
    assert steps(tmp_path / "other")[-1]["step"] == 3 and summary_json(tmp_path / "other")["exported_step"] == 2


@pytest.mark.slow
def test_all_ranks_stop_at_the_same_step(tmp_path, small_run):
    """No loss falls: the second evaluation is the first without improvement."""
    options = [
        *small_run,
        "--batch_size=4",
        "--max_steps=50",
        "--eval_every=2",
        "--early_stopping_patience=2",
        "--learning_rate=1e-30",
        "--sharding_mode=fsdp_full",
        f"--output_dir={tmp_path}",
    ]
    run_ranks(2, tmp_path, *options)
    assert steps(tmp_path)[-1]["step"] == 6 and evaluated(tmp_path) == [2, 4, 6]
    assert summary_json(tmp_path)["exported_step"] == 6 and final_weights(tmp_path)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--early_stopping_patience=3"], "--early_stopping_patience 3 counts evaluations .* needs --eval_every"),
        (["--early_stopping_patience=-1"], "--early_stopping_patience must be a finite number that is not negative"),
    ],
)
def test_what_cannot_take_effect_is_refused(argv, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_config(argv)
