"""The table on the terminal, and the JSON file, which is written anew after every check."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llm_fp8.json_files import write_json_atomic
from llm_fp8.verify.registry import Check
from llm_fp8.verify.result import STATUSES
from llm_fp8.verify.runner import Row

_STYLES = {"failed": "bold red", "warning": "yellow", "skipped": "dim", "info": "cyan", "passed": "green"}
SHOWN_DETAILS = 12


def print_rows(rows: list[Row], console: Console, *, verbose: bool) -> None:
    """The table, then what is to be mended. Details of checks that passed are left to `verbose`."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for row in rows:
        result = row.result
        details = result.details if verbose or result.status in ("failed", "warning") else ()
        hidden = len(details) - SHOWN_DETAILS
        lines = [result.summary, *(f"  {detail}" for detail in (details if verbose else details[-SHOWN_DETAILS:]))]
        if hidden > 0 and not verbose:
            lines.insert(1, f"  ({hidden} more lines with --verbose)")
        style = _STYLES[result.status]
        table.add_row(
            f"[{style}]{result.status}[/]", row.check.title, escape("\n".join(lines)), f"{row.wall_s:.1f} s" if row.wall_s else ""
        )
    console.print(table)
    for heading, status in (("To mend", "failed"), ("To look at", "warning")):
        mended = [row for row in rows if row.result.status == status and row.result.mends]
        if mended:
            console.print(f"\n[bold]{heading}[/]")
        for row in mended:
            console.print(f"  {row.check.title}:")
            for mend in row.result.mends:
                console.print(f"    {escape(mend)}", soft_wrap=True, highlight=False)


def closing_line(rows: list[Row], has_gpu: bool) -> str:
    """How many checks ended how, and what could not be checked."""
    counts = {status: sum(row.result.status == status for row in rows) for status in STATUSES}
    line = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    if not has_gpu:
        line += "; without a GPU nothing is said of fp8"
    return line


@dataclass
class Record:
    """What the JSON file holds. A check keeps its name for good."""

    path: Path | None
    """None: nothing is written."""
    options: dict[str, Any]
    checks: Sequence[Check]
    rows: list[Row] = field(default_factory=list)
    under_way: Check | None = None
    provenance: dict[str, Any] | None = None
    _began: float = field(default_factory=time.perf_counter)

    @property
    def wall_s(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._began

    def begin(self, check: Check) -> None:
        """`check` is under way."""
        self.under_way = check
        self.write(None)

    def add(self, row: Row) -> None:
        """A check has ended."""
        self.rows.append(row)
        self.under_way = None

    def write(self, exit_code: int | None) -> None:
        """Write the file as far as it is known; `exit_code` None: the checks are still running, or were killed."""
        if self.path is not None:
            write_json_atomic(self.path, self.contents(exit_code))

    def contents(self, exit_code: int | None) -> dict[str, Any]:
        """The file's contents."""
        reached = {row.check.name for row in self.rows}
        return {
            "exit_code": exit_code,
            "under_way": None if self.under_way is None else self.under_way.name,
            "wall_s": self.wall_s,
            "options": self.options,
            "checks": [
                {
                    "name": row.check.name,
                    "title": row.check.title,
                    "status": row.result.status,
                    "summary": row.result.summary,
                    "details": list(row.result.details),
                    "mends": list(row.result.mends),
                    "facts": row.result.facts,
                    "wall_s": row.wall_s,
                }
                for row in self.rows
            ],
            "not_checked": [check.name for check in self.checks if check.name not in reached]
            + [row.check.name for row in self.rows if row.result.status == "skipped"],
            "provenance": self.provenance,
        }


class Progress:
    """Says which check is under way: in place on a terminal, a line on stderr elsewhere."""

    def __init__(self, console: Console) -> None:
        self._status = console.status("") if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """What is under way."""
        if self._status is not None:
            self._status.update(f"{text} ...")
        else:
            print(f"{text} ...", file=sys.stderr, flush=True)
