"""The table of environment variables in docs/multi_gpu.md."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs" / "multi_gpu.md"


def documented_variables() -> dict[str, str]:
    """Each variable of the documentation's table -> what its row says of acting here; a `*` becomes some ending."""
    _, _, section = DOCS.read_text().partition("## Environment variables\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| `")]
    quoted = [
        (word, acts) for cell, acts, _ in rows for words in re.findall(r"`([^`]*)`", cell) for word in words.split()
    ]
    names = [(word.partition("=")[0], acts) for word, acts in quoted]
    assert len(names) == len(dict(names)), "each variable stands in one row"
    return {name.replace("*", "SOMETHING"): acts for name, acts in names}
