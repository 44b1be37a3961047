"""A comparison on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from llm_fp8.compare.comparison import Comparison
from llm_fp8.compare.rows import COLUMNS, table_rows


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Verdicts, table, failures and flags."""
    for verdict in comparison.verdicts.values():
        console.print(f"[{verdict.conclusion}] {verdict.sentence}", markup=False, highlight=False)
    console.print()
    # Figures down, arms across: a table of ten columns does not fit a terminal.
    table = Table("", *(arm.name for arm in comparison.arms))
    rows = table_rows(comparison.arms)
    for number, column in enumerate(COLUMNS[1:], start=1):
        table.add_row(column.title, *(row[number] for row in rows))
    console.print(table, highlight=False, markup=False)
    for failure in comparison.failures:
        console.print(
            f"FAILED {failure.arm} seed {failure.seed}: {failure.reason} ({failure.log})", markup=False, highlight=False
        )
    for difference in comparison.differences:
        values = "; ".join(f"{value} ({', '.join(labels)})" for value, labels in difference.values.items())
        console.print(f"flag [{difference.effect}] {difference.field}: {values}", markup=False, highlight=False)
