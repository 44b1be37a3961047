"""Run train_fp8.py on a GPU as a user does, in a process of its own, and read what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.documented_metrics import records

ROOT = Path(__file__).resolve().parents[2]
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
PRECISIONS = {
    "bf16": ["--mixed_precision", "bf16"],
    "delayed": ["--mixed_precision", "fp8", "--fp8_scenario", "delayed"],
    "current": ["--mixed_precision", "fp8", "--fp8_scenario", "current"],
    "backward": ["--mixed_precision", "fp8", "--fp8_scenario", "backward"],
    "block": ["--mixed_precision", "fp8", "--fp8_scenario", "block"],
    "8 bit": ["--mixed_precision", "fp8", "--optimizer", "adamw_8bit"],
}


def train(
    *options: str, environment: dict[str, str] | None = None, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    """Run train_fp8.py by Python or, if given, by the command `launcher`. `environment` has additional variables.
    Return the finished process with its output.
    """
    command = [*(launcher or (sys.executable,)), "train_fp8.py", *options]
    variables = {**os.environ, **(environment or {})}
    variables.pop("NVIDIA_TF32_OVERRIDE", None)
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)


def train_patched(patch: str, *options: str) -> subprocess.CompletedProcess:
    """Run the Python statements `patch` and then, in the same process, train_fp8.py. Return the finished process."""
    program = f"""
import sys
{patch}
from llm_fp8.config.parser import parse_config
from llm_fp8.run.run import run_training
from llm_fp8.tools.script import run_script
run_script(lambda: run_training(parse_config(sys.argv[1:])))
"""
    command = [sys.executable, "-c", program, *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def training_options(model_folder: Path, folder: Path, *more: str) -> list[str]:
    """Return the options of a short run of the TE decoder, followed by `more`. The run writes to `folder`."""
    options = f"--model_name={model_folder} --output_dir={folder} --use_te --max_seq_length=256 --batch_size=8"
    options += (
        " --learning_rate=1e-3 --gradient_accumulation_steps=2 --no_merge_micro_batches --log_every=1 --eval_batches=2"
    )
    return [*options.split(), *more]


def run_successfully(model_folder: Path, folder: Path, *more: str, environment: dict[str, str] | None = None) -> str:
    """Train with `training_options`, check that the run succeeds, and return the text that it printed to stdout."""
    process = train(*training_options(model_folder, folder, *more), environment=environment)
    assert process.returncode == 0, process.stderr
    return str(process.stdout)


def metric_values(folder: Path, name: str) -> list[float]:
    """Return all values of the metric `name` in a run folder's metrics.jsonl, in order."""
    return [record[name] for record in records(folder) if name in record]


def losses(folder: Path) -> list[float]:
    return metric_values(folder, "loss")


def certificate_of(folder: Path) -> dict:
    return json.loads((folder / "certificate.json").read_text())
