"""The record of the GPU tests, made of tests that need none: several runs of one commit add up, those of another begin anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
def test_one(record_property):
    record_property("figure", 1)

def test_two():
    assert {two}
"""


@pytest.fixture
def record(tmp_path):
    """A function: run the named tests at a commit and give the record, in which each test has its outcome alone."""

    def run(commit: str, *names: str, two: str = "True") -> tuple[int, dict]:
        (tmp_path / "test_small.py").write_text(TESTS.format(two=two))
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / "gpu_tests.py"),
            "--output",
            str(tmp_path / "record.json"),
            "--workers",
            "1",
        ]
        done = subprocess.run(
            [*command, *(f"test_small.py::{name}" for name in names)],
            cwd=tmp_path,
            env=os.environ | {"LLM_FP8_COMMIT": commit},
            capture_output=True,
            text=True,
            timeout=300,
        )
        return done.returncode, json.loads((tmp_path / "record.json").read_text())

    return run


def outcomes(record: dict) -> dict[str, str]:
    return {name.rpartition("::")[2]: test["outcome"] for name, test in record["tests"].items()}


def test_runs_of_one_commit_add_up(record):
    first, second = "1" * 40, "2" * 40
    code, found = record(first, "test_one")
    assert code == 0 and outcomes(found) == {"test_one": "passed"} and found["earlier_runs"] == []
    assert next(iter(found["tests"].values()))["properties"] == {"figure": 1}
    code, found = record(first, "test_two", two="False")
    assert code == 1 and outcomes(found) == {"test_one": "passed", "test_two": "failed"}
    assert found["counts"] == {"passed": 1, "failed": 1} and [run["exit_code"] for run in found["earlier_runs"]] == [0]
    code, found = record(first, "test_two")
    assert code == 0 and outcomes(found) == {"test_one": "passed", "test_two": "passed"}
    assert [run["exit_code"] for run in found["earlier_runs"]] == [0, 1]
    assert [run["provenance"]["git"]["commit"] for run in found["earlier_runs"]] == [first, first]
    code, found = record(second, "test_two")
    assert code == 0 and outcomes(found) == {"test_two": "passed"} and found["earlier_runs"] == []
