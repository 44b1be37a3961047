"""--keep_best: the checkpoint with the lowest eval loss stays, and final/ holds its weights."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest
import torch
from llm_fp8.train.eval_history import EvalHistory
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from llm_fp8.config.parser import parse_config
from llm_fp8.train.loop import TrainingLoop
from llm_fp8.utils.errors import UserError
from tests.support.processes import run_ranks
from tests.support.small import assert_same_tensors, final_weights, records, steps, summary_json, train, write_rows
from tests.support.told_losses import tell

pytestmark = pytest.mark.slow

LOSSES = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.5, 10: 6.0}
"""Step -> the eval loss that the run is told."""


@pytest.fixture
def options(small_run) -> list[str]:
    return [*small_run, "--max_steps=10", "--eval_every=2", "--keep_best"]


@pytest.fixture
def eval_losses(tell_eval_losses) -> dict[int, float]:
    """The evaluations find these, which a test may change."""
    losses = dict(LOSSES)
    tell_eval_losses(losses)
    return losses


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def test_the_best_checkpoint_is_kept_named_and_exported(tmp_path, options, eval_losses, capsys):
    run = tmp_path / "run"
    assert train(*options, "--save_every=1", f"--output_dir={run}") == 0
    best = run / "checkpoints" / "step-00000004"
    assert checkpoints(run) == [4, 9, 10]
    assert summary_json(run)["best"] == {"step": 4, "eval_loss": 3.0, "checkpoint": str(best)}
    assert summary_json(run)["steps"] == 10 and summary_json(run)["exported_step"] == 4
    assert "| optimizer steps | 4 |\n" in (run / "final" / "README.md").read_text()
    said = capsys.readouterr().out.splitlines()
    assert f"  best checkpoint         {best} (eval loss 3)" in said[-4:]
    assert said[-1] == "  weights in final/       of step 4"


def test_final_has_the_weights_that_the_best_step_had(tmp_path, options, eval_losses, monkeypatch):
    seen: dict[int, dict[str, torch.Tensor]] = {}
    save = TrainingLoop.save

    def remember(self, callbacks):
        save(self, callbacks)
        seen[self.step] = {name: tensor.clone() for name, tensor in callbacks.setup.model.state_dict().items()}

    monkeypatch.setattr(TrainingLoop, "save", remember)
    train(*options, f"--output_dir={tmp_path}")
    assert list(seen) == [2, 4], "checkpoints are written where the loss was the lowest so far"
    assert_same_tensors(final_weights(tmp_path), seen[4])


def test_the_last_step_may_be_the_best(tmp_path, options, eval_losses):
    eval_losses[10] = 1.0
    train(*options, f"--output_dir={tmp_path}")
    assert checkpoints(tmp_path) == [4, 10]
    assert summary_json(tmp_path)["best"]["step"] == summary_json(tmp_path)["exported_step"] == 10


def test_without_a_finite_loss_the_last_weights_are_exported(tmp_path, options, eval_losses):
    eval_losses.update(dict.fromkeys(eval_losses, float("nan")))
    train(*options, f"--output_dir={tmp_path}")
    assert "best" not in summary_json(tmp_path) and summary_json(tmp_path)["exported_step"] == 10


def test_real_evaluations_decide(tmp_path, options):
    train(*options, "--save_every=3", f"--output_dir={tmp_path}")
    evaluations = [record for record in records(tmp_path) if "eval_loss" in record]
    lowest = min(evaluations, key=lambda record: record["eval_loss"])
    best = summary_json(tmp_path)["best"]
    assert (best["step"], best["eval_loss"]) == (lowest["step"], lowest["eval_loss"])


@pytest.mark.parametrize("stop", [5, 7, 8])
def test_a_resumed_run_knows_the_best_step(tmp_path, options, eval_losses, stop_after, stop):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(*options, "--save_every=1", f"--output_dir={whole}")
    interrupted = [*options, "--save_every=1", f"--output_dir={resumed}"]
    stop_after(stop)
    assert train(*interrupted) == 143
    assert train(*interrupted, "--resume_from=latest") == 0
    assert summary_json(resumed)["best"]["step"] == 4 and summary_json(resumed)["exported_step"] == 4
    assert checkpoints(resumed) == checkpoints(whole)
    assert_same_tensors(final_weights(whole), final_weights(resumed))


@pytest.mark.parametrize("changed", ["--eval_batches=1", "--eval_dataset_name={others}"])
def test_losses_on_other_data_are_not_compared(tmp_path, options, eval_losses, stop_after, capsys, changed):
    """Step 4's loss is on what is no longer evaluated on; of the evaluations since, step 8 has the lowest."""
    options = [
        *options,
        f"--output_dir={tmp_path / 'run'}",
        f"--eval_dataset_name={write_rows(tmp_path / 'a.jsonl', 90)}",
    ]
    stop_after(5)
    assert train(*options) == 143
    others = write_rows(tmp_path / "b.jsonl", 80)
    assert train(*options, changed.format(others=others), "--resume_from=latest", "--early_stopping_patience=4") == 0
    said = capsys.readouterr().out
    assert "evaluation is on other data than before this checkpoint: for --keep_best" in said
    assert "early_stopping_patience 0 -> 4" in said and changed[2:].split("=")[0] in said
    assert summary_json(tmp_path / "run")["best"]["step"] == 8


