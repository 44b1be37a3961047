#!/usr/bin/env python
"""Run the GPU tests and keep their outcome by test file, with versions, GPU and commit, as JSON.

    python benchmarks/gpu_tests.py --output benchmarks/results/gpu_tests.json [tests/kernels/test_rope_gpu.py ...]

Tests share the GPUs, --workers at a time, each process beginning with another GPU; those that fill a GPU, time it or
need several come last, one at a time. CUDA_VISIBLE_DEVICES chooses the GPUs. CI has no GPU, so this record is how a
reader knows that they ran, and on what.

They need not all run at once: files that --output holds are kept, each with the commit that it ran at, and those run
now take their place; --missing runs only those that it does not hold without a failure. Exit code: pytest's.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.observability.provenance import collect_provenance, visible_gpus
from llm_fp8.utils.errors import OneSentenceParser, UserError, reading, run_script
from llm_fp8.utils.json_files import read_json, require_writable, write_json_atomic

ALONE = "exclusive or whole_machine or multi_gpu"
"""pytest's expression for the tests beside which nothing may run."""
WRITE_EVERY_S = 10

Entry = dict[str, Any]


class Outcomes:
    """A pytest plugin that keeps each test's outcome, and by file the record in `output`.

    Raises `UserError` where `output` holds something else.
    """

    def __init__(self, output: Path) -> None:
        self._output, self._written_s = output, 0.0
        self._tests: dict[str, Entry] = {}
        self.kept: dict[str, Entry] = {}
        if output.exists():
            with reading("--output", output, "the record of the GPU tests", "Give another file."):
                self.kept = read_json(output)["files"]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for set-up, call and tear-down of each test; a failure in any of them is the test's. Of a test whose
        process died there is one report of another kind.
        """
        entry = self._tests.setdefault(report.nodeid, {"outcome": "passed", "duration_s": 0.0})
        entry["duration_s"] += report.duration
        if report.outcome != "passed":
            entry.update(outcome=report.outcome, reason=str(report.longrepr)[-600:])
        if time.monotonic() > self._written_s + WRITE_EVERY_S:  # in case the whole is cut off
            self.write(exit_code=None)

    def files(self, commit: str | None) -> dict[str, Entry]:
        """File -> outcomes by number, commit, duration, and the reasons of failures; those kept, and this run's."""
        found: dict[str, Entry] = {}
        for name, test in self._tests.items():
            new: Entry = {"outcomes": Counter(), "commit": commit, "duration_s": 0.0, "failures": {}}
            entry = found.setdefault(name.partition("::")[0], new)
            entry["outcomes"][test["outcome"]] += 1
            entry["duration_s"] = round(entry["duration_s"] + test["duration_s"], 1)
            if test["outcome"] == "failed":
                entry["failures"][name.partition("::")[2]] = test["reason"]
        # A machine of fewer GPUs shows nothing about a file that ran on one of more.
        ran = {name: entry for name, entry in found.items() if set(entry["outcomes"]) != {"skipped"}}
        return dict(sorted((found | self.kept | ran).items()))

    def write(self, exit_code: int | None) -> None:
        """Write the record; `exit_code` of this run's tests, None while they are running."""
        self._written_s = time.monotonic()
        provenance = collect_provenance(sys.argv)
        files = self.files(provenance["git"]["commit"])
        counts: Counter[str] = Counter()
        for entry in files.values():
            counts.update(entry["outcomes"])
        record = {"provenance": provenance, "exit_code": exit_code, "counts": dict(counts), "files": files}
        write_json_atomic(self._output, record)


def gpu_files(paths: list[str]) -> list[str]:
    """`paths` with the GPU tests (*_gpu.py) in place of folders: the other files are for machines without a GPU."""
    return [
        str(file)
        for path in paths
        for file in (sorted(Path(path).rglob("*_gpu.py")) if Path(path).is_dir() else [path])
    ]


def run_tests(files: list[str], num_workers: int, outcomes: Outcomes, gpus: list[str]) -> int:
    """Run them, on `gpus` as CUDA_VISIBLE_DEVICES takes them; returns pytest's exit code."""
    firsts = [worker % len(gpus) for worker in range(num_workers)] if len(gpus) > 1 else []
    # One worker per entry, and the GPUs that it sees; set before it imports anything.
    seen = [",".join(gpus[first:] + gpus[:first]) for first in firsts]
    workers = [word for visible in seen for word in ("--tx", f"popen//env:CUDA_VISIBLE_DEVICES={visible}")]
    shared = [*(workers or ["-n", str(num_workers)]), "--dist", "worksteal"]
    worst = pytest.ExitCode.OK
    for which in (["-m", f"not ({ALONE})", *shared], ["-m", ALONE]):
        code = pytest.main(["-q", "-p", "no:cacheprovider", *files, *which], plugins=[outcomes])
        worst = max(worst, pytest.ExitCode.OK if code == pytest.ExitCode.NO_TESTS_COLLECTED else code)
        if worst not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            break  # stopped from outside, or a file that cannot be read: no test of it has run
    return int(worst)


def main() -> int:
    """Run what is to be run and keep it; returns pytest's exit code."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--workers", type=int, default=8, help="tests at a time (default 8)")
    parser.add_argument("tests", nargs="*", default=["tests"], help="test files or folders (default: all of tests)")
    parser.add_argument("--missing", action="store_true", help="run only what --output does not hold without a failure")
    options = parser.parse_args()
    require_writable("--output", options.output)
    if missing := [path for path in options.tests if not Path(path).exists()]:
        raise UserError(f"{missing[0]}: no such file or folder of tests.")
    outcomes, files = Outcomes(options.output), gpu_files(options.tests)
    outcomes.kept = {name: entry for name, entry in outcomes.kept.items() if Path(name).exists()}
    if options.missing:
        files = [
            file for file in files if outcomes.kept.get(file, {"outcomes": {"failed": 1}})["outcomes"].get("failed")
        ]
    if not files:
        print(f"{options.output} holds all of these tests as passed")
        return 0
    code = run_tests(files, options.workers, outcomes, visible_gpus())
    outcomes.write(code)
    return code


if __name__ == "__main__":
    run_script(main)
