"""The JSON record of the GPU tests, which counts passed, failed and skipped tests of each test file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from benchmarks.gpu_tests import Outcomes

ROOT = Path(__file__).resolve().parents[2]


def report(name: str, outcome: str = "passed", when: str = "call"):
    return SimpleNamespace(nodeid=name, outcome=outcome, duration=0.5, when=when, longrepr="why")


def test_outcomes_are_counted_by_file(tmp_path):
    outcomes = Outcomes(tmp_path / "gpu_tests.json")
    for name, outcome in (("a_gpu.py::one", "passed"), ("a_gpu.py::two", "failed"), ("b_gpu.py::one", "skipped")):
        outcomes.pytest_runtest_logreport(report(name, when="setup"))
        outcomes.pytest_runtest_logreport(report(name, outcome))
    outcomes.pytest_runtest_logreport(report("b_gpu.py::under way", when="setup"))
    assert json.loads((tmp_path / "gpu_tests.json").read_text())["exit_code"] is None, "until the tests end"
    outcomes.write(1)
    record = json.loads((tmp_path / "gpu_tests.json").read_text())
    assert record["counts"] == {"passed": 1, "failed": 1, "skipped": 1} and record["exit_code"] == 1
    assert record["files"]["a_gpu.py"]["outcomes"] == {"passed": 1, "failed": 1}
    assert record["files"]["a_gpu.py"]["failures"] == {"two": "why"} and record["files"]["a_gpu.py"]["commit"]
    assert record["provenance"]["packages"]


def test_new_outcomes_replace_those_of_the_same_file(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_FP8_COMMIT", "new")
    path = tmp_path / "gpu_tests.json"
    old = {name: {"outcomes": {"passed": 3}, "commit": "old"} for name in ("a_gpu.py", "b_gpu.py", "c_gpu.py")}
    path.write_text(json.dumps({"files": old}))
    outcomes = Outcomes(path)
    outcomes.pytest_runtest_logreport(report("a_gpu.py::one"))
    outcomes.pytest_runtest_logreport(report("b_gpu.py::one", "skipped"))  # as on a machine with too few GPUs
    files = outcomes.files()
    assert [files[name]["commit"] for name in sorted(files)] == ["new", "old", "old"]
