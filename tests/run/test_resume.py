"""A stopped or killed run that is resumed equals an uninterrupted run bitwise in weights, optimizer and metrics."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from llm_fp8.run import run as run_module
from llm_fp8.run import timeline as timeline_module
from llm_fp8.run.checkpoint import CheckpointManager
from llm_fp8.run.run_dir import LOCK, run_lock
from llm_fp8.run.timeline import Timeline
from llm_fp8.run.train_state import RunState
from llm_fp8.step.evaluation import evaluate_loss
from llm_fp8.utils.errors import UserError
from tests.support.hub_families import write_hub_model
from tests.support.small import (
    assert_same_bits,
    final_weights,
    records,
    run_json,
    steps,
    summary_json,
    train,
    write_model,
)

pytestmark = pytest.mark.slow

NUM_STEPS = 5
CLOCK_METRICS = ("step_time_s", "eval_time_s", "model_tflops")
"""Metrics that depend on the clock, besides all rates per second."""


@pytest.fixture(scope="module")
def options(small_run) -> list[str]:
    """Return the options of a run with three steps per epoch."""
    lengths = ["--num_of_samples=32", f"--max_steps={NUM_STEPS}"]
    schedule = ["--num_warmup_steps=0.4", "--lr_scheduler=cosine_with_min_lr", '--lr_scheduler_kwargs={"min_lr": 1e-6}']
    return [*small_run, *lengths, *schedule, "--save_every=100", "--eval_every=2"]


@pytest.fixture(scope="module")
def reference_run(options, tmp_path_factory) -> Path:
    """Return the folder of an uninterrupted run, which no test may change."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert train(*options, f"--output_dir={folder}") == 0
    return folder


@pytest.fixture
def uninterrupted(reference_run, tmp_path) -> Path:
    """Return a copy of `reference_run`, which a test may change."""
    return shutil.copytree(reference_run, tmp_path / "uninterrupted")


def checkpoint_tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Read all tensors in the checkpoint of a step by torch alone. Return them by name."""
    merged = folder / "merged.pt"
    dcp_to_torch_save(folder / "checkpoints" / f"step-{step:08d}", merged)
    return torch.load(merged)


def meta(folder: Path, step: int) -> dict:
    return json.loads((folder / "checkpoints" / f"step-{step:08d}" / "meta.json").read_text())


def without_clock(folder: Path) -> list[dict]:
    """Return the records in the metrics.jsonl of a run folder, without the metrics that depend on the clock."""
    return [
        {key: value for key, value in record.items() if key not in CLOCK_METRICS and "per_s" not in key}
        for record in records(folder)
    ]


def assert_same_run(uninterrupted: Path, resumed: Path) -> None:
    """Check that metrics, weights, optimizer state, random states and data position are bitwise equal."""
    assert without_clock(resumed) == without_clock(uninterrupted)
    assert_same_bits(final_weights(uninterrupted), final_weights(resumed))
    assert_same_bits(checkpoint_tensors(uninterrupted, NUM_STEPS), checkpoint_tensors(resumed, NUM_STEPS))
    assert meta(uninterrupted, NUM_STEPS) == meta(resumed, NUM_STEPS)


# eager, because sdpa in torch 2.x uses AMX's format even if ATEN_CPU_CAPABILITY excludes AMX
BF16 = ("--mixed_precision=bf16", "--attn_implementation=eager")
SCENARIOS = {
    "padded": [],
    "packed": ["--packing", "--max_seq_length=256", "--batch_size=4"],
    "accumulated": ["--batch_size=4", "--gradient_accumulation_steps=2", *BF16],
    "streamed": ["--streaming", "--packing", "--batch_size=4", "--eval_every=0", "--validation_fraction=0"],
    "random init": ["--random_init", "--gradient_checkpointing"],
    "adapters with dropout": ["--lora_rank=2", "--lora_dropout=0.3"],
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_resumed_run_equals_uninterrupted_run(tmp_path, options, uninterrupted, signal_after, scenario):
    """A signal stops the run within an epoch. In "padded", a second signal stops the resumed run at the epoch's end."""
    options, resumed = [*options, *SCENARIOS[scenario]], tmp_path / "resumed"
    if SCENARIOS[scenario]:
        uninterrupted = tmp_path / "scenario"
        assert train(*options, f"--output_dir={uninterrupted}") == 0
    signal_after(2)
    assert train(*options, f"--output_dir={resumed}") == 143
    assert steps(resumed)[-1]["step"] == 2 and not (resumed / "final").exists()
    assert summary_json(resumed)["stopped_by"] == "SIGTERM"
    torch.manual_seed(99)
    if scenario == "padded":
        signal_after(3, signal.SIGINT)
        assert train(*options, f"--output_dir={resumed}", "--resume_from=latest") == 130
    assert train(*options, f"--output_dir={resumed}", "--resume_from=latest") == 0
    if "--lora_rank=2" not in options:
        assert_same_run(uninterrupted, resumed)
    assert without_clock(resumed) == without_clock(uninterrupted)
    assert_same_bits(checkpoint_tensors(uninterrupted, NUM_STEPS), checkpoint_tensors(resumed, NUM_STEPS))
    resumes = [resume["resumed_after_step"] for resume in run_json(resumed)["resumes"]]
    assert resumes == ([2, 3] if scenario == "padded" else [2])


