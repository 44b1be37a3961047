"""`accelerate launch` with the project's configuration files gives the run that the options give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llm_fp8.utils.json_files import read_jsonl
from tests.support.multi_gpu_training import MICRO_BATCHES, NUM_STEPS, PRECISIONS, ROWS, train

pytestmark = pytest.mark.multi_gpu

REPOSITORY = Path(__file__).resolve().parents[2]
MODES = {"ddp": "ddp", "fsdp": "fsdp_full"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_accelerate_launch_gives_the_same_run(precision, mode, models, tmp_path, record_property):
    model = models["llama3_rope_gqa"]
    options = PRECISIONS["delayed" if precision == "fp8" else "bf16"]
    expected, told, _ = train(2, tmp_path / "options", model, *options, "--use_te", f"--sharding_mode={MODES[mode]}")
    folder = tmp_path / "launched"
    launch = [
        sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2", "--main_process_port=0",
        f"--config_file={REPOSITORY / 'configs' / f'accelerate_{precision}_{mode}.yaml'}"
    ]  # fmt: skip
    training = [
        str(REPOSITORY / "train_multi_gpu.py"),
        f"--model_name={model}",
        "--use_te",
        "--max_seq_length=256",
        f"--batch_size={ROWS[2]}",
        "--learning_rate=1e-4",
        f"--gradient_accumulation_steps={MICRO_BATCHES}",
        "--no_merge_micro_batches",
        "--log_every=1",
        "--validation_fraction=0",
        f"--max_steps={NUM_STEPS}",
        f"--output_dir={folder}",
    ]
    result = subprocess.run([*launch, *training], capture_output=True, text=True, timeout=240, env=dict(os.environ))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    taken = read_jsonl(folder / "metrics.jsonl")
    losses = [record["loss"] for record in taken if "loss" in record]
    record_property("loss", losses)
    # Gradients of attention are not bitwise reproducible.
    assert losses == pytest.approx([record["loss"] for record in expected], rel=1e-3)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["sharding_mode"] == told["sharding_mode"] == MODES[mode]
    assert summary["precision"]["recipe"] == told["precision"]["recipe"]
    assert summary["recorded_step"]["gemm_kernels"] == told["recorded_step"]["gemm_kernels"]
    assert ("fp8" in summary["recorded_step"]["gemm_kernels"]) == (precision == "fp8")
