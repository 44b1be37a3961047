"""The commands of the guide that the training scripts started from and the README's, as they stand, at their real
shapes: random weights, a few steps, no hub. A command of the README that means what one of the guide means runs once.

What is added: --random_init, three steps, no export. What is replaced: the dataset by a folder of its form. W&B is
offline, or dropped where it is not installed. The guide's Qwen2.5-14B takes an optimizer that one GPU of 141 GB has
room for, and recomputes its layers.
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
"""Memory of a GPU that the commands of a model are meant for; the others are smaller."""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """A folder in place of nvidia/OpenMathInstruct-2."""
    return write_dataset(tmp_path_factory.mktemp("dataset"))


def words_of(name: str, dataset: Path, folder: Path) -> list[str]:
    """The options of a command with what is added and replaced."""
    words = [*options_of(TESTED_COMMANDS[name]), f"--dataset_name={dataset}"]
    if importlib.util.find_spec("wandb") is None and "--use_wandb" in words:
        words.remove("--use_wandb")
    return [*words, *ADDED, *ADDED_FOR.get(name, []), "--output_dir", str(folder)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """The command from the repository, as a user gives it."""
    variables = {**os.environ, "WANDB_MODE": "offline"}
    variables.pop("NVIDIA_TF32_OVERRIDE", None)
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=580)


def check(name: str, done: subprocess.CompletedProcess[str], folder: Path, record_property) -> None:
    """It trained in the precision that was asked for, and the kernels show it."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    precision, summary, taken = run_json(folder)["precision"], summary_json(folder), steps(folder)
    asked = config_of(TESTED_COMMANDS[name]).precision
    assert precision["requested"] == precision["effective"] == asked.mixed_precision
    assert summary["certificate"]["verdict"] == "certified", summary["certificate"]
    assert [step["step"] for step in taken] == [1, 2, 3] and all(step["loss"] > 0 for step in taken)
    kernels = summary["recorded_step"]["gemm_kernels"]
    assert ("fp8" in kernels) == (asked.mixed_precision == "fp8"), kernels
    if asked.fp8_scenario == "mxfp8" and precision["fallback_reason"] is not None:
        assert "FELL BACK to delayed" in done.stdout
        assert (precision["requested_scenario"], precision["effective_scenario"]) == ("mxfp8", "delayed")
    record_property("gemm_kernels", kernels)
    record_property("peak_memory_gib", max(step["peak_memory_gib"] for step in taken))
    record_property("tokens_per_s_of_steps", [step["tokens_per_s"] for step in taken])


@pytest.mark.parametrize("name", ONE_GPU_COMMANDS)
def test_a_documented_command_trains_in_what_it_asks_for(name, dataset, tmp_path, record_property):
    needed = NEEDED_GIB.get(config_of(TESTED_COMMANDS[name]).model.model_name, 0.0)
    if torch.cuda.get_device_properties(0).total_memory / 2**30 < needed:
        pytest.skip(f"needs a GPU of {needed:.0f} GiB")
    words = words_of(name, dataset, tmp_path / "run")
    done = run([sys.executable, "train_fp8.py", *words])
    check(name, done, tmp_path / "run", record_property)


def test_a_split_that_is_not_there_is_one_sentence(dataset, tmp_path):
    """The dataset has no split of this name on the hub either."""
    done = run([sys.executable, "train_fp8.py", *words_of("split_test", dataset, tmp_path / "run")])
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: --split_name test:")


@pytest.mark.multi_gpu
def test_the_documented_command_on_two_gpus(dataset, tmp_path, record_property):
    assert "--nproc_per_node=2" in TESTED_COMMANDS[TWO_GPU_COMMAND]
    done = run(torchrun(2, "train_multi_gpu.py", *words_of(TWO_GPU_COMMAND, dataset, tmp_path / "run")))
    check(TWO_GPU_COMMAND, done, tmp_path / "run", record_property)
    assert summary_json(tmp_path / "run")["sharding_mode"] == "fsdp_full"