@pytest.mark.parametrize("stop", [2, 4])
def test_evaluation_skipped_by_a_signal_runs_once_after_resume(
    tmp_path, options, uninterrupted, signal_after, stop, monkeypatch
):
    options, resumed = [*options, "--save_every=2"], tmp_path / "resumed"
    signal_after(stop)
    arguments = [*options, f"--output_dir={resumed}"]
    assert train(*arguments) == 143
    assert [record["step"] for record in records(resumed) if "eval_loss" in record] == list(range(2, stop, 2))

    def killed(self, batches, start):
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:  # fails after the evaluation and before the next checkpoint
        patched.setattr(Timeline, "take_step", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(*arguments, "--resume_from=latest")
    assert train(*arguments, "--resume_from=latest") == 0
    assert_same_run(uninterrupted, resumed)
    assert [record["step"] for record in records(resumed) if "eval_loss" in record] == [2, 4, 5]


def test_model_is_exported_before_the_last_evaluation(tmp_path, options, monkeypatch):
    """A run that is killed or runs out of memory during its last evaluation has exported the model."""
    model_exists = []

    def evaluate_after_signal(*arguments):
        model_exists.append((tmp_path / "final" / "model.safetensors").exists())
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate_loss(*arguments)

    monkeypatch.setattr(timeline_module, "evaluate_loss", evaluate_after_signal)
    assert train(*options, "--eval_every=0", "--save_every=0", f"--output_dir={tmp_path}") == 0
    assert model_exists == [True] and "eval_loss" in records(tmp_path)[-1]


def test_signal_ends_an_evaluation(tmp_path, options, uninterrupted, monkeypatch):
    def evaluate_after_signal(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate_loss(*arguments)

    monkeypatch.setattr(timeline_module, "evaluate_loss", evaluate_after_signal)
    assert train(*options, f"--output_dir={tmp_path / 'run'}") == 143
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2]
    monkeypatch.undo()
    assert train(*options, f"--output_dir={tmp_path / 'run'}", "--resume_from=latest") == 0
    assert_same_run(uninterrupted, tmp_path / "run")


def test_model_is_exported_if_the_last_checkpoint_cannot_be_written(tmp_path, options, monkeypatch):
    monkeypatch.setattr(RunState, "save", mock.Mock(side_effect=UserError("the disk is full")))
    with pytest.raises(UserError, match="the disk is full"):
        train(*options, f"--output_dir={tmp_path / 'run'}")
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    with pytest.raises(UserError, match="the disk is full"):
        train(*options, "--no_export", f"--output_dir={tmp_path / 'not_exported'}")
    assert not (tmp_path / "not_exported" / "summary.json").exists(), "so that the run can be resumed"


@pytest.mark.parametrize("was_evaluated", [False, True])
def test_resume_finishes_run_killed_before_its_export(tmp_path, options, uninterrupted, reference_run, was_evaluated):
    killed = shutil.copytree(reference_run, tmp_path / "killed")
    shutil.rmtree(killed / "final")
    (killed / "summary.json").unlink()
    if not was_evaluated:
        lines = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
        (killed / "metrics.jsonl").write_text("".join(lines[:-1]))
    temporary = killed / "checkpoints" / ".tmp-step-00000004"
    temporary.mkdir()
    assert train(*options, f"--output_dir={killed}", "--resume_from=latest") == 0
    assert_same_run(uninterrupted, killed)
    assert not temporary.exists()


# Resumes with other options, and resumes that are refused


def test_resume_from_older_checkpoint_into_the_same_and_another_folder(tmp_path, options, monkeypatch):
    uninterrupted, branch = tmp_path / "uninterrupted", tmp_path / "branch"
    train(*options, "--save_every=2", "--save_total_limit=9", f"--output_dir={uninterrupted}")
    before = {path: path.read_bytes() for path in uninterrupted.rglob("*") if path.is_file()}
    older = uninterrupted / "checkpoints" / "step-00000002"
    assert train(*options, f"--resume_from={older}", f"--output_dir={branch}") == 0
    assert {path: path.read_bytes() for path in uninterrupted.rglob("*") if path.is_file()} == before
    assert [step["loss"] for step in steps(branch)] == [step["loss"] for step in steps(uninterrupted)][2:]
    assert run_json(branch)["resumed_after_step"] == 2
    expected = without_clock(uninterrupted)
    assert train(*options, f"--resume_from={older}", f"--output_dir={uninterrupted}") == 0
    assert without_clock(uninterrupted) == expected
    monkeypatch.setattr(Timeline, "take_step", mock.Mock(side_effect=RuntimeError("killed")))
    with pytest.raises(RuntimeError):
        train(*options, f"--resume_from={older}", f"--output_dir={uninterrupted}")
    assert CheckpointManager(uninterrupted, limit=9).find("latest").step == 2, "not the step of the earlier run"
    monkeypatch.setattr(RunState, "restore", mock.Mock(side_effect=RuntimeError("damaged")))
    with pytest.raises(RuntimeError):
        train(
            *options,
            f"--resume_from={uninterrupted / 'checkpoints' / 'step-00000005'}",
            f"--output_dir={uninterrupted}",
            "--max_steps=7",
            "--allow_changed=max_steps",
        )
    assert CheckpointManager(uninterrupted, limit=9).find("latest").step == 2, "not one that failed to load"


@pytest.fixture
def stopped(tmp_path, options, signal_after) -> Path:
    """Return the folder of a run that a signal stopped after three steps."""
    signal_after(3)
    folder = tmp_path / "stopped"
    train(*options, f"--output_dir={folder}")
    return folder


def assert_refused(folder: Path, options: list[str], *messages: str) -> None:
    """Check that the run in `folder` cannot be resumed with `options`. The error must be one line that contains all
    `messages`, and no file of the folder may change.
    """

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}

    before = contents()
    with pytest.raises(UserError) as error:
        train(*options, f"--output_dir={folder}", "--resume_from=latest")
    assert all(message in str(error.value) for message in messages), str(error.value)
    assert len(str(error.value).splitlines()) == 1 and contents() == before


