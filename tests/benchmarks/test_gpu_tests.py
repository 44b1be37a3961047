"""The record of the GPU tests, made of tests that need none: several runs add up, and each test names its commit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu_tests import Outcomes, dealt
from llm_fp8.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import os

def test_one(record_property):
    record_property("figure", 1)

def test_two():
    assert {two}
"""


@pytest.fixture
def record(tmp_path, warm_python):
    """A function: run the named tests at a commit and give the record, in which each test has its outcome alone."""

    def run(commit: str, *names: tuple[str, ...], two: str = "True", options: tuple[str, ...] = ()) -> tuple[int, dict]:
        (tmp_path / "test_small.py").write_text(TESTS.format(two=two))
        command = [
            warm_python,
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_is_missing_is_run_and_what_is_gone_is_dropped(record, tmp_path):
    first, second = "1" * 40, "2" * 40
    write_record(tmp_path / "record.json", test_one="passed", test_two="failed", test_gone="passed")
    code, found = record(second, (), options=("--missing",))
    assert code == 0 and outcomes(found) == {"test_one": "passed", "test_two": "passed", "test_other": "passed"}
    assert [found["tests"][f"test_small.py::{name}"]["commit"] for name in ("test_one", "test_two")] == [first, second]
    code, again = record(second, (), options=("--missing",))
    assert code == 0 and again == found


@pytest.mark.slow
def test_what_is_missing_of_the_projects_own_tests(tmp_path, warm_python):
    """pytest is called twice in one process: to collect, then with workers."""
    done = subprocess.run(
        [
            warm_python,
            "benchmarks/gpu_tests.py",
            *("--output", str(tmp_path / "record.json")),
            *("--workers", "1", "--missing", "tests/kernels/test_rope_gpu.py"),
        ],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "record.json").read_text())["tests"]
    assert found and {test["outcome"] for test in found.values()} == {"skipped"}


@pytest.mark.slow
def test_a_test_whose_process_dies_has_failed(record, tmp_path):
    write_record(tmp_path / "record.json", test_one="passed", test_two="passed")
    code, found = record("2" * 40, ("test_two",), two="os._exit(3)")
    assert code == 1 and outcomes(found) == {"test_one": "passed", "test_two": "failed", "test_other": "passed"}
    assert "crashed" in found["tests"]["test_small.py::test_two"]["reason"]


@pytest.mark.slow
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


