#!/usr/bin/env python
"""Run the GPU tests and record their outcomes by test file, with versions, GPU and commit, as JSON.

    python benchmarks/gpu_tests.py --output benchmarks/results/gpu_tests.json [tests/kernels/test_rope_gpu.py ...]

--workers processes run tests at the same time, and each starts with a different GPU. Tests that fill a GPU, time it or
need several GPUs run last, one at a time. CUDA_VISIBLE_DEVICES selects the GPUs. CI has no GPU, so this record shows
that the tests ran, and where.

The tests need not all run at once. --output has an entry for each test file, with its commit, and keeps it until this
file runs again. --missing runs only files without an entry or with a failure. The exit code is pytest's.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpus import visible_gpus
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.tools.script import run_script, writable
from llm_fp8.utils.errors import OneSentenceParser, UserError, reading
from llm_fp8.utils.json_files import read_json, write_json_atomic

ALONE = "exclusive or whole_machine or multi_gpu"  # pytest's expression that selects tests to run one at a time
WRITE_EVERY_S = 2

Entry = dict[str, Any]


class Outcomes:
    """A pytest plugin that records outcomes in `output`. The constructor raises `UserError` if that is no record."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._written_s = 0.0
        self._provenance = collect_provenance(sys.argv)
        self._tests: dict[str, Entry] = {}
        self.earlier: dict[str, Entry] = {}
        if output.exists():
            with reading("--output", output, "the record of the GPU tests", "Give another file."):
                self.earlier = read_json(output)["files"]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Update a test's outcome, which is None while the test runs. pytest reports set-up, call and tear-down, and
        each of them can fail the test. If the test's process died, pytest reports only one failure.
        """
        entry = self._tests.setdefault(report.nodeid, {"outcome": None, "duration_s": 0.0})
        entry["duration_s"] += report.duration
        if report.outcome != "passed":
            entry.update(outcome=report.outcome, reason=str(report.longrepr)[-600:])
        elif report.when == "call":
            entry["outcome"] = "passed"
        if time.monotonic() >= self._written_s + WRITE_EVERY_S:  # in case this process is killed
            self.write(exit_code=None)

    def files(self) -> dict[str, Entry]:
        """Return each test file's entry in the record: from this run if it ran the file, else from an earlier run."""
        files: dict[str, Entry] = {}
        gpu = next((gpu["name"] for gpu in self._provenance["gpus"]), None)
        commit = self._provenance["git"]["commit"]
        for name, test in self._tests.items():
            if test["outcome"] is None:
                continue
            new: Entry = {"outcomes": Counter(), "commit": commit, "gpu": gpu, "duration_s": 0.0, "failures": {}}
            entry = files.setdefault(name.partition("::")[0], new)
            entry["outcomes"][test["outcome"]] += 1
            entry["duration_s"] = round(entry["duration_s"] + test["duration_s"], 1)
            if test["outcome"] == "failed":
                entry["failures"][name.partition("::")[2]] = test["reason"]
        # Skipped tests, as on a machine with fewer GPUs, do not replace earlier outcomes.
        executed = {name: entry for name, entry in files.items() if set(entry["outcomes"]) != {"skipped"}}
        return dict(sorted((files | self.earlier | executed).items()))

    def write(self, exit_code: int | None) -> None:
        """Write the record. `exit_code` is pytest's, or None while tests are running."""
        self._written_s = time.monotonic()
        files = self.files()
        counts: Counter[str] = Counter()
        for entry in files.values():
            counts.update(entry["outcomes"])
        record = {"provenance": self._provenance, "exit_code": exit_code, "counts": dict(counts), "files": files}
        write_json_atomic(self._output, record)


def gpu_files(paths: list[str]) -> list[str]:
    """Return `paths` with each folder replaced by its GPU tests (*_gpu.py)."""
    files = [sorted(Path(path).rglob("*_gpu.py")) if Path(path).is_dir() else [path] for path in paths]
    return [str(file) for group in files for file in group]


def run_tests(files: list[str], num_workers: int, outcomes: Outcomes, gpus: list[str]) -> int:
    """Run test files on `gpus` (as in CUDA_VISIBLE_DEVICES) with the plugin `outcomes`. Return pytest's exit code."""
    workers = ["-n", str(num_workers)]
    if len(gpus) > 1:
        workers = []
        for worker in range(num_workers):
            first = worker % len(gpus)
            workers += ["--tx", f"popen//env:CUDA_VISIBLE_DEVICES={','.join(gpus[first:] + gpus[:first])}"]
    worst = pytest.ExitCode.OK
    for selection in (["-m", f"not ({ALONE})", *workers, "--dist", "worksteal"], ["-m", ALONE]):
        code = pytest.main(["-v", "-p", "no:cacheprovider", *files, *selection], plugins=[outcomes])
        worst = max(worst, pytest.ExitCode.OK if code == pytest.ExitCode.NO_TESTS_COLLECTED else code)
        if worst not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            break  # pytest was interrupted or could not collect a file, so tests have not run
    return int(worst)


def main() -> int:
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", required=True, type=writable, help="JSON file to write")
    parser.add_argument("--workers", type=int, default=8, help="tests at a time (default 8)")
    parser.add_argument("tests", nargs="*", default=["tests"], help="test files or folders (default: all of tests)")
    parser.add_argument("--missing", action="store_true", help="run only files without an entry or with a failure")
    options = parser.parse_args()
    for path in options.tests:
        if not Path(path).exists():
            raise UserError(f"{path}: no such file or folder of tests.")
    files = gpu_files(options.tests)
    outcomes = Outcomes(options.output)
    outcomes.earlier = {name: entry for name, entry in outcomes.earlier.items() if Path(name).exists()}
    if options.missing:
        passed = {name for name, entry in outcomes.earlier.items() if not entry["outcomes"].get("failed")}
        files = [file for file in files if file not in passed]
    if not files:
        print(f"{options.output} has no failure of these tests")
        return 0
    code = run_tests(files, options.workers, outcomes, visible_gpus())
    outcomes.write(code)
    return code


if __name__ == "__main__":
    run_script(main)
