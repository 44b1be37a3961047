"""The eval loss, --keep_best and --early_stopping_patience."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from llm_fp8.run.timeline import Timeline
from llm_fp8.run.train_state import EvalHistory
from llm_fp8.utils.errors import UserError
from tests.support.processes import run_ranks
from tests.support.small import assert_same_bits, final_weights, records, steps, summary_json, train, write_rows

LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.5, 5: 6.0}
"""Step -> the eval loss that replaces the one that a run computes."""
NO_WARMUP = ("--lr_scheduler=constant", "--num_warmup_steps=0", "--batch_size=4")


def replaced_add(losses: Mapping[int, float]) -> Callable[[EvalHistory, int, float], None]:
    """Return a replacement for `EvalHistory.add` that adds `losses[step]` instead of the measured eval loss."""
    add = EvalHistory.add
    return lambda history, step, eval_loss: add(history, step, losses[step])


def replace_eval_losses(losses: Mapping[int, float]) -> None:
    """Replace the eval losses of all later runs in this process. `losses` maps a step to its eval loss."""
    EvalHistory.add = replaced_add(losses)  # type: ignore[method-assign]


@pytest.mark.parametrize(("patience", "stops_after"), [(1, 3), (2, 6), (3, None), (0, None)])
def test_early_stopping_counts_evaluations_without_improvement(patience, stops_after):
    history = EvalHistory(patience=patience)
    for step, loss in {1: 5.0, 2: 4.0, 3: 4.05, 4: 3.85, 5: 4.5, 6: float("nan"), 7: 3.8}.items():
        history.add(step, loss)
        if history.stops_early:
            break
    assert (step if history.stops_early else None) == stops_after


def test_first_of_equal_losses_is_best():
    history = EvalHistory(keeps_best=True)
    for step, loss in ((1, float("inf")), (2, 2.0), (3, 2.0), (4, float("nan")), (5, 2.5)):
        history.add(step, loss)
    assert (history.best_step, history.best_loss) == (2, 2.0)
    other = EvalHistory(keeps_best=True, data="other")
    assert not other.load_state_dict(history.state_dict()) and other.best_step is None


@pytest.fixture
def options(small_run) -> list[str]:
    return [*small_run, "--max_steps=5", "--eval_every=1", "--eval_batches=1"]


@pytest.fixture
def eval_losses(monkeypatch) -> dict[int, float]:
    """Replace the eval losses of the test's runs by a copy of `LOSSES`. Return the copy, which the test may change."""
    losses = dict(LOSSES)
    monkeypatch.setattr(EvalHistory, "add", replaced_add(losses))
    return losses


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def evaluation_steps(folder: Path) -> list[int]:
    return [record["step"] for record in records(folder) if "eval_loss" in record]


@pytest.mark.slow
def test_best_checkpoint_is_kept_and_exported(tmp_path, options, eval_losses, monkeypatch):
    weights: dict[int, dict[str, torch.Tensor]] = {}
    save = Timeline.save

    def save_and_copy(self):
        save(self)
        weights[self.step] = {name: tensor.clone() for name, tensor in self.setup.model.module.state_dict().items()}

    monkeypatch.setattr(Timeline, "save", save_and_copy)
    assert train(*options, "--keep_best", "--save_every=1", f"--output_dir={tmp_path}") == 0
    best = tmp_path / "checkpoints" / "step-00000002"
    assert checkpoint_steps(tmp_path) == [2, 4, 5]
    assert summary_json(tmp_path)["best"] == {"step": 2, "eval_loss": 3.0, "checkpoint": str(best)}
    assert summary_json(tmp_path)["steps"] == 5 and summary_json(tmp_path)["exported_step"] == 2
    assert_same_bits(final_weights(tmp_path), weights[2])


@pytest.mark.slow
@pytest.mark.parametrize(("last_loss", "saved", "exported"), [(1.0, [2, 5], 5), (6.0, [1, 2, 5], 2)])
def test_keep_best_saves_at_each_lowest_loss(tmp_path, options, eval_losses, last_loss, saved, exported):
    eval_losses[5] = last_loss
    train(*options, "--keep_best", f"--output_dir={tmp_path}")
    assert checkpoint_steps(tmp_path) == saved and summary_json(tmp_path)["exported_step"] == exported


@pytest.mark.slow
def test_resumed_run_keeps_best_step(tmp_path, options, eval_losses, signal_after):
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    options = [*options, "--keep_best", "--save_every=1"]
    train(*options, f"--output_dir={uninterrupted}")
    signal_after(3)
    assert train(*options, f"--output_dir={resumed}") == 143
    assert train(*options, f"--output_dir={resumed}", "--resume_from=latest") == 0
    assert summary_json(resumed)["best"]["step"] == 2 and checkpoint_steps(resumed) == checkpoint_steps(uninterrupted)
    assert_same_bits(final_weights(uninterrupted), final_weights(resumed))


@pytest.mark.slow
def test_eval_losses_on_different_data_are_not_compared(tmp_path, options, eval_losses, signal_after):
    """Step 2 has the lowest loss on the old data. Step 4 has the lowest loss on the new data, so it is the best."""
    options = [*options, "--keep_best", f"--output_dir={tmp_path / 'run'}"]
    first, other = (f"--eval_dataset_name={write_rows(tmp_path / f'{number}.jsonl', number)}" for number in (90, 80))
    signal_after(3)
    assert train(*options, first) == 143
    assert train(*options, other, "--resume_from=latest") == 0
    assert summary_json(tmp_path / "run")["best"]["step"] == 4