def test_a_branch_in_another_folder(tmp_path, options, eval_losses, capsys):
    """The best checkpoint is looked for in the folder of the run alone."""
    run, branch = tmp_path / "run", tmp_path / "branch"
    train(*options, "--save_every=1", "--save_total_limit=9", f"--output_dir={run}")
    train(*options, f"--resume_from={run / 'checkpoints' / 'step-00000006'}", f"--output_dir={branch}")
    assert "--keep_best: the best step so far, 4, has no checkpoint in" in capsys.readouterr().out
    assert summary_json(branch)["best"]["step"] == 8


def test_a_best_checkpoint_that_somebody_deleted(tmp_path, options, eval_losses, capsys, monkeypatch):
    evaluate = TrainingLoop.evaluate

    def lose(self, callbacks):
        if self.step == 10:
            shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
        return evaluate(self, callbacks)

    monkeypatch.setattr(TrainingLoop, "evaluate", lose)
    assert train(*options, f"--output_dir={tmp_path}") == 0
    assert "is gone or damaged: final/ will hold the weights of the last step, 10" in capsys.readouterr().out
    assert summary_json(tmp_path)["exported_step"] == 10


@pytest.mark.parametrize("mode", ["fsdp_full", "ddp"])
def test_two_ranks_export_the_best_step(tmp_path, small_run, mode):
    """At this learning rate the eval loss rises after the first steps."""
    options = [
        *small_run,
        "--learning_rate=1",
        "--lr_scheduler=constant",
        "--num_warmup_steps=0",
        "--max_steps=6",
        "--eval_every=1",
        "--keep_best",
        "--batch_size=4",
        f"--sharding_mode={mode}",
        "--async_save",
        f"--output_dir={tmp_path}",
    ]
    run_ranks(2, tmp_path, *options)
    losses = {record["step"]: record["eval_loss"] for record in records(tmp_path) if "eval_loss" in record}
    best = min(losses, key=losses.__getitem__)
    assert summary_json(tmp_path)["best"]["step"] == summary_json(tmp_path)["exported_step"] == best < 6
    dcp_to_torch_save(tmp_path / "checkpoints" / f"step-{best:08d}", tmp_path / "merged.pt")
    saved = torch.load(tmp_path / "merged.pt")
    for name, tensor in final_weights(tmp_path).items():
        assert torch.equal(saved[f"model.{name}"], tensor), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_stops_early_and_exports_the_best_step(tmp_path, small_run, stage):
    """Steps 6 and 8 are no improvement on step 4, whose weights are those of a run that ends there."""
    options = [
        *small_run,
        "--batch_size=4",
        "--lr_scheduler=constant",
        "--num_warmup_steps=0",
        f"--sharding_mode=deepspeed_{stage}",
    ]
    kept, short = tmp_path / "kept", tmp_path / "short"
    asked = ["--max_steps=10", "--eval_every=2", "--keep_best", "--early_stopping_patience=2"]
    run_ranks(2, kept, *options, *asked, f"--output_dir={kept}", first=functools.partial(tell, LOSSES))
    assert [record["step"] for record in records(kept) if "eval_loss" in record] == [2, 4, 6, 8]
    assert "--early_stopping_patience 2" in summary_json(kept)["stopped_early"]
    assert summary_json(kept)["best"]["step"] == summary_json(kept)["exported_step"] == 4
    run_ranks(2, short, *options, "--max_steps=4", f"--output_dir={short}")
    assert_same_tensors(final_weights(kept), final_weights(short))
    assert all(step["learning_rate"] > 0 and step["grad_norm"] > 0 for step in steps(kept)), "weights move in each"


def test_it_needs_evaluations():
    with pytest.raises(UserError, match="--keep_best compares evaluations during training and needs --eval_every; add"):
        parse_config(["--keep_best"])


def test_the_first_of_equal_losses_is_the_best():
    history = EvalHistory(keeps_best=True)
    for step, loss in ((1, float("inf")), (2, 2.0), (3, 2.0), (4, float("nan")), (5, 2.5)):
        history.add(step, loss)
    assert (history.best_step, history.best_loss) == (2, 2.0)
