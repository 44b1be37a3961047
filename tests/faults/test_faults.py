"""A run that is killed, or whose disk fills up, and is then resumed has the same results as an undisturbed run."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_fp8.data import tokenise
from tests.support.processes import exit_code, start_training, wait_until
from tests.support.small import records, steps, train

pytestmark = pytest.mark.slow

CLOCK = ("time_s", "per_s", "per_s_per_gpu", "tflops")
SCENARIOS = {
    "packed": ["--packing", "--max_seq_length=256", "--batch_size=4", "--mixed_precision=bf16"],
    "lora": ["--lora_rank=4", "--lora_dropout=0.1", "--gradient_accumulation_steps=2"],
}


def run_options(model: str, rows: str, scenario: str, folder: Path) -> list[str]:
    """Return the options of a twelve-step run that saves and evaluates often. `scenario` is a key of `SCENARIOS`."""
    shared = [f"--model_name={model}", f"--dataset_name={rows}", "--max_seq_length=128", "--batch_size=8"]
    lengths = ["--max_steps=12", "--save_every=2", "--eval_every=5", "--log_every=1", "--learning_rate=1e-2"]
    return [*shared, *lengths, *SCENARIOS[scenario], f"--output_dir={folder}"]


def outcome(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a run's metrics, except those that depend on the clock, and the hashes of its exported weights."""
    metrics = [{k: v for k, v in record.items() if not k.endswith(CLOCK)} for record in records(folder)]
    weights = sorted(folder.glob("final/*.safetensors"))
    assert weights
    return metrics, [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_model, rows) -> Callable[[str], Any]:
    """Return a function that trains a scenario, given by name, without a fault, and returns the run's `outcome`."""

    @functools.cache
    def train_scenario(scenario: str) -> Any:
        folder = tmp_path_factory.mktemp("whole") / "run"
        assert train(*run_options(tiny_model, rows, scenario, folder)) == 0
        return outcome(folder)

    return train_scenario


def num_steps(folder: Path) -> int:
    return len(steps(folder)) if (folder / "metrics.jsonl").exists() else 0


def _is_saving_again(folder: Path) -> bool:
    return any(folder.glob("checkpoints/step-*")) and any(folder.glob("checkpoints/.tmp-*"))


MOMENTS: dict[str, tuple[str, Callable[[Path], bool]]] = {
    "before the first checkpoint": ("packed", lambda folder: num_steps(folder) > 0),
    "during a save": ("packed", lambda folder: _is_saving_again(folder)),
    "between saves": ("lora", lambda folder: num_steps(folder) > 6),
}
"""Name -> scenario and condition for the kill. Tests of signals are in tests/run: test_stop.py and test_resume.py."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_run_resumes_to_the_same_results(undisturbed, moment, tmp_path, tiny_model, rows):
    scenario, is_time = MOMENTS[moment]
    folder, log = tmp_path / "run", tmp_path / "log"
    options = run_options(tiny_model, rows, scenario, folder)
    process = start_training(log, *options)
    if wait_until(lambda: is_time(folder), process, poll_s=0.005):
        os.kill(process.pid, signal.SIGKILL)
    assert exit_code(process) in (-signal.SIGKILL, 0), log.read_text()  # 0: it had ended before the signal
    if process.exitcode:
        has_saved = any(folder.glob("checkpoints/step-*"))
        assert train(*options, *(["--resume_from=latest"] if has_saved else [])) == 0  # else it restarts
    assert outcome(folder) == undisturbed(scenario)


def _tokenise_with_fault(fault: signal.Signals) -> None:
    """Make a tokenising worker kill itself if `fault` is SIGKILL. Any other `fault` goes to the main process."""

    def fail(*_: Any) -> None:
        os.kill(os.getpid() if fault == signal.SIGKILL else os.getppid(), fault)
        time.sleep(60)

    tokenise.cores_of_job, tokenise.ROWS_PER_WORKER, tokenise.encode_batch = lambda: 2, 1, fail


@pytest.mark.parametrize(("fault", "code"), [(signal.SIGKILL, 2), (signal.SIGINT, 130)])
def test_fault_in_tokenising_worker_is_not_reported_as_bad_data(tmp_path, tiny_model, rows, fault, code):
    log, options = tmp_path / "log", run_options(tiny_model, rows, "packed", tmp_path / "run")
    process = start_training(
        log, *options, "--max_seq_length=120", first=functools.partial(_tokenise_with_fault, fault)
    )
    assert exit_code(process) == code, log.read_text()
    assert rows not in log.read_text() and len(log.read_text().splitlines()) == 1 and not (tmp_path / "run").exists()


def test_full_disk_is_reported_in_one_line_and_run_resumes(undisturbed, small_disk, tmp_path, tiny_model, rows):
    log, options = tmp_path / "log", run_options(tiny_model, rows, "packed", small_disk / "run")
    subprocess.run(["mount", "-o", "remount,size=500k", str(small_disk)], check=True)
    assert exit_code(start_training(log, *options)) == 2
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in log.read_text()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert train(*options, "--resume_from=latest") == 0
    assert outcome(small_disk / "run") == undisturbed("packed")
