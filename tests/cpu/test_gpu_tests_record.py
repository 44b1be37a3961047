"""The record of the GPU tests, made of tests that need none: several runs add up, and each test names its commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu_tests import Outcomes
from llm_fp8.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import os

def test_one(record_property):
    record_property("figure", 1)

def test_two():
    assert {two}
"""


@pytest.fixture
def record(tmp_path):
    """A function: run the named tests at a commit and give the record, in which each test has its outcome alone."""

    def run(commit: str, *names: tuple[str, ...], two: str = "True", options: tuple[str, ...] = ()) -> tuple[int, dict]:
        (tmp_path / "test_small.py").write_text(TESTS.format(two=two))
        command = [
            sys.executable,
            str(ROOT / "benchmarks" / "gpu_tests.py"),
            "--output",
            str(tmp_path / "record.json"),
            "--workers",
            "1",
            *options,
        ]
        done = subprocess.run(
            [*command, *("::".join(["test_small.py", *name]) for name in names)],
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


def test_runs_add_up(record, tmp_path):
    first, second = "1" * 40, "2" * 40
    code, found = record(first, ("test_one",))
    assert code == 0 and outcomes(found) == {"test_one": "passed"} and found["earlier_runs"] == []
    assert next(iter(found["tests"].values()))["properties"] == {"figure": 1}
    code, found = record(second, ("test_two",), two="False")
    assert code == 1 and outcomes(found) == {"test_one": "passed", "test_two": "failed"}
    assert found["counts"] == {"passed": 1, "failed": 1} and [run["exit_code"] for run in found["earlier_runs"]] == [0]
    assert [test["commit"] for test in found["tests"].values()] == [first, second]
    assert found["provenance"]["git"]["commit"] == second
    found["tests"]["test_small.py::test_gone"] = found["tests"]["test_small.py::test_one"]
    found["tests"]["test_other.py::test_other"] = found["tests"]["test_small.py::test_one"]
    (tmp_path / "record.json").write_text(json.dumps(found))
    code, found = record(second, ())
    assert code == 0 and outcomes(found) == {"test_one": "passed", "test_two": "passed", "test_other": "passed"}
    assert {test["commit"] for name, test in found["tests"].items() if "small" in name} == {second}
    assert [run["exit_code"] for run in found["earlier_runs"]] == [0, 1]


def write_record(path: Path, **tests: str) -> dict:
    """A record by hand: tests of test_small.py with their outcomes, and one of another file."""
    commit = "1" * 40
    entries = {f"test_small.py::{name}": {"outcome": outcome, "commit": commit} for name, outcome in tests.items()}
    entries["test_other.py::test_other"] = {"outcome": "passed", "commit": commit}
    record = {"provenance": {}, "exit_code": 0, "earlier_runs": [], "tests": entries}
    path.write_text(json.dumps(record))
    return record


def test_what_is_missing_is_run_and_what_is_gone_is_dropped(record, tmp_path):
    first, second = "1" * 40, "2" * 40
    write_record(tmp_path / "record.json", test_one="passed", test_two="failed", test_gone="passed")
    code, found = record(second, (), options=("--missing",))
    assert code == 0 and outcomes(found) == {"test_one": "passed", "test_two": "passed", "test_other": "passed"}
    assert [found["tests"][f"test_small.py::{name}"]["commit"] for name in ("test_one", "test_two")] == [first, second]
    code, again = record(second, (), options=("--missing",))
    assert code == 0 and again == found


def test_a_test_whose_process_dies_has_failed(record, tmp_path):
    write_record(tmp_path / "record.json", test_one="passed", test_two="passed")
    code, found = record("2" * 40, ("test_two",), two="os._exit(3)")
    assert code == 1 and outcomes(found) == {"test_one": "passed", "test_two": "failed", "test_other": "passed"}
    assert "crashed" in found["tests"]["test_small.py::test_two"]["reason"]


def test_a_file_that_cannot_be_collected_takes_nothing_from_the_record(record, tmp_path):
    """An error in the file of the tests: what was recorded stays, and nothing is called passed."""
    before = write_record(tmp_path / "record.json", test_one="passed", test_two="failed")
    code, found = record("2" * 40, (), two="]", options=("--missing",))
    assert code == 2 and found == before
    code, found = record("2" * 40, (), two="]")
    assert code == pytest.ExitCode.INTERRUPTED == found["exit_code"] and found["tests"] == before["tests"]


def test_another_file_is_not_taken_for_a_record(tmp_path):
    (tmp_path / "record.json").write_text('{"rows": []}')
    with pytest.raises(UserError, match="record.json exists and is no record of the GPU tests"):
        Outcomes(tmp_path / "record.json", [])


def test_a_test_that_was_cut_off_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_FP8_COMMIT", "1" * 40)
    outcomes_so_far = Outcomes(tmp_path / "record.json", [])
    for name, phases in (("a", ("setup", "call", "teardown")), ("b", ("setup", "call"))):
        for phase in phases:
            report = SimpleNamespace(nodeid=name, when=phase, outcome="passed", duration=1.0, user_properties=[])
            outcomes_so_far.pytest_runtest_logreport(report)
    outcomes_so_far.write(exit_code=None)
    found = json.loads((tmp_path / "record.json").read_text())
    assert list(found["tests"]) == ["a"] and found["tests"]["a"]["duration_s"] == 3.0
