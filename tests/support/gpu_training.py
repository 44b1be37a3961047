"""train_fp8.py as a user runs it, on a GPU: its options and the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from llm_fp8.utils.json_files import read_metrics

ROOT = Path(__file__).resolve().parents[2]


def train(
    *options: str, environment: dict[str, str] | None = None, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    """Run train_fp8.py; returns the finished process with its output."""
    command = [*(launcher or (sys.executable,)), "train_fp8.py", *options]
    variables = {name: value for name, value in os.environ.items() if name != "NVIDIA_TF32_OVERRIDE"} | (
        environment or {}
    )
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)


def common(model_folder: Path, folder: Path, *more: str) -> list[str]:
    return [
        "--model_name",
        str(model_folder),
        "--use_te",
        "--max_seq_length",
        "256",
        "--batch_size",
        "8",
        "--learning_rate",
        "1e-3",
        "--gradient_accumulation_steps",
        "2",
        "--log_every",
        "1",
        "--eval_batches",
        "2",
        "--output_dir",
        str(folder),
        *more,
    ]


def figures(folder: Path, name: str) -> list[float]:
    """The metric `name` of the steps or evaluations that have it."""
    return [record[name] for record in read_metrics(folder / "metrics.jsonl") if name in record]


def losses(folder: Path) -> list[float]:
    return figures(folder, "loss")


def certificate_of(folder: Path) -> dict:
    return json.loads((folder / "certificate.json").read_text())
