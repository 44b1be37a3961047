"""What the benchmark of memory over steps makes of its samples, and that it takes them from a real training."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.memory_over_steps import Sample, growth, training_options
from llm_fp8.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_growth_is_the_slope_after_the_first_tenth():
    leaking = [
        Sample(step, 900.0 if step <= 20 else 100 + step / 50, 7, 4 + step // 100, 0.5) for step in range(10, 201, 10)
    ]
    found = growth(leaking, num_steps=200)
    assert found["rss_mib"] == pytest.approx(
        {"first": 100.6, "last": 104.0, "most": 104.0, "growth_per_1000_steps": 20.0}
    )
    assert found["num_open_files"]["growth_per_1000_steps"] == 0
    assert found["num_threads"]["last"] == 6 and found["num_threads"]["growth_per_1000_steps"] > 0
    assert set(found) == {"rss_mib", "num_open_files", "num_threads", "step_time_s"}, (
        "no figure of a GPU where there is none"
    )


def test_options_by_which_samples_are_taken_are_refused(tmp_path):
    for word in ("--log_every=50", "--log-every=50", "--max_steps", "--output_dir=here"):
        with pytest.raises(UserError, match=f"{word.partition('=')[0]} behind -- is this program's to choose"):
            training_options(["--batch_size=2", word, "7"], 100, tmp_path)
    assert training_options(["--batch_size=2"], 400, tmp_path)[-1] == "--batch_size=2"


@pytest.mark.slow
def test_samples_are_of_the_training(tmp_path, warm_python):
    words = ["--max_seq_length=128", "--batch_size=2", "--num_of_samples=60", "--no_export"]
    done = subprocess.run(
        [
            warm_python,
            "benchmarks/memory_over_steps.py",
            "--steps=20",
            f"--output={tmp_path / 'memory.json'}",
            "--",
            *words,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "memory.json").read_text())
    assert [sample["step"] for sample in record["samples"]] == list(range(1, 21))
    assert all(sample["rss_mib"] > 50 and sample["num_threads"] >= 1 for sample in record["samples"])
    assert done.stdout.count("evaluation at step") == 10 and done.stdout.count("saved ") == 10
