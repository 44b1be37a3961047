"""train_fp8.py as a user runs it, on a GPU: its options and the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.documented_metrics import records

ROOT = Path(__file__).resolve().parents[2]


def train(
    *options: str, environment: dict[str, str] | None = None, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess:
    """Run train_fp8.py; returns the finished process with its output."""
    command = [*(launcher or (sys.executable,)), "train_fp8.py", *options]
    variables = {**os.environ, **(environment or {})}
    variables.pop("NVIDIA_TF32_OVERRIDE", None)
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)


def train_patched(patch: str, *options: str) -> subprocess.CompletedProcess:
    """The work of train_fp8.py after the statements `patch`, which break something; the process with its output."""
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


def common(model_folder: Path, folder: Path, *more: str) -> list[str]:
    """The options of a short run with Transformer Engine's layers."""
    words = f"--model_name={model_folder} --output_dir={folder} --use_te --max_seq_length=256 --batch_size=8"
    words += (
        " --learning_rate=1e-3 --gradient_accumulation_steps=2 --no_merge_micro_batches --log_every=1 --eval_batches=2"
    )
    return [*words.split(), *more]


def trained(model_folder: Path, folder: Path, *more: str, environment: dict[str, str] | None = None) -> str:
    """What a run with these options besides the `common` ones prints; it has to end well."""
    done = train(*common(model_folder, folder, *more), environment=environment)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def figures(folder: Path, name: str) -> list[float]:
    """The metric `name` of the steps or evaluations that have it."""
    return [record[name] for record in records(folder) if name in record]


def losses(folder: Path) -> list[float]:
    return figures(folder, "loss")


def certificate_of(folder: Path) -> dict:
    return json.loads((folder / "certificate.json").read_text())
