"""The table on the terminal, and the JSON file."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

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


def record(rows: list[Row], exit_code: int, options: dict[str, Any], provenance: dict[str, Any] | None) -> dict[str, Any]:
    """The contents of the JSON file. A check keeps its name for good."""
    return {
        "exit_code": exit_code,
        "options": options,
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
            for row in rows
        ],
        "not_checked": [row.check.name for row in rows if row.result.status == "skipped"],
        "provenance": provenance,
    }
