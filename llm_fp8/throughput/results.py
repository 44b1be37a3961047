"""The results file of a benchmark in several processes, one row per measurement, rewritten after each.

A measurement can end its processes: a GPU out of memory leaves the others waiting in a collective operation, and what NCCL was doing cannot
be taken back. So a process that fails writes the row that says so and ends; the launcher (torchrun --max-restarts) ends the others and
starts all of them anew, and they go on behind the last row. The file is the only thing that outlives them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llm_fp8.json_files import write_json_atomic

ENDED_IN_SILENCE = "a process ended without saying why: killed, or a fault in native code"


class ResultsFile:
    """Rows of a launch, in the order of its plan.

    Args:
        path: of the JSON file.
        launch: the same for all processes and restarts of a launch.
        writes: whether this is the process that writes rows of measurements. Any may write that one failed.

    All processes have to wait for the one that writes before they read.
    """

    def __init__(self, path: Path, launch: str, *, writes: bool) -> None:
        self._path = path
        self._launch = launch
        self._writes = writes
        self._number = 0

    def is_of_this_launch(self) -> bool:
        """Whether the file is there and was started by this launch."""
        return self._path.exists() and self._read().get("launch") == self._launch

    def start(self, header: dict[str, Any]) -> None:
        """A file without rows in place of any other; `header`: its entries beside them."""
        write_json_atomic(self._path, {**header, "launch": self._launch, "measuring": None, "rows": []})

    def _read(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self._path.read_text())
        return record

    def rows(self) -> list[dict[str, Any]]:
        """The rows so far."""
        rows: list[dict[str, Any]] = self._read()["rows"]
        return rows

    def interrupted(self) -> dict[str, Any] | None:
        """What was being measured when all processes ended and no row was written."""
        measuring: dict[str, Any] | None = self._read()["measuring"]
        return measuring

    def begin(self, subject: dict[str, Any]) -> None:
        """Note what is measured now; `subject` becomes part of its row."""
        self._number = len(self.rows())
        if self._writes:
            write_json_atomic(self._path, {**self._read(), "measuring": subject})

    def add(self, row: dict[str, Any]) -> None:
        """The row of what was measured."""
        if self._writes:
            record = self._read()
            write_json_atomic(self._path, {**record, "measuring": None, "rows": [*record["rows"], row]})

    def add_failure(self, subject: dict[str, Any], reason: str) -> None:
        """The row of what could not be measured, unless it has one. One process of all calls this."""
        record = self._read()
        if len(record["rows"]) == self._number:
            row = {**subject, "failed": reason}
            write_json_atomic(self._path, {**record, "measuring": None, "rows": [*record["rows"], row]})
