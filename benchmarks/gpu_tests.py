#!/usr/bin/env python
"""Run the GPU tests and keep their outcome, with versions, GPU and commit, as JSON.

    python benchmarks/gpu_tests.py --output benchmarks/results/gpu_tests.json [tests/kernels/test_rope_gpu.py ...]

Tests share the GPUs, --workers at a time, each process beginning with another GPU. Those that fill a GPU or time it
have one for themselves: as many at a time as there are GPUs. Those that need several GPUs or the whole machine for
themselves come last, one at a time. CUDA_VISIBLE_DEVICES chooses the GPUs.

CI has no GPU, so this record is how a reader knows that they ran, on what, and what they measured (each test's recorded
properties).

They need not all run at once: tests that --output holds are kept, each with the commit that it ran at, and those run
now are added to them or take their place. Of the files and folders given, tests that are no longer there are dropped,
unless pytest was interrupted or could not collect them. --missing runs only those that --output does not hold as
passed.

Exit code: pytest's.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.observability.provenance import collect_provenance, visible_gpus
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import require_writable, write_json_atomic

NEEDS_MACHINE = "whole_machine or (exclusive and multi_gpu)"
"""pytest's expression for the tests beside which nothing may run."""
NEEDS_GPU = f"exclusive and not ({NEEDS_MACHINE})"
"""For those beside which nothing may run on their GPU."""
WHOLE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
"""Exit codes of a pytest that has run all that it was given."""