def test_a_test_that_is_skipped_stays_passed(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_FP8_COMMIT", "2" * 40)
    write_record(tmp_path / "record.json", test_one="passed", test_two="failed")
    outcomes_so_far = Outcomes(tmp_path / "record.json", [])
    for name in ("test_one", "test_two"):
        for phase, outcome in (("setup", "skipped"), ("teardown", "passed")):
            report = SimpleNamespace(
                nodeid=f"test_small.py::{name}",
                when=phase,
                outcome=outcome,
                duration=0.0,
                user_properties=[],
                longrepr="",
            )
            outcomes_so_far.pytest_runtest_logreport(report)
    outcomes_so_far.write(exit_code=0)
    found = json.loads((tmp_path / "record.json").read_text())
    assert outcomes(found) == {"test_one": "passed", "test_two": "skipped", "test_other": "passed"}


SEVERAL = """
import os
import time
from pathlib import Path

import pytest

SEEN = os.environ["CUDA_VISIBLE_DEVICES"]  # when it is imported, as torch reads it

@pytest.fixture(autouse=True)
def seen(request, record_property):
    began = time.time()
    yield
    record_property("gpus", os.environ["CUDA_VISIBLE_DEVICES"])
    record_property("span", [began, time.time()])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == SEEN

@pytest.mark.parametrize("number", range(6))
def test_shared(number):
    time.sleep(0.3)

@pytest.mark.exclusive
@pytest.mark.parametrize("seconds", {exclusive})
def test_exclusive(seconds):
    if seconds == "death":
        Path("died_on").write_text(SEEN)
        os._exit(3)
    if seconds == 0.1:
        Path("short").touch()
    deadline = time.time() + 120
    while isinstance(seconds, str) and not Path("short").exists():  # holds its worker until the short one runs
        assert time.time() < deadline
        time.sleep(0.05)
    time.sleep(seconds if isinstance(seconds, float) else 0.0)

@pytest.mark.exclusive
@pytest.mark.multi_gpu
def test_exclusive_of_several():
    time.sleep(0.3)

@pytest.mark.whole_machine
def test_whole_machine():
    time.sleep(0.3)
    assert {whole}
"""


@pytest.fixture
def several(tmp_path, warm_python):
    """A function: run tests of every kind as on a machine with these GPUs; exit code, and entries of the record by
    name.
    """

    def run(gpus: list[str], workers: int, exclusive: list, whole: str = "True"):
        (tmp_path / "test_several.py").write_text(SEVERAL.format(exclusive=exclusive, whole=whole))
        program = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from benchmarks import gpu_tests as g; "
            f"g.visible_gpus = lambda: {gpus}; sys.exit(g.main())"
        )
        done = subprocess.run(
            [warm_python, "-c", program, "--output", "record.json", f"--workers={workers}", "test_several.py"],
            cwd=tmp_path,
            env=os.environ
            | {"LLM_FP8_COMMIT": "1" * 40, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (tmp_path / "record.json").exists(), done.stdout + done.stderr
        tests = json.loads((tmp_path / "record.json").read_text())["tests"]
        return done.returncode, {name.rpartition("::")[2]: test for name, test in tests.items()}

    return run


def seen_by(tests: dict, start: str) -> list[str]:
    """The GPUs that the tests whose names begin so saw, in the order in which they began."""
    found = [test["properties"] for name, test in tests.items() if name.startswith(start)]
    return [properties["gpus"] for properties in sorted(found, key=lambda properties: properties["span"])]


def span(tests: dict, start: str) -> tuple[float, float]:
    """When the first of them began, and the last ended."""
    spans = [test["properties"]["span"] for name, test in tests.items() if name.startswith(start)]
    return min(began for began, _ in spans), max(ended for _, ended in spans)


@pytest.mark.slow
def test_every_gpu_is_used_and_what_needs_one_for_itself_has_it(several, tmp_path):
    seconds = [0.1, 0.2, 0.3, 0.4, 1.5]
    code, first = several(["0", "GPU-b"], 4, seconds)
    assert code == 0 and len(first) == 13 and {test["outcome"] for test in first.values()} == {"passed"}
    assert set(seen_by(first, "test_shared")) == {"0,GPU-b", "GPU-b,0"}
    assert set(seen_by(first, "test_exclusive[")) == {"0", "GPU-b"}
    assert seen_by(first, "test_exclusive_of") == seen_by(first, "test_whole") == ["0,GPU-b"]
    parts = sorted(
        [
            span(first, "test_shared"),
            span(first, "test_exclusive["),
            span(first, "test_exclusive_of"),
            span(first, "test_whole"),
        ]
    )
    assert all(earlier[1] <= later[0] for earlier, later in zip(parts, parts[1:], strict=False)), (
        "one part after the other"
    )
    assert parts[0] == span(first, "test_shared") and parts[1] == span(first, "test_exclusive[")
    exclusive = [test["properties"] for name, test in first.items() if name.startswith("test_exclusive[")]
    for gpu in ("0", "GPU-b"):
        spans = sorted(properties["span"] for properties in exclusive if properties["gpus"] == gpu)
        assert all(earlier[1] <= later[0] for earlier, later in zip(spans, spans[1:], strict=False)), (
            "one at a time on a GPU"
        )
    # Their durations are known now: the longest one is alone on its GPU while the other takes what is left.
    code, second = several(["0", "GPU-b"], 4, seconds)
    longest = second["test_exclusive[1.5]"]["properties"]
    assert code == 0 and longest["span"][0] < min(
        second[f"test_exclusive[{s}]"]["properties"]["span"][1] for s in seconds[:3]
    )
    assert sum(gpu == longest["gpus"] for gpu in seen_by(second, "test_exclusive[")) <= 2


@pytest.mark.slow
def test_what_follows_a_death_on_a_gpu_runs_on_it_as_well(several, tmp_path):
    """The one that takes its place sees the same GPU; a failure of the last part is the run's."""
    code, tests = several(["0", "1", "2"], 2, ["death", "held", "held too", 0.1, 0.2, 0.3], whole="False")
    outcome = {name: test["outcome"] for name, test in tests.items()}
    assert (
        code == 1
        and len(tests) == 14
        and outcome.pop("test_exclusive[death]") == outcome.pop("test_whole_machine") == "failed"
    )
    assert set(outcome.values()) == {"passed"} and set(seen_by(tests, "test_shared")) == {"0,1,2", "1,2,0"}
    assert "crashed" in tests.pop("test_exclusive[death]")["reason"]
    # Each worker has two: the one that died left the short one that the others are held for.
    assert seen_by(tests, "test_exclusive[0.1]") == [(tmp_path / "died_on").read_text()]


@pytest.mark.slow
def test_on_one_gpu_what_needs_it_for_itself_runs_one_at_a_time(several):
    code, tests = several(["0"], 2, [0.1, 0.2])
    assert code == 0 and len(tests) == 10 and {test["properties"]["gpus"] for test in tests.values()} == {"0"}
    assert span(tests, "test_shared")[1] <= span(tests, "test_exclusive")[0]
    spans = sorted(test["properties"]["span"] for name, test in tests.items() if not name.startswith("test_shared"))
    assert all(earlier[1] <= later[0] for earlier, later in zip(spans, spans[1:], strict=False))


def test_the_longest_test_of_every_worker_comes_first(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps({"provenance": {}, "exit_code": 0, "earlier_runs": [], "tests": {
        name: {"outcome": "passed", "commit": "1" * 40, "duration_s": float(name)} for name in "12345"
    }}))  # fmt: skip
    known = Outcomes(tmp_path / "record.json", [])
    assert dealt(["1", "2", "3", "4", "5", "unknown"], 2, known) == ["5", "3", "1", "unknown", "4", "2"]
    assert dealt(["1", "2", "3", "4", "5"], 2, known) == ["4", "2", "5", "3", "1"], (
        "the first chunk of five is two tests"
    )
