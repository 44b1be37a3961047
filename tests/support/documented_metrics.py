"""Reads a run's metrics and checks that the table in docs/monitoring.md has all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from llm_fp8.utils.json_files import read_jsonl

_DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"
DOCUMENTED = set(re.findall(r"^\| `(\w+)` \|", _DOCUMENT.read_text(), re.MULTILINE))


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the records in the metrics.jsonl of a run folder, after checking that every metric is documented."""
    lines = read_jsonl(Path(folder) / "metrics.jsonl")
    undocumented = set().union(*lines) - DOCUMENTED
    assert not undocumented, f"docs/monitoring.md lacks {undocumented}"
    return lines
