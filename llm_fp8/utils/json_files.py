"""Read and write JSON files that survive a crash. A file is written under another name, then renamed.
JSON has no NaN or infinity. The strings "NaN", "Infinity" and "-Infinity" replace them, and are read as floats again.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from llm_fp8.utils.errors import reading

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _plain(value: Any) -> Any:
    """Replace non-finite floats by strings, at any depth."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return next((text for text, number in _NON_FINITE.items() if value == number), "NaN")
    return value


def with_floats(value: Any) -> Any:
    """Replace the strings for NaN and infinity by floats in a value read from JSON, at any depth."""
    if isinstance(value, dict):
        return {key: with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_floats(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def json_line(record: dict[str, Any]) -> str:
    """Return `record` as one line of a JSONL file, including the newline."""
    return json.dumps(_plain(record), allow_nan=False, default=os.fspath) + "\n"


def write_json_atomic(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, completely or not at all. Raise `TypeError` if it is not JSON."""
    write_text_atomic(path, json.dumps(_plain(value), indent=2, allow_nan=False, default=os.fspath) + "\n")


def read_json(path: Path, flag: str = "the file") -> dict[str, Any]:
    """Return the object in a JSON file. If it cannot be read, raise a `UserError` that names `flag` and `path`."""
    with reading(flag, path, "a JSON object"):
        return with_floats({**json.loads(path.read_text(encoding="utf-8"))})


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSONL file, one per line. If it cannot be read, raise a `UserError` that names it."""
    with reading("the file", path, "lines of JSON objects"), path.open(encoding="utf-8") as file:
        return [with_floats({**json.loads(line)}) for line in file]


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` to `path`, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)  # the error of a full disk lacks the file name
        raise