@pytest.mark.slow
def test_evaluation_and_checkpoint_at_the_end_of_each_epoch(tmp_path, small_run):
    options = [*small_run, "--num_of_samples=32", "--num_epochs=2", "--eval_every=epoch", "--save_every=epoch"]
    assert train(*options, f"--output_dir={tmp_path}") == 0
    assert evaluation_steps(tmp_path) == checkpoint_steps(tmp_path) == [3, 6]


@pytest.mark.slow
def test_best_checkpoint_must_be_in_the_folder_of_the_run(tmp_path, options, eval_losses, monkeypatch):
    run, branch = tmp_path / "run", tmp_path / "branch"
    options = [*options, "--keep_best"]
    train(*options, "--save_every=1", "--save_total_limit=9", f"--output_dir={run}")
    train(*options, f"--resume_from={run / 'checkpoints' / 'step-00000003'}", f"--output_dir={branch}")
    assert summary_json(branch)["best"]["step"] == 4
    evaluate = Timeline.evaluate

    def delete_checkpoint_and_evaluate(self, *stop):
        if self.step == 5:
            shutil.rmtree(tmp_path / "lost" / "checkpoints" / "step-00000002")
        return evaluate(self, *stop)

    monkeypatch.setattr(Timeline, "evaluate", delete_checkpoint_and_evaluate)
    assert train(*options, f"--output_dir={tmp_path / 'lost'}") == 0
    assert summary_json(tmp_path / "lost")["exported_step"] == 5


@pytest.mark.slow
def test_early_stop_exports_and_summarises_as_after_the_last_step(tmp_path, options, eval_losses):
    options = [*options, "--save_every=2", "--early_stopping_patience=2", f"--output_dir={tmp_path}"]
    assert train(*options) == 0
    summary = summary_json(tmp_path)
    assert (summary["steps"], summary["total_steps"], summary["exported_step"]) == (4, 5, 4)
    assert "stopped_early" in summary
    assert steps(tmp_path)[-1]["step"] == 4 and evaluation_steps(tmp_path) == [1, 2, 3, 4] and final_weights(tmp_path)
    with pytest.raises(UserError, match="--early_stopping_patience"):
        train(*options, "--resume_from=latest")
    assert train(*options, "--early_stopping_patience=4", "--resume_from=latest") == 0
    assert steps(tmp_path)[-1]["step"] == 5 and "stopped_early" not in summary_json(tmp_path)


@pytest.mark.slow
def test_resumed_run_stops_early_at_the_same_step(tmp_path, options, eval_losses, signal_after):
    """A signal stops the run in step 4, before the evaluation that would end it. The resumed run evaluates and ends."""
    options = [*options, "--keep_best", "--early_stopping_patience=2", f"--output_dir={tmp_path}"]
    signal_after(4)
    assert train(*options) == 143
    assert train(*options, "--resume_from=latest") == 0
    assert evaluation_steps(tmp_path) == [1, 2, 3, 4] and steps(tmp_path)[-1]["step"] == 4
    assert summary_json(tmp_path)["exported_step"] == 2
    (tmp_path / "summary.json").unlink()  # the state after a kill before the export
    assert train(*options, "--resume_from=latest") == 0
    assert evaluation_steps(tmp_path) == [1, 2, 3, 4] and summary_json(tmp_path)["exported_step"] == 2


@pytest.mark.slow
def test_extended_run_counts_evaluation_after_last_step(tmp_path, options, eval_losses):
    eval_losses |= {1: 3.0, 2: 4.0, 3: 4.0, 4: 2.0}
    options = [*options, "--early_stopping_patience=2", "--save_every=9", f"--output_dir={tmp_path}"]
    assert train(*options, "--max_steps=3") == 0
    assert "stopped_early" not in summary_json(tmp_path)
    assert train(*options, "--max_steps=4", "--resume_from=latest", "--allow_changed=total_steps") == 0
    assert steps(tmp_path)[-1]["step"] == 3 and "stopped_early" in summary_json(tmp_path)
    assert evaluation_steps(tmp_path) == [1, 2, 3]


@pytest.mark.slow
def test_two_ranks_stop_early_and_export_best_step(tmp_path, options):
    options = [*options, *NO_WARMUP, "--keep_best", "--async_save"]
    more = ["--early_stopping_patience=2", "--sharding_mode=fsdp_full", f"--output_dir={tmp_path}"]
    run_ranks(2, tmp_path, *options, *more, first=functools.partial(replace_eval_losses, LOSSES))
    assert steps(tmp_path)[-1]["step"] == 4 and evaluation_steps(tmp_path) == [1, 2, 3, 4]
    assert summary_json(tmp_path)["best"]["step"] == summary_json(tmp_path)["exported_step"] == 2
    dcp_to_torch_save(tmp_path / "checkpoints" / "step-00000002", tmp_path / "merged.pt")
    saved = torch.load(tmp_path / "merged.pt")
    for name, tensor in final_weights(tmp_path).items():
        assert torch.equal(saved[f"model.{name}"], tensor), name


@pytest.mark.slow
def test_deepspeed_stops_early_and_exports_best_step(tmp_path, small_run):
    """Step 2 has the lowest eval loss, so the exported weights equal those of a run of two steps."""
    options = [*small_run, *NO_WARMUP, "--sharding_mode=deepspeed_2"]
    early, short = tmp_path / "early", tmp_path / "short"
    more = ["--max_steps=5", "--eval_every=1", "--keep_best", "--early_stopping_patience=2"]
    run_ranks(2, early, *options, *more, f"--output_dir={early}", first=functools.partial(replace_eval_losses, LOSSES))
    assert evaluation_steps(early) == [1, 2, 3, 4] and summary_json(early)["exported_step"] == 2
    run_ranks(2, short, *options, "--max_steps=2", f"--output_dir={short}")
    assert_same_bits(final_weights(early), final_weights(short))
