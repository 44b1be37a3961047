"""Datasets in: every form, and what a user is told when one cannot be read."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from llm_fp8.data.load import iterate, load_split, open_source, open_split_stream
from llm_fp8.errors import UserError

ROWS = [{"problem": f"p{i}", "generated_solution": f"s{i}"} for i in range(7)]


def _write_jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _read(name: Path | str, split: str = "train") -> list[dict[str, str]]:
    """The split's rows, after checking that the stream gives the same."""
    source = open_source(str(name))
    rows = list(load_split(source, split))
    assert list(iterate(source, split, open_split_stream(source, split))) == rows
    return rows


def test_files(tmp_path: Path) -> None:
    dataset = Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.to_csv(tmp_path / "a.csv")
    _write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    for name in ("a.parquet", "a.csv", "a.jsonl", "a.json"):
        assert _read(tmp_path / name) == ROWS, name


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_jsonl(tmp_path / "here" / "train.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    assert _read("here/train.jsonl") == ROWS
    assert _read("here") == ROWS
    assert _read("./here") == ROWS


def test_a_folder_like_a_hub_repository(tmp_path: Path) -> None:
    _write_jsonl(tmp_path / "data" / "train-00000-of-00002.jsonl", ROWS[:4])
    _write_jsonl(tmp_path / "data" / "train-00001-of-00002.jsonl", ROWS[4:])
    _write_jsonl(tmp_path / "data" / "validation-00000-of-00001.jsonl", ROWS[:2])
    source = open_source(str(tmp_path))
    assert source.splits == ["train", "validation"]
    assert _read(tmp_path) == ROWS
    assert _read(tmp_path, "validation") == ROWS[:2]


def test_a_folder_whose_readme_names_the_splits(tmp_path: Path) -> None:
    for split in ("train", "train_1M"):
        Dataset.from_list(ROWS if split == "train_1M" else ROWS[:1]).to_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet")
    splits = "".join(f"  - split: {s}\n    path: data/{s}-*\n" for s in ("train", "train_1M"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n")
    source = open_source(str(tmp_path))
    assert source.training_split(None) == "train_1M"
    assert _read(tmp_path, "train_1M") == ROWS


def test_only_the_files_of_the_split_are_read(tmp_path: Path) -> None:
    _write_jsonl(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "test.jsonl").write_text('{"problem": "broken\n')
    assert _read(tmp_path) == ROWS


def test_save_to_disk(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}).save_to_disk(tmp_path / "two")
    assert _read(tmp_path / "one") == ROWS
    assert open_source(str(tmp_path / "two")).splits == ["train", "test"]
    assert _read(tmp_path / "two", "test") == ROWS[:1]


def test_embedded() -> None:
    assert len(_read("embedded")) == 6000
    assert len(_read("embedded", "validation")) == 300


def test_splits(tmp_path: Path) -> None:
    _write_jsonl(tmp_path / "a" / "test.jsonl", ROWS)
    _write_jsonl(tmp_path / "b" / "train.jsonl", ROWS)
    assert open_source(str(tmp_path / "b")).training_split(None) == "train"
    assert open_source(str(tmp_path / "a")).training_split("test") == "test"
    with pytest.raises(UserError, match=r"--split_name train_2M: .* it has: train"):
        open_source(str(tmp_path / "b")).training_split("train_2M")
    with pytest.raises(UserError, match=r"no split 'train'; choose --split_name from: test"):
        open_source(str(tmp_path / "a")).training_split(None)


GOOD = json.dumps(ROWS[0])


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (f"{GOOD}\n{GOOD}\n{GOOD[:20]}\n{GOOD}\n", 3),
        (f"{GOOD}\n\n{GOOD}\n{GOOD[:-1]}", 4),
        (f'{GOOD}\n"text"\n', 2),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, content: str, line: int) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(content)
    for name in (file, tmp_path):
        source = open_source(str(name))
        with pytest.raises(UserError, match=rf"train\.jsonl, line {line}: not valid JSON"):
            load_split(source, "train")
        with pytest.raises(UserError, match=rf"train\.jsonl, line {line}: not valid JSON"):
            list(iterate(source, "train", open_split_stream(source, "train")))


def test_a_broken_list_and_a_broken_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1)[:-30])
    with pytest.raises(UserError, match=r"a\.json, line \d+: not valid JSON"):
        load_split(open_source(str(tmp_path / "a.json")), "train")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more than that")
    with pytest.raises(UserError, match=r"--dataset_name .*a\.parquet: split 'train' cannot be read"):
        load_split(open_source(str(tmp_path / "a.parquet")), "train")


def test_names_that_are_nothing(tmp_path: Path) -> None:
    for name in ("/no/such/folder", "./here", "missing.jsonl", "some/where/deep"):
        with pytest.raises(UserError, match=f"--dataset_name {name}: no such file or folder"):
            open_source(name)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"'\.txt' files are not understood"):
        open_source(str(tmp_path / "a.txt"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no data that can be read"):
        open_source(str(tmp_path / "empty"))


def test_no_network() -> None:
    # The tests run with HF_HUB_OFFLINE=1.
    with pytest.raises(UserError, match=r"nobody/nothing is not a local path.*hf download nobody/nothing"):
        open_source("nobody/nothing")


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does for a dataset that is not there, or gated, by the name asked for."""

    def _answer(self) -> None:
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("X-Error-Message", "refused")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = _answer

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["nobody/nothing", "somebody/gated"])
def test_a_hub_that_refuses(hub: str, name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    program = f"from llm_fp8.data.load import open_source\nopen_source({name!r})"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=120
    )
    assert f"UserError: --dataset_name {name} is not a local path, and the Hugging Face hub has no such dataset" in result.stderr
