"""Runs that are killed, stopped or out of disk end cleanly, go on, and come to the end of a run that was left alone."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import exit_code, start_training, wait_until
from tests.support.small import records, steps, train

pytestmark = pytest.mark.slow

CLOCK = ("time_s", "per_s", "per_s_per_gpu", "tflops")
SCENARIOS = {
    "packed": ["--packing", "--max_seq_length=256", "--batch_size=4", "--mixed_precision=bf16"],
    "lora": ["--lora_rank=4", "--lora_dropout=0.1", "--gradient_accumulation_steps=2"],
}


def words(model: str, rows: str, scenario: str, folder: Path) -> list[str]:
    """Options of a run of twelve steps that saves and evaluates often."""
    shared = [f"--model_name={model}", f"--dataset_name={rows}", "--max_seq_length=128", "--batch_size=8"]
    often = ["--max_steps=12", "--save_every=2", "--eval_every=5", "--log_every=1", "--learning_rate=1e-2"]
    return [*shared, *often, *SCENARIOS[scenario], f"--output_dir={folder}"]


def outcome(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """All metrics but the clock's, and hashes of the exported weights."""
    kept = [{k: v for k, v in record.items() if not k.endswith(CLOCK)} for record in records(folder)]
    weights = sorted(folder.glob("final/*.safetensors"))
    assert weights
    return kept, [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights]


@pytest.fixture(scope="module", params=SCENARIOS)
def undisturbed(request, tmp_path_factory, tiny_model, rows) -> tuple[str, Any]:
    """A scenario, and what it comes to when nothing happens."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(*words(tiny_model, rows, request.param, folder)) == 0
    return request.param, outcome(folder)


def num_steps(folder: Path) -> int:
    return len(steps(folder)) if (folder / "metrics.jsonl").exists() else 0


MOMENTS: dict[str, tuple[Callable[[Path], bool], signal.Signals, set[int]]] = {
    "before the first checkpoint": (lambda folder: num_steps(folder) > 0, signal.SIGKILL, {-9}),
    "in a save": (lambda folder: any(folder.glob("checkpoints/.tmp-*")), signal.SIGKILL, {-9}),
    "between saves": (lambda folder: num_steps(folder) > 6, signal.SIGKILL, {-9}),
    "stopped": (lambda folder: num_steps(folder) > 4, signal.SIGTERM, {143}),
    "interrupted": (lambda folder: num_steps(folder) > 2, signal.SIGINT, {130}),
}
"""When a signal is sent, which, and the exit codes that it may come to."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_goes_on_to_the_same_end(undisturbed, moment, tmp_path, tiny_model, rows):
    scenario, expected = undisturbed
    is_time, number, codes = MOMENTS[moment]
    folder, log = tmp_path / "run", tmp_path / "log"
    options = words(tiny_model, rows, scenario, folder)
    process = start_training(log, *options)
    if wait_until(lambda: is_time(folder), process, poll_s=0):
        os.kill(process.pid, number)
    assert exit_code(process) in codes | {0}, log.read_text()  # 0: it was done before the signal came
    if process.exitcode:
        has_saved = (folder / "checkpoints" / "latest").exists()
        resumed = [*options, "--resume_from=latest"] if has_saved else options
        if not has_saved:
            resumed = [*resumed[:-1], f"--output_dir={(folder := tmp_path / 'again')}"]
        assert train(*resumed) == 0
    assert outcome(folder) == expected


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of a disk with too little room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_said_in_one_line_and_the_run_goes_on(undisturbed, disk, tmp_path, tiny_model, rows):
    scenario, expected = undisturbed
    log, options = tmp_path / "log", words(tiny_model, rows, scenario, disk / "run")
    assert exit_code(start_training(log, *options)) == 2
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "Traceback" not in log.read_text()
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    if (disk / "run" / "checkpoints" / "latest").exists():
        options.append("--resume_from=latest")
    else:
        options.append(f"--output_dir={disk / 'again'}")
    assert train(*options) == 0
    assert outcome(Path(options[-1].partition("=")[2]) if "again" in options[-1] else disk / "run") == expected
