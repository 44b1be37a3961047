#!/usr/bin/env python
"""Run the GPU tests and keep their outcome, with versions, GPU and commit, as JSON.

    python benchmarks/gpu_tests.py --output benchmarks/results/gpu_tests.json [tests/gpu tests/multi_gpu ...]

CI has no GPU, so this record is how a reader knows that they ran, on what, and what they measured (each test's recorded properties).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.json_files import write_json_atomic
from llm_fp8.provenance import collect_provenance


class Outcomes:
    """A pytest plugin that keeps each test's outcome and recorded properties."""

    def __init__(self, output: Path) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self._output = output
        self._written_s = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for set-up, call and tear-down of each test; a failure in any of them is the test's."""
        entry = self.tests.setdefault(report.nodeid, {"outcome": "passed", "duration_s": 0.0, "properties": {}})
        entry["duration_s"] += report.duration
        entry["properties"].update(dict(report.user_properties))
        if report.outcome != "passed":
            entry["outcome"] = report.outcome
            entry["reason"] = str(report.longrepr)[-600:]
        if time.monotonic() > self._written_s + 10:  # in case the whole is cut off
            self.write(exit_code=None)

    def write(self, exit_code: int | None) -> None:
        """Write the record; `exit_code` None while tests are running."""
        self._written_s = time.monotonic()
        counts = dict(Counter(entry["outcome"] for entry in self.tests.values()))
        provenance = collect_provenance(sys.argv)
        write_json_atomic(self._output, {"provenance": provenance, "exit_code": exit_code, "counts": counts, "tests": self.tests})


def main() -> int:
    """Run pytest in this process; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", required=True, help="JSON file to write")
    parser.add_argument("--workers", type=int, default=8, help="tests at a time (default 8)")
    parser.add_argument("tests", nargs="*", default=["tests/gpu"], help="what to run (default tests/gpu)")
    options = parser.parse_args()
    outcomes = Outcomes(Path(options.output))
    common = ["-q", "-p", "no:cacheprovider", *options.tests]
    # Most of the time is processes that start, so several tests share the GPU; those that fill its memory come after, alone.
    codes = [
        pytest.main([*common, "-m", "not exclusive", "-n", str(options.workers), "--dist", "worksteal"], plugins=[outcomes]),
        pytest.main([*common, "-m", "exclusive"], plugins=[outcomes]),
    ]
    code = max(0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code for code in codes)
    outcomes.write(int(code))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