def test_checkpoint_of_a_different_run_is_refused(tmp_path, stopped, options):
    other = write_model(tmp_path / "other", num_hidden_layers=3, tie_word_embeddings=True)
    for change, messages in (
        (["--mixed_precision=bf16"], ("precision",)),
        (["--packing"], ("packing",)),
        (["--max_seq_length=112"], ("max_seq_length",)),
        (["--num_of_samples=40"], ("--resume_from",)),
        (["--seed=1"], ("--resume_from",)),
        (["--dataset_name=embedded"], ("--resume_from",)),
        (["--max_steps=2", "--allow_changed=total_steps"], ("--max_steps",)),
        (["--max_steps=12"], ("total_steps 5 -> 12", "--allow_changed max_steps")),
        (["--batch_size=4"], ("--allow_changed batch_size",)),
        (["--learning_rate=0.5", "--allow_changed=total_steps"], ("--allow_changed learning_rate",)),
        ([f"--model_name={other}"], ("num_hidden_layers", "tie_word_embeddings")),
    ):
        assert_refused(stopped, [*options, *change], *messages)


def test_allowed_changes_are_printed_and_recorded(stopped, options, capsys):
    change = ["--learning_rate=0.5", "--allow_changed=learning_rate", "--batch_size=4"]
    change.append("--gradient_accumulation_steps=2")
    assert train(*options, *change, f"--output_dir={stopped}", "--resume_from=latest") == 0
    assert "learning_rate 0.01 -> 0.5" in capsys.readouterr().out
    assert meta(stopped, NUM_STEPS)["options"]["learning_rate"] == 0.5
    assert steps(stopped)[3]["learning_rate"] > 0.1


