"""A run that was stopped or killed and resumed is the run that was not: the same bits in weights, optimizer and
metrics.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from llm_fp8.train.evaluate import evaluate_loss
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from llm_fp8.train import callbacks, run
from llm_fp8.train import train_state as run_state
from llm_fp8.train.loop import TrainingLoop
from llm_fp8.train.run_dir import LOCK, WRITTEN
from llm_fp8.utils.errors import UserError
from tests.support.processes import exit_code, processes_of_group, start_training, wait_until
from tests.support.small import (
    assert_same_tensors,
    final_weights,
    records,
    run_json,
    steps,
    summary_json,
    train,
    write_model,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 10
MEASURED = (
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "real_tokens_per_s",
    "supervised_tokens_per_s",
    "model_tflops",
)
"""What depends on the clock."""


@pytest.fixture
def options(small_run) -> list[str]:
    return [*small_run, f"--max_steps={NUM_STEPS}", "--save_every=100", "--eval_every=4"]


def checkpoint_tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name, read without the project's code."""
    merged = folder / "merged.pt"
    dcp_to_torch_save(folder / "checkpoints" / f"step-{step:08d}", merged)
    return torch.load(merged)


def meta(folder: Path, step: int) -> dict:
    """meta.json of a checkpoint."""
    return json.loads((folder / "checkpoints" / f"step-{step:08d}" / "meta.json").read_text())


