"""JSON that survives a crash and that every reader accepts, and how files of it are read.

A file is written beside its place and renamed over it, so that a reader never sees half of one. JSON has no NaN or
infinity; they are written as the strings "NaN", "Infinity" and "-Infinity", which `read_json` turns into floats again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import yaml

from llm_fp8.utils.errors import UserError

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What `yaml.safe_load` (PyYAML 6) raises on a damaged file: it checks numbers and dates little."""

_MAX_DIGITS, _MAX_LEVELS = 300, 64
"""Of an integer, which then is in the range of floats, and of nesting. Files of ours stay far below."""
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false", NoneType: "absent"}
_KINDS |= {int: "a whole number", float: "a number"}


def _plain(value: Any) -> Any:
    """`value` with everything JSON lacks replaced: non-finite floats and paths by strings, tuples by lists."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def with_floats(value: Any) -> Any:
    """`value`, as read from JSON, with the strings that stand for NaN and infinity replaced by floats, at any depth."""
    if isinstance(value, dict):
        return {key: with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_floats(item) for item in value]
    return _WORDS.get(value, value) if isinstance(value, str) else value


def json_line(record: dict[str, Any]) -> str:
    """`record` as one line of a JSONL file, newline included."""
    return json.dumps(_plain(record), allow_nan=False) + "\n"


def write_json_atomic(path: Path, value: Any) -> None:
    """Write `value` to `path` as indented JSON, whole or not at all; TypeError for what JSON cannot hold."""
    write_text_atomic(path, json.dumps(_plain(value), indent=2, allow_nan=False) + "\n")


def write_jsonl_atomic(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write `records` to `path`, a line each; otherwise as `write_json_atomic`."""
    write_text_atomic(path, "".join(map(json_line, records)))


def read_text(path: Path) -> str:
    """The text of a file; `UserError` where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _require_shallow(value: Any, levels: int = _MAX_LEVELS) -> None:
    if levels == 0:
        raise ValueError(f"nested more than {_MAX_LEVELS} levels deep")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(item, (dict, list)):
            _require_shallow(item, levels - 1)


def parse_json(text: str, where: str) -> dict[str, Any]:
    """The JSON object in `text`; `UserError` that begins with `where` where it holds none."""
    try:
        value = json.loads(text, parse_int=_integer)
        _require_shallow(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON ({error}); was it damaged?") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} is not a JSON object but {_KINDS.get(type(value), 'another value')}.")
    return value


def read_json(path: Path, entries: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The object of a JSON file, NaN and infinity as floats; `UserError` where it cannot be read, is none or lacks
    `entries` (`require_entries`).
    """
    value: dict[str, Any] = with_floats(parse_json(read_text(path), str(path)))
    require_entries(str(path), value, entries or {})
    return value


def require_entries(where: str, content: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Raise `UserError`, beginning with `where`, unless `content` has `entries`: dotted name -> type.

    "*" in a name stands for each item of a list or an object. An entry of type `X | None` may be missing.
    """
    for name, kind in entries.items():
        allowed = get_args(kind) or (kind,)
        for value in _values_at(content, name.split(".")):
            if value is None and NoneType not in allowed:
                raise UserError(f"{where} lacks {name}; was it damaged?")
            fits = isinstance(value, (*allowed, *((int,) if float in allowed else ())))
            if not fits or (isinstance(value, bool) and bool not in allowed):  # Python counts a bool as an int
                words = " or ".join(_KINDS[one] for one in allowed)
                raise UserError(f"{where}: {name} must be {words}, not {value!r:.60}; was it damaged?")


def _values_at(content: Any, keys: Sequence[str]) -> list[Any]:
    """The values of a dotted name, None for one that is missing."""
    if not keys:
        return [content]
    if keys[0] != "*":
        return _values_at(content.get(keys[0]) if isinstance(content, dict) else None, keys[1:])
    items = content.values() if isinstance(content, dict) else content or ()
    return [value for item in items for value in _values_at(item, keys[1:])]


def parse_metrics(line: str, where: str) -> dict[str, float]:
    """A line of metrics.jsonl, NaN and infinity as floats; `UserError` that begins with `where` where it is none."""
    record: dict[str, float] = with_floats(parse_json(line, where))
    require_entries(where, record, {**dict.fromkeys(record, float), "step": int, "tokens_seen": int | None})
    return record


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The records of a run's metrics.jsonl (`parse_metrics`)."""
    return [parse_metrics(line, where) for where, line in _lines(path)]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, strings as they stand there: "Infinity" can be a problem's answer. Raises
    `UserError` with the number of a line that holds none.
    """
    return [parse_json(line, where) for where, line in _lines(path)]


def _lines(path: Path) -> list[tuple[str, str]]:
    """Each line of a file, behind the words that name it."""
    text = read_text(path)
    # Not `splitlines`, which also divides at U+2028 and others that a JSON string may hold.
    lines = text.removesuffix("\n").split("\n") if text else []
    return [(f"{path}: line {number}", line) for number, line in enumerate(lines, start=1)]


def require_writable(flag: str, path: Path) -> None:
    """Make the folder of an output file; `UserError` now where the file could not be written after long work."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}; give a file in a folder that can be written.") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{flag} {path}: not a file that can be written; give another.")


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
        error.filename = str(path)  # a full disk names none
        raise