@pytest.mark.parametrize(("batch_size", "num_steps"), [(2, 3 + 11), (16, 3 + 2)])
def test_epochs_are_counted_in_rows_after_a_change_of_global_batch(tmp_path, small_run, batch_size, num_steps):
    """22 of the 24 rows are short enough. Epoch 1 has 3 steps of 8 rows. Epoch 2 has 11 steps of 2 rows or 2 of 16."""
    options = [*small_run, "--num_of_samples=24", "--validation_fraction=0", "--num_epochs=2", "--save_every=epoch"]
    assert train(*options, "--batch_size=8", "--save_total_limit=9", f"--output_dir={tmp_path / 'first'}") == 0
    resumed = tmp_path / "resumed"
    change = [f"--batch_size={batch_size}", "--allow_changed=global_batch_size,total_steps"]
    first = tmp_path / "first" / "checkpoints" / "step-00000003"
    assert train(*options, *change, f"--resume_from={first}", f"--output_dir={resumed}") == 0
    assert (steps(resumed)[-1]["step"], steps(resumed)[-1]["epoch"]) == (num_steps, 2.0)
    assert train(*options, *change, f"--output_dir={resumed}", "--resume_from=latest", "--num_epochs=3") == 0
    assert steps(resumed)[-1]["epoch"] == 3.0
    assert (resumed / "checkpoints" / f"step-{num_steps:08d}").exists()


def test_adapters_are_not_resumed_on_different_frozen_weights(tmp_path, rows):
    """A model folder that was moved is accepted. A folder of the same name with other weights is refused."""
    models = [Path(write_model(tmp_path / name / "final")) for name in ("a", "b", "moved")]
    weights = models[1] / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.up_proj.weight"] *= 2
    save_file(tensors, weights, metadata={"format": "pt"})
    options = [f"--dataset_name={rows}", "--max_seq_length=128", "--lora_rank=2", "--save_every=1", "--max_steps=2"]
    folder = f"--output_dir={tmp_path / 'run'}"
    train(*options, f"--model_name={models[0]}", folder)
    first = f"--resume_from={tmp_path / 'run' / 'checkpoints' / 'step-00000001'}"
    with pytest.raises(UserError, match="weights of --model_name was"):
        train(*options, f"--model_name={models[1]}", folder, first)
    assert train(*options, f"--model_name={models[2]}", folder, first) == 0


def test_run_is_not_resumed_on_a_changed_tower(tmp_path, rows):
    """The vision tower of Gemma 3 is not in the checkpoint, and goes from the model folder into final/."""
    options = [f"--model_name={write_hub_model(tmp_path / 'model', 'Gemma 3')}", f"--output_dir={tmp_path / 'run'}"]
    options += [f"--dataset_name={rows}", "--max_seq_length=128", "--save_every=1", "--mixed_precision=no"]
    train(*options, "--max_steps=1")
    weights = tmp_path / "model" / "model.safetensors"
    changed = {name: tensor + ("vision" in name) for name, tensor in load_file(weights).items()}
    save_file(changed, weights, metadata={"format": "pt"})
    assert_refused(tmp_path / "run", [*options, "--max_steps=2", "--allow_changed=max_steps"], "--model_name")


