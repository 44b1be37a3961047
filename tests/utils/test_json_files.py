"""Tests of reading JSONL files and of writing JSON files atomically."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from llm_fp8.tools.script import run_script
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_jsonl, write_json_atomic


def test_line_separators_in_strings_do_not_split_records(tmp_path: Path):
    records = [{"problem": "a\u2028b\u0085c\x0bd"}, {"problem": "2"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records))
    assert read_jsonl(path) == records
    path.write_text(path.read_text() + "\n")
    assert read_jsonl(path) == records
    path.write_text("")
    assert read_jsonl(path) == []


def test_invalid_line_is_named(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    for line in ("{", "", "3"):
        path.write_text('{"a": 1}\n' + line + "\n")
        with pytest.raises(UserError, match=f"{path}: "):
            read_jsonl(path)


def test_full_disk_is_reported_and_keeps_previous_file(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "out.json").write_text("before")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SystemExit) as system_exit:
        run_script(lambda: write_json_atomic(tmp_path / "out.json", {}) or 0)
    assert system_exit.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {tmp_path / 'out.json'}: ") and printed.count("\n") == 1
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
