"""JSON files that survive a crash and that every reader accepts. A file is written under another name, then renamed.
JSON lacks NaN and infinity: the strings "NaN", "Infinity" and "-Infinity" replace them, and are read as floats again.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from llm_fp8.utils.errors import reading

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _plain(value: Any) -> Any:
    """Replace non-finite floats, which JSON lacks, by strings."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return next((word for word, number in _WORDS.items() if value == number), "NaN")
    return value


def with_floats(value: Any) -> Any:
    """Replace the strings for NaN and infinity in a value read from JSON by floats, at any depth."""
    if isinstance(value, dict):
        return {key: with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_floats(item) for item in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value


def json_line(record: dict[str, Any]) -> str:
    """Return `record` as one line of a JSONL file, newline included."""
    return json.dumps(_plain(record), allow_nan=False, default=os.fspath) + "\n"


def write_json_atomic(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, whole or not at all; TypeError if JSON cannot hold it."""
    write_text_atomic(path, json.dumps(_plain(value), indent=2, allow_nan=False, default=os.fspath) + "\n")


def read_json(path: Path, flag: str = "the file") -> dict[str, Any]:
    """Return the object in a JSON file, NaN and infinity as floats; otherwise a `UserError` names `flag`."""
    with reading(flag, path, "a JSON object"):
        return with_floats({**json.loads(path.read_text(encoding="utf-8"))})


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSONL file, as `read_json` does; `UserError` gives the number of a bad line."""
    records = []
    with reading("the file", path), path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            with reading("the file", f"{path}: line {number}", "a JSON object"):
                records.append(with_floats({**json.loads(line)}))
    return records


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
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
        error.filename = str(path)  # the error of a full disk names no file
        raise