@pytest.mark.parametrize("was_stopped", [False, True])
def test_finished_run_resumes_only_with_more_steps(tmp_path, uninterrupted, options, signal_after, capsys, was_stopped):
    """If `was_stopped`, the finished run had no --save_every, and was once stopped by a signal and resumed."""
    if was_stopped:
        uninterrupted, options = tmp_path / "stopped", [option for option in options if "save_every" not in option]
        signal_after(2)
        train(*options, f"--output_dir={uninterrupted}")
        assert train(*options, f"--output_dir={uninterrupted}", "--resume_from=latest") == 0
    assert_refused(uninterrupted, options, "--max_steps", "--allow_changed max_steps")
    exported = (uninterrupted / "final" / "model.safetensors").read_bytes()
    shutil.rmtree(uninterrupted / "final")
    assert train(*options, f"--output_dir={uninterrupted}", "--resume_from=latest") == 0
    assert (uninterrupted / "final" / "model.safetensors").read_bytes() == exported
    before = (uninterrupted / "final" / "model.safetensors").read_bytes()
    longer = ["--max_steps=7", "--allow_changed=max_steps", "--no_export"]
    assert train(*options, *longer, f"--output_dir={uninterrupted}", "--resume_from=latest") == 0
    assert [step["step"] for step in steps(uninterrupted)] == list(range(1, 8))
    assert run_json(uninterrupted)["resumes"][-1]["resumed_after_step"] == NUM_STEPS
    assert (uninterrupted / "final" / "model.safetensors").read_bytes() == before


def test_latest_refuses_checkpoint_before_the_end_of_a_finished_run(tmp_path, options):
    folder = tmp_path / "run"
    train(*options, "--save_every=2", "--save_total_limit=9", f"--output_dir={folder}")
    shutil.rmtree(folder / "checkpoints" / f"step-{NUM_STEPS:08d}")
    older = f"--resume_from {folder / 'checkpoints' / 'step-00000004'}"
    longer = [*options, "--max_steps=6", "--allow_changed=max_steps"]
    assert_refused(folder, longer, older)
    assert train(*longer, f"--output_dir={folder}", *older.split()) == 0
    assert [step["step"] for step in steps(folder)] == list(range(1, 7))


@pytest.mark.parametrize("more", [[], ["--resume_from=latest"]], ids=["same command", "latest"])
def test_run_that_failed_before_its_first_checkpoint_restarts(tmp_path, options, monkeypatch, capsys, more):
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Timeline, "save", lambda self: (_ for _ in ()).throw(MemoryError))
        train(*options, "--save_every=2", f"--output_dir={tmp_path / 'run'}")
    assert len(steps(tmp_path / "run")) == 2
    capsys.readouterr()
    assert train(*options, f"--output_dir={tmp_path / 'run'}", *more) == 0
    assert "starts from the beginning" in capsys.readouterr().out
    assert [step["step"] for step in steps(tmp_path / "run")] == list(range(1, NUM_STEPS + 1))


def _write(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")


def test_folder_in_use_is_refused(tmp_path, stopped, options):
    """The folder is locked, as if another run used it, while a run starts in it or is resumed in it."""
    for folder, more in ((tmp_path / "new", []), (stopped, ["--resume_from=latest"])):
        folder.mkdir(exist_ok=True)
        with open(folder / LOCK, "a") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            with pytest.raises(UserError, match=f"--output_dir {folder} is in use by"):
                train(*options, f"--output_dir={folder}", *more)
        assert train(*options, f"--output_dir={folder}", *more) == 0


def test_folder_is_locked_while_loading_and_removed_if_loading_fails(tmp_path, options, monkeypatch):
    def fail_after_lock_check(*_):
        with pytest.raises(UserError, match=f"--output_dir {tmp_path / 'a' / 'b'} is in use by"), run_lock(folder):
            pass
        raise UserError("checked")

    folder = tmp_path / "a" / "b"
    monkeypatch.setattr(run_module, "load_data", fail_after_lock_check)
    with pytest.raises(UserError, match="checked"):
        train(*options, f"--output_dir={folder}")
    assert tmp_path.exists() and not folder.parent.exists()


def test_temporary_files_of_a_killed_run_are_removed(stopped, options):
    for name in (".run.json.123.tmp", ".mine.tmp", "a.7.tmp"):
        _write(stopped / name)
    (stopped / ".final.123.tmp").mkdir()
    assert train(*options, f"--output_dir={stopped}", "--resume_from=latest") == 0
    assert sorted(path.name for path in stopped.glob("*.tmp")) == [".mine.tmp", "a.7.tmp"]
