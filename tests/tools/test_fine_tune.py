"""`llm_fp8.fine_tune`: several runs in one process, exceptions instead of exits, and the example notebook."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from accelerate import Accelerator

from llm_fp8 import UserError, fine_tune
from llm_fp8.run.timeline import Timeline
from llm_fp8.step.loss_model import TrainingModel
from tests.support.small import run_json, steps, summary_json

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def options(tiny_model, rows) -> dict[str, object]:
    return dict(model_name=tiny_model, dataset_name=rows, max_seq_length=128, max_steps=3, log_every=1)


def test_two_runs_in_one_process_are_equal_and_leave_no_settings(options, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as under accelerate launch, for both runs
    accelerator, argv = Accelerator(cpu=True, mixed_precision="bf16"), sys.argv
    first = fine_tune(**options, output_dir=tmp_path / "first")
    with ThreadPoolExecutor() as threads:  # in which Python does not allow signal handlers
        second = threads.submit(fine_tune, **options, output_dir=tmp_path / "second").result()
    assert first["precision"]["effective"] == second["precision"]["effective"] == "bf16"
    assert [step["loss"] for step in steps(tmp_path / "first")] == [step["loss"] for step in steps(tmp_path / "second")]
    assert json.loads(json.dumps(second)) == summary_json(tmp_path / "second")
    assert run_json(tmp_path / "second")["provenance"]["command"][0] == "train_fp8.py"
    assert sys.argv is argv and accelerator.mixed_precision == "bf16"


def test_invalid_options_raise_user_errors(options, tmp_path):
    code = "import sys, llm_fp8\ntry: llm_fp8.fine_tune(learning_rte=1)\n"
    code += "except llm_fp8.UserError as error: print('torch' in sys.modules, error)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("False ") and "--learning_rate?" in done.stdout, done.stderr
    with pytest.raises(UserError, match="--lora_targets w_proj"):
        fine_tune(**options, output_dir=tmp_path / "run", lora_rank=4, lora_targets=["q_proj", "w_proj"])


def live_training_models() -> list[TrainingModel]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is TrainingModel]


def test_failed_run_releases_its_model(options, tmp_path):
    others = live_training_models()  # left over from earlier tests of this process
    with pytest.raises(UserError, match="--learning_rate") as failure:
        fine_tune(**options, output_dir=tmp_path / "run", learning_rate=1e20, lr_scheduler="constant")
    assert failure.tb is not None and all(any(each is other for other in others) for each in live_training_models())


def test_keyboard_interrupt_is_raised_after_a_checkpoint_is_saved(options, tmp_path, monkeypatch):
    def take_step(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    original = Timeline.take_step
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Timeline, "take_step", take_step)
        fine_tune(**options, output_dir=tmp_path)
    assert summary_json(tmp_path)["stopped_by"] == "SIGINT"
    assert fine_tune(**options, output_dir=tmp_path, resume_from="latest")["steps"] == 3


def test_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names: dict[str, object] = {}
    for cell in json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]).replace("max_steps=20", "max_steps=4, num_of_samples=100"), names)
    bf16, fp8 = names["bf16"], names["fp8"]
    assert (bf16["precision"]["effective"], fp8["precision"]["effective"]) == ("bf16", "fp8")
    assert fp8["last_step"]["loss"] == pytest.approx(bf16["last_step"]["loss"], rel=0.1)
