"""What a check script on GPUs prints and, with `--output FILE`, keeps as JSON with versions, GPUs and commit."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.utils.json_files import write_json_atomic

_RECORDS: list[dict[str, Any]] = []


def report(record: dict[str, Any]) -> None:
    """Print a check's record as a line of JSON and keep it; called on one rank."""
    print(json.dumps(record), flush=True)
    _RECORDS.append(record)


def write_records(all_hold: bool) -> None:
    """Write what was reported to the `--output` of the command line, if it has one; called on the same rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", help="JSON file to write")
    output = parser.parse_args(sys.argv[1:]).output
    if output is not None:
        record = {"provenance": collect_provenance(sys.argv), "all_hold": all_hold, "checks": _RECORDS}
        write_json_atomic(Path(output), record)
