"""The commands of the README, and of the guide with which this project began, run with their real shapes. Two commands
with the same options run once.

The tests add options for random weights, three steps and no export, and replace the dataset by a folder with the same
columns. W&B is offline, or dropped if it is not installed. The guide's Qwen2.5-14B gets a smaller optimizer and
recomputation, to fit into a GPU of 141 GB.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llm_fp8.tools.programs import torchrun
from tests.support.documented_commands import (
    ONE_GPU_COMMANDS,
    TESTED_COMMANDS,
    TWO_GPU_COMMAND,
    config_of,
    options_of,
    write_dataset,
)
from tests.support.small import run_json, steps, summary_json

pytestmark = [pytest.mark.gpu, pytest.mark.exclusive]

ROOT = Path(__file__).resolve().parents[2]
ADDED = ["--random_init", "--max_steps", "3", "--eval_batches", "1", "--no_export", "--log_every", "1"]
ADDED_FOR = {"qwen_14b": ["--optimizer", "adamw_8bit", "--gradient_checkpointing"]}
NEEDED_GIB = {"meta-llama/Meta-Llama-3.1-8B": 130.0, "Qwen/Qwen2.5-14B": 130.0}
"""GPU memory that the commands of a model need. The other models are small."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Write and return a folder with rows like those of nvidia/OpenMathInstruct-2."""
    return write_dataset(tmp_path_factory.mktemp("dataset"))


def changed_options(name: str, dataset: Path, folder: Path) -> list[str]:
    """Return the options of the documented command `name`, with the changes that this file's docstring describes."""
    options = [*options_of(TESTED_COMMANDS[name]), f"--dataset_name={dataset}"]
    if importlib.util.find_spec("wandb") is None and "--use_wandb" in options:
        options.remove("--use_wandb")
    return [*options, *ADDED, *ADDED_FOR.get(name, []), "--output_dir", str(folder)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository, as a user does."""
    variables = {**os.environ, "WANDB_MODE": "offline"}
    variables.pop("NVIDIA_TF32_OVERRIDE", None)
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=580)


def check(name: str, process: subprocess.CompletedProcess[str], folder: Path, record_property) -> None:
    """Check that the command `name` took three steps, and that the kernels ran in the requested precision."""
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    precision, summary, records = run_json(folder)["precision"], summary_json(folder), steps(folder)
    requested = config_of(TESTED_COMMANDS[name]).precision
    assert precision["requested"] == precision["effective"] == requested.mixed_precision
    assert summary["certificate"]["verdict"] == "certified", summary["certificate"]
    assert [step["step"] for step in records] == [1, 2, 3] and all(step["loss"] > 0 for step in records)
    kernels = summary["recorded_step"]["gemm_kernels"]
    assert ("fp8" in kernels) == (requested.mixed_precision == "fp8"), kernels
    if requested.fp8_scenario == "mxfp8" and precision["fallback_reason"] is not None:
        assert "FELL BACK to delayed" in process.stdout
        assert (precision["requested_scenario"], precision["effective_scenario"]) == ("mxfp8", "delayed")
    record_property("gemm_kernels", kernels)
    record_property("peak_memory_gib", max(step["peak_memory_gib"] for step in records))
    record_property("tokens_per_s_of_steps", [step["tokens_per_s"] for step in records])


@pytest.mark.parametrize("name", ONE_GPU_COMMANDS)
def test_documented_command_trains_in_its_precision(name, dataset, tmp_path, record_property):
    needed = NEEDED_GIB.get(config_of(TESTED_COMMANDS[name]).model.model_name, 0.0)
    if torch.cuda.get_device_properties(0).total_memory / 2**30 < needed:
        pytest.skip(f"needs a GPU of {needed:.0f} GiB")
    process = run([sys.executable, "train_fp8.py", *changed_options(name, dataset, tmp_path / "run")])
    check(name, process, tmp_path / "run", record_property)


def test_missing_split_is_refused_in_one_sentence(dataset, tmp_path):
    """The command asks for the split "test". Neither the documented dataset nor the folder that replaces it has one."""
    process = run([sys.executable, "train_fp8.py", *changed_options("split_test", dataset, tmp_path / "run")])
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert process.stderr.splitlines()[-1].startswith("error: --split_name test:")


@pytest.mark.multi_gpu
def test_documented_command_trains_on_two_gpus(dataset, tmp_path, record_property):
    assert "--nproc_per_node=2" in TESTED_COMMANDS[TWO_GPU_COMMAND]
    process = run(torchrun(2, "train_multi_gpu.py", *changed_options(TWO_GPU_COMMAND, dataset, tmp_path / "run")))
    check(TWO_GPU_COMMAND, process, tmp_path / "run", record_property)
    assert summary_json(tmp_path / "run")["sharding_mode"] == "fsdp_full"
