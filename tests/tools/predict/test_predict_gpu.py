"""A real run beside its prediction, and a GPU that is measured because it is not known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.prediction_records import bundled_size
from llm_fp8.tools.gemm_rates import known_rates
from llm_fp8.tools.predict import prediction
from llm_fp8.tools.predict.calibration import CALIBRATED_GPU
from llm_fp8.tools.predict.workload import StepWorkload

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.exclusive
@pytest.mark.parametrize(
    "precision", [["bf16"], ["fp8"], ["fp8", "--fp8_scenario", "current"]], ids=["bf16", "delayed", "current"]
)
def test_a_run_says_what_was_predicted_for_it(tmp_path, precision, record_property):
    if torch.cuda.get_device_name() != CALIBRATED_GPU:
        pytest.skip(f"the constants are those of {CALIBRATED_GPU}")
    done = subprocess.run(
        [
            sys.executable,
            "train_fp8.py",
            "--model_name",
            "Llama-3.2-1B",
            "--random_init",
            "--use_te",
            "--mixed_precision",
            *precision,
            "--batch_size",
            "8",
            "--max_seq_length",
            "1024",
            "--gradient_accumulation_steps",
            "2",
            "--max_steps",
            "16",
            "--num_epochs",
            "50",
            "--eval_batches",
            "1",
            "--no_export",
            "--output_dir",
            str(tmp_path / "run"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["prediction"]
    record_property("prediction", found)
    assert "s a step, took" in done.stdout
    assert found["micro_batch_tokens"] == 8192 and 1 < found["mean_length"] < 1024  # packed problems
    # Short documents and two micro-batches lie outside the records that the constants come from.
    assert abs(found["step_time_error"]) < 0.15, found
    assert abs(found["peak_memory_error"]) < 0.05, found


@pytest.mark.exclusive
def test_a_gpu_that_is_not_known_is_measured(monkeypatch):
    if torch.cuda.get_device_name() != CALIBRATED_GPU or known_rates(CALIBRATED_GPU) is None:
        pytest.skip(f"needs {CALIBRATED_GPU} with recorded ceilings, so that the answer is known")
    expected = prediction.gpu_by_name(None)
    monkeypatch.setattr(prediction, "known_gpu", lambda name: None)
    measured = prediction.gpu_by_name(None)
    for recipe in ("bf16", "delayed"):
        scenario = StepWorkload(bundled_size("Llama-3.1-8B"), recipe, 8192, 4, 1024)
        apart = prediction.predict(scenario, measured).step_time_s / prediction.predict(scenario, expected).step_time_s
        assert 0.9 < apart < 1.1, "the same kind of GPU, measured anew"
