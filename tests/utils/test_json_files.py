"""JSONL files as others write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_jsonl


def test_line_separators_within_a_string_end_no_line(tmp_path: Path):
    records = [{"problem": "a\u2028b\u0085c\x0bd"}, {"problem": "2"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records))
    assert read_jsonl(path) == records
    path.write_text(path.read_text() + "\n")
    assert read_jsonl(path) == records
    path.write_text("")
    assert read_jsonl(path) == []


def test_a_line_that_is_no_object_is_named(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    for line, reason in (("{", "is not valid JSON"), ("", "is not valid JSON"), ("3", "is not a JSON object")):
        path.write_text('{"a": 1}\n' + line + "\n")
        with pytest.raises(UserError, match=rf"{path}: line 2 {reason}"):
            read_jsonl(path)