def without_clock(folder: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock."""
    return [
        {key: value for key, value in record.items() if key not in (*MEASURED, "eval_time_s")}
        for record in records(folder)
    ]


def assert_same_run(whole: Path, resumed: Path, last_step: int = NUM_STEPS) -> None:
    """Metrics, weights, optimizer state, random states and position in the data are the same, bit for bit."""
    assert without_clock(resumed) == without_clock(whole)
    assert_same_tensors(final_weights(whole), final_weights(resumed))
    assert_same_tensors(checkpoint_tensors(whole, last_step), checkpoint_tensors(resumed, last_step))
    assert meta(whole, last_step) == meta(resumed, last_step)


SCENARIOS = {
    "padded": [],
    "packed": ["--packing", "--max_seq_length=256", "--batch_size=4"],
    "accumulated": ["--batch_size=4", "--gradient_accumulation_steps=2"],
    "bf16": ["--mixed_precision=bf16"],
    "streamed": ["--streaming", "--eval_every=0", "--validation_fraction=0"],
    "streamed and packed": [
        "--streaming",
        "--packing",
        "--max_seq_length=256",
        "--batch_size=4",
        "--eval_every=0",
        "--validation_fraction=0",
    ],
    "random init": ["--random_init", "--gradient_checkpointing"],
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_stopped_and_resumed_run_is_the_whole_run(tmp_path, options, stop_after, scenario):
    """Stopped in the middle of an epoch, and at the end of one."""
    options = [*options, *SCENARIOS[scenario]]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert train(*options, f"--output_dir={whole}") == 0
    stop_after(3)
    assert train(*options, f"--output_dir={resumed}") == 143
    assert steps(resumed)[-1]["step"] == 3 and not (resumed / "final").exists()
    stop_after(7, signal.SIGINT)
    assert train(*options, f"--output_dir={resumed}", "--resume_from=latest") == 130
    assert train(*options, f"--output_dir={resumed}", "--resume_from=latest") == 0
    assert_same_run(whole, resumed)


@pytest.mark.parametrize("stop", [4, 8])
def test_an_evaluation_that_fell_due_in_the_step_of_a_signal_is_made_up(tmp_path, options, stop_after, stop):
    options = [*options, "--eval_every=4", "--save_every=4"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(*options, f"--output_dir={whole}")
    stop_after(stop)
    assert train(*options, f"--output_dir={resumed}") == 143
    assert [record["step"] for record in records(resumed) if "eval_loss" in record] == list(range(4, stop, 4))
    assert train(*options, f"--output_dir={resumed}", "--resume_from=latest") == 0
    assert_same_run(whole, resumed)
    assert [record["step"] for record in records(resumed) if "eval_loss" in record] == [4, 8, 10]


def test_what_draws_random_numbers_draws_the_same_ones(tmp_path, options, stop_after):
    """Attention dropout takes from torch's generator in every step."""
    model = write_model(tmp_path / "model", attention_dropout=0.2)
    options = [*options, f"--model_name={model}"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(*options, f"--output_dir={whole}")
    stop_after(5)
    assert train(*options, f"--output_dir={resumed}") == 143
    torch.manual_seed(99)
    assert train(*options, f"--output_dir={resumed}", "--resume_from=latest") == 0
    assert_same_run(whole, resumed)
    train(*[*options, "--seed=43"], f"--output_dir={tmp_path / 'other'}")
    assert steps(tmp_path / "other")[-1]["loss"] != steps(whole)[-1]["loss"]


def test_a_signal_in_the_last_step_does_not_lose_the_end_of_the_run(tmp_path, options, stop_after):
    stop_after(NUM_STEPS)
    assert train(*options, f"--output_dir={tmp_path}") == 0
    assert (tmp_path / "final" / "model.safetensors").exists()


def test_the_model_is_written_before_the_last_evaluation(tmp_path, options, monkeypatch, capfd):
    """So a signal and the SIGKILL after it, or a GPU out of memory, cost that evaluation alone."""
    written = []

    def evaluate_and_be_stopped(*arguments):
        written.append((tmp_path / "final" / "model.safetensors").exists())
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate_loss(*arguments)

    monkeypatch.setattr(callbacks, "evaluate_loss", evaluate_and_be_stopped)
    assert train(*options, "--eval_every=0", "--save_every=0", f"--output_dir={tmp_path}") == 0
    assert written == [True]
    assert "SIGTERM received: all steps are done; finishing export and evaluation.\n" in capfd.readouterr().err
    assert summary_json(tmp_path)["exported"] == str(tmp_path / "final")
    assert "eval_loss" in records(tmp_path)[-1]


def test_what_a_killed_save_left_goes_at_the_next_start(tmp_path, options, stop_after):
    """Its room may be what the next checkpoint needs."""
    stop_after(3)
    assert train(*options, f"--output_dir={tmp_path}") == 143
    left = tmp_path / "checkpoints" / ".tmp-step-00000004"
    left.mkdir()
    assert train(*options, "--save_every=0", f"--output_dir={tmp_path}", "--resume_from=latest") == 0
    assert not left.exists()


@pytest.mark.parametrize("was_evaluated", [False, True])
def test_a_run_killed_between_its_last_save_and_its_export_is_finished(tmp_path, options, was_evaluated):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(*options, f"--output_dir={whole}")
    train(*options, f"--output_dir={killed}", "--no_export")
    (killed / "summary.json").unlink()
    if not was_evaluated:
        lines = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
        (killed / "metrics.jsonl").write_text("".join(lines[:-1]))
    assert train(*options, f"--output_dir={killed}", "--resume_from=latest") == 0
    assert_same_run(whole, killed)


# ---- real processes ----


def test_sigterm_to_the_script_saves_and_exits_with_143(tmp_path, warm_python, options):
    command = [
        warm_python,
        "-u",
        str(ROOT / "train_fp8.py"),
        *options,
        "--max_steps=100000",
        "--save_every=0",
        f"--output_dir={tmp_path}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step"):
            process.send_signal(signal.SIGTERM)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert err == "SIGTERM received: finishing this step, then saving and stopping.\n"
    last = steps(tmp_path)[-1]["step"]
    assert meta(tmp_path, last)["step"] == last
    assert f"stopped by SIGTERM; continue with --resume_from latest --output_dir {tmp_path}" in out
    assert json.loads((tmp_path / "summary.json").read_text())["stopped_by"] == "SIGTERM"


def test_ctrl_c_saves_and_exits_with_130(tmp_path, options):
    log = tmp_path / "log"
    run = tmp_path / "run"
    process = start_training(log, *options, "--max_steps=100000", f"--output_dir={run}")
    assert wait_until(lambda: "1/100000" in log.read_text(), process)
    os.kill(process.pid, signal.SIGINT)
    assert exit_code(process) == 130
    assert "Press Ctrl-C again" in log.read_text() and "Traceback" not in log.read_text()
    assert (run / "checkpoints" / "latest").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_before_there_is_anything_to_save_a_signal_ends_the_process_at_once(tmp_path, options, number, code):
    log = tmp_path / "log"
    process = start_training(log, *options, f"--output_dir={tmp_path / 'run'}")
    assert wait_until(lambda: "precision:" in log.read_text(), process)
    os.kill(process.pid, number)
    assert exit_code(process) == code
    assert "Traceback" not in log.read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_while_several_processes_tokenise_ends_them_all(tmp_path, options, rows, number, code):
    many = tmp_path / "many.jsonl"
    many.write_text(Path(rows).read_text() * 1000)  # more than are done before the signal
    cache = tmp_path / "cache"
    more = [f"--dataset_name={many}", "--preprocessing_workers=2"]
    command = [sys.executable, str(ROOT / "train_fp8.py"), *options, *more, f"--output_dir={tmp_path / 'run'}"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "HF_DATASETS_CACHE": str(cache)},
    )
    group = SimpleNamespace(is_alive=lambda: process.poll() is None)
    try:
        assert wait_until(lambda: len(list(cache.glob("llm_fp8/*/tmp*"))) == 2, group)  # both write
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        out, _ = process.communicate(timeout=60)  # the end of what all of them hold
        assert process.returncode == code, out
        assert "Traceback" not in out
    finally:
        for left in processes_of_group(process.pid):
            os.kill(left, signal.SIGKILL)


def test_kills_between_and_during_saves_lose_no_bit(tmp_path, options):
    """Every other kill comes while a checkpoint is being written, the others at random."""
    options = [*options, "--max_steps=30", "--save_every=1"]
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    train(*options, f"--output_dir={whole}")
    checkpoints = killed / "checkpoints"
    moments = random.Random(0)
    resume: list[str] = []
    num_during_a_save = 0
    for kill in range(4):
        before = (checkpoints / "latest").read_text() if resume else ""
        process = start_training(log, *options, f"--output_dir={killed}", *resume)
        # fmt: skip
        assert wait_until(
            lambda before=before: (checkpoints / "latest").exists() and (checkpoints / "latest").read_text() != before,
            process,
        ), log.read_text()
        if kill % 2:
            wait_until(lambda: any(checkpoints.glob(".tmp-step-*/*")), process, poll_s=0)
        else:
            time.sleep(moments.uniform(0.0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        assert exit_code(process) == -signal.SIGKILL, "it must have been killed, not have ended"
        num_during_a_save += any(checkpoints.glob(".tmp-step-*"))
        resume = ["--resume_from=latest"]
    assert num_during_a_save >= 1
    assert 2 < int((checkpoints / "latest").read_text().removeprefix("step-")) < 30
    assert train(*options, f"--output_dir={killed}", *resume) == 0
    assert_same_run(whole, killed, last_step=30)
    assert not any(checkpoints.glob(".*"))
    assert len(run_json(killed)["resumes"]) == 4


# ---- what a resume keeps, and what it refuses ----


def test_run_json_keeps_how_the_run_began(tmp_path, options, stop_after):
    stop_after(3)
    train(*options, f"--output_dir={tmp_path}")
    first = run_json(tmp_path)
    assert "resumes" not in first
    stop_after(5)
    train(*options, "--log_every=1", f"--output_dir={tmp_path}", "--resume_from=latest")
    train(*options, f"--output_dir={tmp_path}", "--resume_from=latest")
    now = run_json(tmp_path)
    resumes = now.pop("resumes")
    assert now == first
    assert [resume["resumed_after_step"] for resume in resumes] == [3, 5]
    assert [resume["config"]["run"]["log_every"] for resume in resumes] == [1, 10]
    assert all(resume["provenance"]["time_utc"] >= first["provenance"]["time_utc"] for resume in resumes)


def test_save_total_limit_holds_and_save_every_is_kept(tmp_path, options):
    seen = []
    save = TrainingLoop.require_finite_weights
    with pytest.MonkeyPatch.context() as patch:

        def remember(self):
            seen.append((self.step, sorted(path.name for path in (tmp_path / "checkpoints").glob("*-*"))))
            save(self)

        patch.setattr(TrainingLoop, "require_finite_weights", remember)
        train(*options, "--save_every=2", "--save_total_limit=3", f"--output_dir={tmp_path}")
    assert [step for step, _ in seen[:5]] == [2, 4, 6, 8, 10]
    assert [len(folders) for _, folders in seen[:5]] == [0, 1, 2, 3, 3]
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["latest", "step-00000006", "step-00000008", "step-00000010"]


def test_an_older_checkpoint_of_the_run_and_one_for_another_folder(tmp_path, options):
    whole, branch = tmp_path / "whole", tmp_path / "branch"
    train(*options, "--save_every=4", "--save_total_limit=9", f"--output_dir={whole}")
    before = {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()}
    older = whole / "checkpoints" / "step-00000004"
    assert train(*options, f"--resume_from={older}", f"--output_dir={branch}") == 0
    assert {path: path.read_bytes() for path in whole.rglob("*") if path.is_file()} == before, (
        "a branch leaves the run alone"
    )
    assert [step["step"] for step in steps(branch)] == list(range(5, NUM_STEPS + 1))
    assert [step["loss"] for step in steps(branch)] == [step["loss"] for step in steps(whole)][4:]
    assert run_json(branch)["resumed_after_step"] == 4

    expected = without_clock(whole)
    assert train(*options, f"--resume_from={older}", f"--output_dir={whole}") == 0
    assert without_clock(whole) == expected


@pytest.fixture
def stopped(tmp_path, options, stop_after) -> Path:
    """A run that stopped after three steps."""
    stop_after(3)
    folder = tmp_path / "stopped"
    train(*options, f"--output_dir={folder}")
    return folder


def edit_fingerprint(checkpoint: Path, **changes: object) -> None:
    """Write a checkpoint's fingerprint as a run with other settings would have."""
    path = checkpoint / "meta.json"
    content = json.loads(path.read_text())
    content["fingerprint"].update(changes)
    path.write_text(json.dumps(content))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["meta.json"] = {
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def assert_refused(folder: Path, options: list[str], *named: str) -> None:
    """Resuming with `options` is one sentence that names what differs, and touches nothing."""

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}

    before = contents()
    with pytest.raises(UserError) as error:
        train(*options, f"--output_dir={folder}", "--resume_from=latest")
    for name in named:
        assert name in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert contents() == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--mixed_precision=bf16"], ("precision was 'no' and is 'bf16'",)),
        (["--packing"], ("packing was False and is True",)),
        (["--max_seq_length=112"], ("max_seq_length was 128 and is 112",)),
        (["--num_of_samples=40"], ("other training data",)),
        (["--seed=1"], ("other training data",)),
        (["--validation_fraction=0.5"], ("other training data",)),
        (["--dataset_name=embedded"], ("other training data",)),
        (["--streaming"], ("other training data",)),
        (["--max_steps=2", "--allow_changed=total_steps"], ("3 steps behind it", "--max_steps")),
        (["--max_steps=12"], ("trained with other options: total_steps 10 -> 12.", "--allow_changed total_steps")),
        (["--batch_size=4"], ("global_batch_size 8 -> 4.", "--allow_changed global_batch_size")),
        (
            ["--learning_rate=0.5", "--lr_scheduler=linear", "--allow_changed=learning_rate"],
            ("options: lr_scheduler cosine -> linear. Resume", "add --allow_changed lr_scheduler"),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_checkpoint_of_another_run_is_refused(stopped, options, change, named):
    assert_refused(stopped, [*options, *change], *named)


def test_options_that_may_change_are_said_and_recorded(tmp_path, stopped, options, capsys):
    shutil.copytree(stopped, tmp_path / "run")
    change = [
        "--learning_rate=0.5",
        "--allow_changed=learning_rate",
        "--batch_size=4",
        "--gradient_accumulation_steps=2",
    ]
    resume = [*options, *change, f"--output_dir={tmp_path / 'run'}", "--resume_from=latest"]
    assert train(*resume) == 0
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "other options" in line)
    assert said == (
        "resuming with other options: batch_size 8 -> 4, learning_rate 0.01 -> 0.5, gradient_accumulation_steps 1 -> 2"
    )
    assert meta(tmp_path / "run", 10)["options"]["learning_rate"] == 0.5
    assert steps(tmp_path / "run")[3]["learning_rate"] > 0.1


@pytest.mark.parametrize(("batch_size", "num_steps"), [(2, 3 + 11), (16, 3 + 2)])
def test_epochs_are_counted_in_rows_where_another_global_batch_resumes(tmp_path, small_run, batch_size, num_steps):
    """22 of the 24 rows are short enough: an epoch has three steps of 8, the second one 11 of 2 or two of 16."""
    asked = [*small_run, "--num_of_samples=24", "--validation_fraction=0", "--num_epochs=2", "--save_every=3"]
    assert train(*asked, "--batch_size=8", "--save_total_limit=9", f"--output_dir={tmp_path / 'first'}") == 0
    resumed = tmp_path / "resumed"
    change = [f"--batch_size={batch_size}", "--allow_changed=global_batch_size,total_steps"]
    first = tmp_path / "first" / "checkpoints" / "step-00000003"
    assert train(*asked, *change, f"--resume_from={first}", f"--output_dir={resumed}") == 0
    assert (steps(resumed)[-1]["step"], steps(resumed)[-1]["epoch"]) == (num_steps, 2.0)
    latest = [*asked, *change, f"--output_dir={resumed}", "--resume_from=latest"]
    with pytest.raises(UserError, match=f"is finished, after {num_steps} steps"):
        train(*latest)
    assert train(*latest, "--num_epochs=3") == 0
    assert steps(resumed)[-1]["epoch"] == 3.0


def test_a_put_off_evaluation_is_recorded_once_however_often_it_is_taken(tmp_path, options, stop_after, monkeypatch):
    asked = [*options, "--eval_every=3", f"--output_dir={tmp_path}"]
    stop_after(3)
    assert train(*asked) == 143 and not any("eval_loss" in record for record in records(tmp_path))

    def killed(self, batches, start):
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "take_step", killed)
        with pytest.raises(RuntimeError, match="killed"):
            train(*asked, "--resume_from=latest")
    assert train(*asked, "--resume_from=latest") == 0
    assert [record["step"] for record in records(tmp_path) if "eval_loss" in record] == [3, 6, 9, 10]


def test_adapters_do_not_continue_on_another_models_weights(tmp_path, rows):
    """Exported models are all called final."""
    models = [Path(write_model(tmp_path / name / "final")) for name in ("a", "b", "moved")]
    weights = models[1] / "model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    options = [f"--dataset_name={rows}", "--max_seq_length=128", "--lora_rank=2", "--save_every=1", "--max_steps=2"]
    run = f"--output_dir={tmp_path / 'run'}"
    train(*options, f"--model_name={models[0]}", run)
    first = f"--resume_from={tmp_path / 'run' / 'checkpoints' / 'step-00000001'}"
    with pytest.raises(UserError, match="does not belong to this run: frozen_weights was"):
        train(*options, f"--model_name={models[1]}", run, first)
    assert train(*options, f"--model_name={models[2]}", run, first) == 0


def test_a_checkpoint_of_another_model_is_refused(tmp_path, stopped, options):
    model = write_model(tmp_path / "other", num_hidden_layers=3, tie_word_embeddings=True)
    change = [*options, f"--model_name={model}"]
    assert_refused(stopped, change, "num_hidden_layers was 2 and is 3", "tie_word_embeddings was False and is True")


def test_a_checkpoint_of_another_optimizer_is_refused(stopped, options):
    edit_fingerprint(stopped / "checkpoints" / "step-00000003", optimizer="adamw_8bit")
    assert_refused(stopped, options, "optimizer was 'adamw_8bit' and is 'adamw_fp32'")


def test_a_finished_run_is_not_resumed_and_can_be_made_longer(tmp_path, options):
    train(*options, f"--output_dir={tmp_path}")
    assert_refused(tmp_path, options, "is finished, after 10 steps", "--max_steps", "--num_epochs")
    longer = ["--max_steps=12", "--allow_changed=total_steps"]
    assert train(*options, *longer, f"--output_dir={tmp_path}", "--resume_from=latest") == 0
    assert [step["step"] for step in steps(tmp_path)] == list(range(1, 13))


def test_a_longer_run_without_export_says_that_what_is_there_is_older(tmp_path, options, capsys):
    train(*options, f"--output_dir={tmp_path}")
    assert "earlier end" not in capsys.readouterr().out
    before = (tmp_path / "final" / "model.safetensors").read_bytes()
    longer = ["--max_steps=12", "--allow_changed=total_steps", "--no_export"]
    assert train(*options, *longer, f"--output_dir={tmp_path}", "--resume_from=latest") == 0
    assert f"{tmp_path / 'final'} is of an earlier end of this run: --no_export left it" in capsys.readouterr().out
    assert (tmp_path / "final" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("older", ["--save_minutes=0.0001", "--keep_best"])
def test_a_finished_run_whose_checkpoint_is_older_than_its_end(tmp_path, options, tell_eval_losses, older):
    """It does not repeat its last steps, nor change what it left."""
    tell_eval_losses(dict(zip(range(1, 13), range(12), strict=True)))
    asked = [*options, "--save_every=0", "--eval_every=4", "--log_every=4", older, f"--output_dir={tmp_path}"]
    train(*asked)
    newest = (tmp_path / "checkpoints" / "latest").read_text()
    assert int(newest.removeprefix("step-")) < 10
    left = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "summary.json", "run.json")}
    with pytest.raises(UserError, match="--resume_from latest: the run in .* is finished, after 10 steps; to train on"):
        train(*asked, "--resume_from=latest")
    assert left == {name: (tmp_path / name).read_bytes() for name in left}
    # Whoever names a checkpoint wants to go back to it.
    path = tmp_path / "checkpoints" / newest.strip()
    assert train(*asked, f"--resume_from={path}") == 0
    assert [step["step"] for step in steps(tmp_path)] == list(range(1, 11))


def test_a_folder_without_a_checkpoint(tmp_path, options):
    train(*options, "--save_every=0", f"--output_dir={tmp_path}")
    assert_refused(tmp_path, options, "--resume_from latest", "no complete checkpoint")


@pytest.mark.parametrize("found", [name for name in WRITTEN if name != "run.json"])
def test_a_folder_with_files_of_somebody_else_is_refused_and_kept(tmp_path, options, found):
    path = tmp_path / "run" / found
    path.mkdir(parents=True) if "." not in found else _write(path)
    (tmp_path / "run" / "slurm-1.out").touch()
    with pytest.raises(UserError, match=rf"holds files of another run or program \({found}\)"):
        train(*options, f"--output_dir={tmp_path / 'run'}")
    assert path.exists() and sorted(each.name for each in path.parent.iterdir()) == sorted([found, "slurm-1.out"])
    path.rmdir() if path.is_dir() else path.unlink()
    assert train(*options, "--max_steps=1", f"--output_dir={tmp_path / 'run'}") == 0


def _write(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")


def test_two_runs_never_share_a_folder(tmp_path, stopped, options):
    """The same command twice, and two that resume the same run."""
    for folder, more in ((tmp_path / "new", []), (stopped, ["--resume_from=latest"])):
        folder.mkdir(exist_ok=True)
        with open(folder / LOCK, "a") as held:
            held.truncate(0)
            held.write("process 7 on a-host")
            held.flush()
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(UserError, match=f"--output_dir {folder} is in use by process 7 on a-host; wait"):
                train(*options, f"--output_dir={folder}", *more)
        assert train(*options, f"--output_dir={folder}", *more) == 0


def test_what_a_killed_run_left_half_written_is_removed(stopped, options):
    for name in (".final.123.tmp", ".run.json.123.tmp", ".mine.tmp", "a.7.tmp"):
        _write(stopped / name) if name != ".final.123.tmp" else (stopped / name).mkdir()
    (stopped / ".final.123.tmp" / "model.safetensors").touch()
    assert train(*options, f"--output_dir={stopped}", "--resume_from=latest") == 0
    assert sorted(path.name for path in stopped.glob("*.tmp")) == [".mine.tmp", "a.7.tmp"]


def test_a_run_that_began_while_another_was_being_set_up_is_kept(tmp_path, options, monkeypatch):
    folder = tmp_path / "run"
    build = run.build_setup
    monkeypatch.setattr(run, "build_setup", lambda plan: (_write(folder / "run.json"), build(plan))[1])
    with pytest.raises(UserError, match="holds another run"):
        train(*options, f"--output_dir={folder}")
    assert (folder / "run.json").read_text() == "mine"


def test_the_checkpoint_of_one_run_does_not_overwrite_another(tmp_path, stopped, options):
    other = tmp_path / "other"
    train(*options, "--max_steps=1", f"--output_dir={other}")
    before = (other / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="holds another run"):
        train(*options, f"--resume_from={stopped / 'checkpoints' / 'step-00000003'}", f"--output_dir={other}")
    assert (other / "metrics.jsonl").read_text() == before


def test_the_rates_of_a_resumed_run_follow_the_whole_schedule(tmp_path, options, stop_after):
    stop_after(3)
    train(*options, "--lr_scheduler=linear", f"--output_dir={tmp_path}")
    train(*options, "--lr_scheduler=linear", f"--output_dir={tmp_path}", "--resume_from=latest")
    rates = [step["learning_rate"] for step in steps(tmp_path)]
    assert rates == pytest.approx([1e-2, *[1e-2 * (1 - i / 9) for i in range(9)]])


@pytest.mark.parametrize(
    ("was", "now", "remedy"),
    [
        ("deepspeed_2", "deepspeed_1", "resume with --sharding_mode deepspeed_2."),
        ("deepspeed_2", "parameter name", "resume with --sharding_mode deepspeed_2."),
        ("parameter name", "deepspeed_3", "resume with --sharding_mode ddp or an fsdp mode."),
    ],
)
def test_a_checkpoint_that_the_mode_cannot_read_is_refused_with_one_that_can(tmp_path, monkeypatch, was, now, remedy):
    monkeypatch.setattr(run_state, "read_meta", lambda path: {"fingerprint": {"saved_by": was}})
    checkpoints = SimpleNamespace(find=lambda name: tmp_path / name)
    with pytest.raises(UserError) as error:
        run_state.find_checkpoint(checkpoints, "latest", {"saved_by": now})
    assert str(error.value).startswith(f"--resume_from: {tmp_path / 'latest'} was saved under --sharding_mode ")
    assert str(error.value).endswith(remedy)
    assert run_state.find_checkpoint(checkpoints, "latest", {"saved_by": was}) == tmp_path / "latest"