class Outcomes:
    """A pytest plugin that keeps each test's outcome and recorded properties in the file `output`; `paths` are those
    whose tests the record is to hold.

    Attributes:
        tests: of this run, by id.
        present: ids that are known to be there although they may not run now.

    Raises `UserError` where `output` holds something else.
    """

    def __init__(self, output: Path, paths: list[str]) -> None:
        self._output = output
        self._written_s = 0.0
        self._paths = [path.rstrip("/") for path in paths]
        self._commit = collect_provenance(sys.argv)["git"]["commit"]
        self._kept: dict[str, dict[str, Any]] = {}
        self._earlier: list[dict[str, Any]] = []
        self._running: dict[str, dict[str, Any]] = {}
        self.tests: dict[str, dict[str, Any]] = {}
        self.present: frozenset[str] = frozenset()
        if output.exists():
            try:
                record = json.loads(output.read_text())
                self._kept = record["tests"]
                last = {"provenance": record["provenance"], "exit_code": record["exit_code"]}
                self._earlier = [*record["earlier_runs"], last]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"--output {output} exists and is no record of the GPU tests; give another file."
                ) from error

    def has_passed(self, name: str) -> bool:
        """Whether the record holds this test as passed."""
        return self._kept.get(name, {}).get("outcome") == "passed"

    def duration_s(self, name: str) -> float:
        """What this test took when it last ran; infinite where that is not known."""
        return float((self._kept | self.tests).get(name, {}).get("duration_s", "inf"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for set-up, call and tear-down of each test; a failure in any of them is the test's. It is recorded
        when all three are over.

        Of a test whose process died there is one report of another kind, and no tear-down.
        """
        entry = self._running.setdefault(
            report.nodeid, {"outcome": "passed", "commit": self._commit, "duration_s": 0.0, "properties": {}}
        )
        entry["duration_s"] += report.duration
        entry["properties"].update(dict(report.user_properties))
        if report.outcome != "passed":
            entry["outcome"] = report.outcome
            entry["reason"] = str(report.longrepr)[-600:]
        if report.when not in ("setup", "call"):
            ended = self._running.pop(report.nodeid)
            # A machine of fewer GPUs shows nothing about a test that passed on one of more.
            if ended["outcome"] != "skipped" or not self.has_passed(report.nodeid):
                self.tests[report.nodeid] = ended
        if time.monotonic() > self._written_s + 10:  # in case the whole is cut off
            self.write(exit_code=None)

    def write(self, exit_code: int | None) -> None:
        """Write the record; `exit_code` of this run's tests, None while they are running."""
        self._written_s = time.monotonic()
        kept = self._kept
        if exit_code in WHOLE:  # all tests of the paths have run or are present, so others there are of the past
            kept = {
                name: test
                for name, test in kept.items()
                if name in self.present or not any(_is_under(name, path) for path in self._paths)
            }
        tests = kept | self.tests
        record = {
            "provenance": collect_provenance(sys.argv),
            "exit_code": exit_code,
            "earlier_runs": self._earlier,
            "counts": dict(Counter(entry["outcome"] for entry in tests.values())),
            "tests": tests,
        }
        write_json_atomic(self._output, record)


def _is_under(test: str, path: str) -> bool:
    """Whether the id of a test begins with a path (or id) as pytest takes it."""
    return test == path or test.startswith((f"{path}/", f"{path}::", f"{path}["))


class _Collected:
    """A pytest plugin that keeps the ids of what was collected."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]


def collect(paths: list[str], *options: str) -> tuple[int, list[str]]:
    """pytest's exit code and the ids of the tests of `paths` that it collects."""
    collected = _Collected()
    code = pytest.main(["-qq", "--collect-only", "-p", "no:cacheprovider", *paths, *options], plugins=[collected])
    return int(code), collected.names


def missing_tests(paths: list[str], outcomes: Outcomes) -> list[str]:
    """Ids of the tests of `paths` that the record does not hold as passed; `outcomes` is told which are there.

    Raises `UserError` where pytest cannot collect all of them.
    """
    code, names = collect(paths)
    if code != pytest.ExitCode.OK:
        raise UserError(f"--missing: pytest could not collect the tests of {' '.join(paths)}; it says above why.")
    outcomes.present = frozenset(names)
    return [name for name in names if not outcomes.has_passed(name)]


def of_gpus(paths: list[str]) -> list[str]:
    """`paths` with the GPU tests (*_gpu.py) in place of folders: the other files are for machines without a GPU."""
    return [
        str(file)
        for path in paths
        for file in (sorted(Path(path).rglob("*_gpu.py")) if Path(path).is_dir() else [path])
    ]


def workers_that_see(visible: list[list[str]]) -> list[str]:
    """pytest's options for one worker per entry, the GPUs that it sees; set before it imports anything."""
    return [word for gpus in visible for word in ("--tx", f"popen//env:CUDA_VISIBLE_DEVICES={','.join(gpus)}")]


def dealt(names: list[str], num_workers: int, outcomes: Outcomes) -> list[str]:
    """Tests in the order in which `--dist worksteal`, whose first chunks are of equal number, starts the longest
    ones first everywhere.
    """
    longest_first = sorted(names, key=outcomes.duration_s, reverse=True)
    return [name for worker in reversed(range(num_workers)) for name in longest_first[worker::num_workers]]


def run_tests(tests: list[str], num_workers: int, outcomes: Outcomes, gpus: list[str]) -> int:
    """Run them, on `gpus` as CUDA_VISIBLE_DEVICES takes them; returns pytest's exit code."""
    steal = ["--dist", "worksteal"]

    def shared() -> list[str]:
        """Most of the time is processes that start, so several tests share the GPUs."""
        first = [worker % len(gpus) for worker in range(num_workers)] if len(gpus) > 1 else []
        at_a_time = workers_that_see([gpus[gpu:] + gpus[:gpu] for gpu in first]) or ["-n", str(num_workers)]
        return [*tests, "-m", f"not ({NEEDS_GPU}) and not ({NEEDS_MACHINE})", *steal, *at_a_time]

    def one_per_gpu() -> list[str]:
        names = collect(tests, "-m", NEEDS_GPU)[1] if len(gpus) > 1 else []
        on = gpus[: len(names)]
        return [*dealt(names, len(on), outcomes), *steal, *workers_that_see([[gpu] for gpu in on])] if names else []

    def alone() -> list[str]:
        return [*tests, "-m", NEEDS_MACHINE if len(gpus) > 1 else f"({NEEDS_GPU}) or {NEEDS_MACHINE}"]

    worst = pytest.ExitCode.OK
    for part in (shared, one_per_gpu, alone):
        if not (words := part()):
            continue
        code = pytest.main(["-q", "-p", "no:cacheprovider", *words], plugins=[outcomes])
        worst = max(worst, pytest.ExitCode.OK if code == pytest.ExitCode.NO_TESTS_COLLECTED else code)
        if worst not in WHOLE:
            break  # stopped from outside, or a file that cannot be read: no test of it has run
    return int(worst)


def main() -> int:
    """Run what is to be run and keep it; returns pytest's exit code."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--workers", type=int, default=8, help="tests at a time (default 8)")
    parser.add_argument("tests", nargs="*", default=["tests"], help="tests, files or folders (default: all of tests)")
    parser.add_argument("--missing", action="store_true", help="run only what --output does not hold as passed")
    options = parser.parse_args()
    require_writable("--output", options.output)
    outcomes = Outcomes(options.output, options.tests)
    files = of_gpus(options.tests)
    tests = missing_tests(files, outcomes) if options.missing else files
    if not tests:
        print(f"{options.output} holds all of these tests as passed")
        return 0
    code = run_tests(tests, options.workers, outcomes, visible_gpus())
    outcomes.write(code)
    return code


if __name__ == "__main__":
    run_script(main)
