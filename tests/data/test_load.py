"""Datasets in: every form, and what a user is told when one cannot be read."""

from __future__ import annotations

import bz2
import dataclasses
import errno
import gzip
import hashlib
import http.server
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import datasets
import pytest
from datasets import Dataset, DatasetDict

from llm_fp8.config.options import DataConfig
from llm_fp8.data import load
from llm_fp8.data.load import DatasetSource, find_splits, load_split, open_source, open_split_stream
from llm_fp8.utils.errors import UserError

NOBODY = 65534
ROWS = [{"problem": f"p{i}", "generated_solution": f"s{i}"} for i in range(7)]


def _write_jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _read(name: Path | str, split: str = "train") -> list[dict[str, str]]:
    """The split's rows, after checking that the stream gives the same."""
    source = open_source(str(name))
    rows = list(load_split(source, split))
    assert list(open_split_stream(source, split)) == rows
    return rows


def test_files(tmp_path: Path) -> None:
    dataset = Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.to_csv(tmp_path / "a.csv")
    _write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    for name in ("a.parquet", "a.csv", "a.jsonl", "a.json"):
        assert _read(tmp_path / name) == ROWS, name


@pytest.mark.parametrize("name", ["train.csv", "train.tsv", "train.csv.gz", "train.tsv.bz2", "train.csv.xz"])
def test_cells_in_a_folder_are_text_as_they_stand(tmp_path: Path, name: str) -> None:
    text = "problem,generated_solution\np0,42\np1,007\np2,\np3,None\n"
    _compressed(tmp_path / name, text.replace(",", "\t") if ".tsv" in name else text)
    assert [row["generated_solution"] for row in _read(tmp_path)] == ["42", "007", "", "None"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("damage", ["cut", "changed"])
@pytest.mark.parametrize("name", ["train.csv.gz", "train.jsonl.gz", "train.jsonl.xz"])
def test_damaged_compressed_files(tmp_path: Path, name: str, damage: str, streaming: bool) -> None:
    rows = [{"problem": hashlib.sha256(bytes([i])).hexdigest(), "generated_solution": "s"} for i in range(200)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    _compressed(tmp_path / name, text if "json" in name else text.replace(":", ","))
    content = bytearray((tmp_path / name).read_bytes())
    middle = len(content) // 2
    content[middle:] = b"" if damage == "cut" else bytes(byte ^ 0x55 for byte in content[middle:])
    (tmp_path / name).write_bytes(content)
    source = open_source(str(tmp_path))
    with pytest.raises(UserError, match=r"--dataset_name .*: split 'train' cannot be read"):
        list(open_split_stream(source, "train")) if streaming else load_split(source, "train")


def _compressed(path: Path, text: str) -> None:
    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(text.encode()))


@pytest.mark.parametrize("where", ["file", "folder"])
def test_cells_of_a_csv_file_are_text_as_they_stand(tmp_path: Path, where: str) -> None:
    cells = ["42", "02139", "0.10", "", "None", "N/A", "null", '"a, ""b"""']
    text = "problem,generated_solution\n" + "".join(f"p{i},{cell}\n" for i, cell in enumerate(cells))
    (tmp_path / "train.csv").write_text(text)
    rows = _read(tmp_path / "train.csv" if where == "file" else tmp_path)
    assert [row["generated_solution"] for row in rows] == [*cells[:-1], 'a, "b"']


@pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "."])
def test_a_changed_file_of_the_same_time_is_read_anew(tmp_path: Path, name: str) -> None:
    """As `cp -p`, rsync and archives leave it; its size may be the same too."""
    for answer in ("old", "new", "longer"):
        rows = [{"problem": "p", "generated_solution": answer}]
        path = tmp_path / ("train.csv" if name == "train.csv" else "train.jsonl")
        if path.suffix == ".csv":
            Dataset.from_list(rows).to_csv(path)
        else:
            _write_jsonl(path, rows)
        os.utime(path, (1e9, 1e9))
        assert _read(tmp_path / name) == rows


def test_a_changed_file_with_rows_of_several_kinds_is_read_anew(tmp_path: Path) -> None:
    for answer in ("old", "new"):
        rows = [{"problem": "p" * 11_000_000, "generated_solution": "s"}, {"problem": "p", "generated_solution": "s"}]
        path = _write_jsonl(tmp_path / "train.jsonl", [rows[0], {**rows[1], "generated_solution": answer, "more": "m"}])
        os.utime(path, (1e9, 1e9))
        assert load_split(open_source(str(path)), "train")[1]["generated_solution"] == answer


@pytest.mark.parametrize("streaming", [False, True])
def test_a_csv_row_with_more_cells_than_the_header_is_not_shifted(tmp_path: Path, streaming: bool) -> None:
    (tmp_path / "train-0.csv").write_text("problem,generated_solution\np,s\n")
    (tmp_path / "train-1.csv").write_text("problem,generated_solution\n1, 2 or 3?,3\np,s\n")
    source = open_source(str(tmp_path / "train-*.csv"))
    with pytest.raises(UserError, match=r"train-1\.csv: its first row has 3 cells and its header 2; quote text that"):
        (open_split_stream if streaming else load_split)(source, "train")


def test_large_cells_and_a_quote_that_is_not_closed(tmp_path: Path) -> None:
    large = "many words " * 20_000
    (tmp_path / "train.csv").write_text(f"problem,generated_solution\n{large},s\np,{large}\n")
    assert [row["problem"] for row in _read(tmp_path / "train.csv")] == [large, "p"]
    (tmp_path / "bad.csv").write_text('"problem,generated_solution\n' + "p,s\n" * 50_000)
    with pytest.raises(UserError, match="--dataset_name .*bad.csv: split 'train' cannot be read"):
        _read(tmp_path / "bad.csv")


def test_a_file_that_a_link_names_too_is_read_once(tmp_path: Path) -> None:
    _write_jsonl(tmp_path / "train-1.jsonl", ROWS[:3])
    (tmp_path / "train-latest.jsonl").symlink_to("train-1.jsonl")
    assert _read(tmp_path / "train-*.jsonl") == ROWS[:3]


@pytest.mark.parametrize("saved", [False, True])
def test_the_same_data_under_two_names(tmp_path: Path, saved: bool) -> None:
    folder = tmp_path / "data"
    if saved:
        Dataset.from_list(ROWS).save_to_disk(folder)
        other = tmp_path / "link"
        other.symlink_to(folder)
    else:
        other = _write_jsonl(folder / "train.jsonl", ROWS)
    with pytest.raises(UserError, match="has files that are named twice"):
        find_splits(DataConfig(dataset_name=f"{folder},{other}"))
    with pytest.raises(UserError, match=r"--eval_dataset_name .* has files that --dataset_name .* trains on"):
        find_splits(DataConfig(dataset_name=str(folder), eval_dataset_name=str(other)))


def test_files_of_the_hub_are_not_those_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same name: two datasets of the hub would be taken for one."""
    _write_jsonl(tmp_path / "data" / "train.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    hub = [DatasetSource(name, name, {"train": ["data/train.jsonl"]}) for name in ("an/owner", "another/owner")]
    monkeypatch.setattr(load, "open_source", lambda name, *rest: hub[name.startswith("another")])
    train, evaluation = find_splits(DataConfig(dataset_name="an/owner", eval_dataset_name="another/owner"))
    assert [source.name for source, _ in (*train, *evaluation)] == ["an/owner", "another/owner"]


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_jsonl(tmp_path / "here" / "train.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    assert _read("here/train.jsonl") == ROWS
    assert _read("here") == ROWS
    assert _read("./here") == ROWS


def test_a_pattern_of_files(tmp_path: Path) -> None:
    for part, rows in (("train-1", ROWS[:3]), ("train-2", ROWS[3:5]), ("deep/train-3", ROWS[5:]), ("valid", ROWS[:1])):
        _write_jsonl(tmp_path / f"{part}.jsonl", rows)
    assert _read(tmp_path / "train-*.jsonl") == ROWS[:5]
    assert sorted(row["problem"] for row in _read(tmp_path / "**" / "train-[0-9].jsonl")) == [f"p{i}" for i in range(7)]
    (tmp_path / "train-0.csv").write_text("problem\np\n")
    for pattern, said in (("train-*", "matches .csv, .jsonl files"), ("nothing-*", "matches no file")):
        with pytest.raises(UserError, match=rf"--dataset_name '.*/{re.escape(pattern)}' {said}; give a pattern of"):
            open_source(str(tmp_path / pattern))


def _with_configs(path: Path, default: bool = False) -> Path:
    """A folder laid out as the hub has openai/gsm8k: parquet files of two configurations, which the card names."""
    card = ""
    for number, config in enumerate(("main", "socratic")):
        Dataset.from_list(ROWS[: 5 + number]).to_parquet(path / config / "train-00000-of-00001.parquet")
        Dataset.from_list(ROWS[5 + number :]).to_parquet(path / config / "test-00000-of-00001.parquet")
        card += f"- config_name: {config}\n{'  default: true' if default and number else ''}\n  data_files:\n"
        card += "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in ("train", "test"))
    (path / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    return path


def test_configurations(tmp_path: Path) -> None:
    folder = str(_with_configs(tmp_path / "a"))
    for config, num_rows in (("main", 5), ("socratic", 6)):
        source = open_source(folder, config)
        assert list(source.files) == ["train", "test"]
        rows = list(load_split(source, "train"))
        assert rows == ROWS[:num_rows]
        assert list(open_split_stream(source, "train")) == rows
    with pytest.raises(
        UserError, match=r"a has several configurations; write --dataset_name .*a:CONFIG with one of: main, socratic\."
    ):
        open_source(folder)
    with pytest.raises(
        UserError, match=r"a has no configuration man; write --dataset_name .*a:CONFIG with one of: main, socratic\."
    ):
        open_source(folder, "man")
    with pytest.raises(
        UserError, match=r"--eval_dataset_name .* write --eval_dataset_name .*a:CONFIG with one of: main, socratic\."
    ):
        open_source(folder, "man", "--eval_dataset_name")
    assert _read(_with_configs(tmp_path / "b", default=True)) == ROWS[:6]
    with pytest.raises(UserError, match=r"a\.jsonl is no dataset with configurations, which main would be one of"):
        open_source(str(_write_jsonl(tmp_path / "a.jsonl", ROWS)), "main")


def test_several_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "a,b"):
        _write_jsonl(Path(f"{name}.jsonl"), ROWS)

    def found(name: str, **options: Any) -> list[list[tuple[str, str]]]:
        return [
            [(s.name, split) for s, split in each] for each in find_splits(DataConfig(dataset_name=name, **options))
        ]

    assert found("a.jsonl, b.jsonl") == [[("a.jsonl", "train"), ("b.jsonl", "train")], []]
    assert found("a,b.jsonl") == [[("a,b.jsonl", "train")], []], "a file of that name is one dataset"
    _with_configs(Path("c"))
    assert found("a.jsonl,c:main")[0] == [("a.jsonl", "train"), ("c", "train")]
    assert found("a.jsonl", eval_dataset_name="c:main")[1] == [("c", "test")]
    assert found("c:main", validation_split_name="test")[1] == [("c", "test")]
    _write_jsonl(Path("a:b.jsonl"), ROWS)
    assert found("a:b.jsonl")[0] == [("a:b.jsonl", "train")], "what exists is no configuration"


def test_names_that_hold_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_jsonl(tmp_path / "a[b]*?$.jsonl", ROWS)
    _write_jsonl(tmp_path / "ab0$.jsonl", ROWS[:2])
    assert _read(tmp_path / "a[b]*?$.jsonl") == ROWS
    _write_jsonl(tmp_path / "$x" / "train[1].jsonl", ROWS)
    assert _read(tmp_path / "$x") == ROWS
    _write_jsonl(tmp_path / "a[b]" / "train.jsonl", ROWS)
    monkeypatch.setenv("x", "y")
    for name in ("a[b]", "$x", "$x/train[1].jsonl"):
        with pytest.raises(UserError, match=r"is a variable, and \[, \* and \? in a folder's are patterns; rename it"):
            open_source(str(tmp_path / name))


@pytest.mark.parametrize(
    "card", ["configs: 3", "configs: [", "configs: [{data_files: 4}]", "dataset_info: {features: 7}"]
)
def test_a_broken_dataset_card(tmp_path: Path, card: str) -> None:
    _write_jsonl(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n")
    with pytest.raises(UserError, match=f"--dataset_name {tmp_path}: "):
        _read(tmp_path)


def test_the_home_folder_is_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _write_jsonl(tmp_path / "train.jsonl", ROWS)
    for name in ("~", str(tmp_path), "/"):
        with pytest.raises(UserError, match="is the folder .* itself; name the dataset's folder or file in it"):
            open_source(name)


def test_a_folder_like_a_hub_repository(tmp_path: Path) -> None:
    _write_jsonl(tmp_path / "data" / "train-00000-of-00002.jsonl", ROWS[:4])
    _write_jsonl(tmp_path / "data" / "train-00001-of-00002.jsonl", ROWS[4:])
    _write_jsonl(tmp_path / "data" / "validation-00000-of-00001.jsonl", ROWS[:2])
    source = open_source(str(tmp_path))
    assert list(source.files) == ["train", "validation"]
    assert _read(tmp_path) == ROWS
    assert _read(tmp_path, "validation") == ROWS[:2]


def test_a_folder_whose_readme_names_the_splits(tmp_path: Path) -> None:
    for split in ("train", "train_1M"):
        Dataset.from_list(ROWS if split == "train_1M" else ROWS[:1]).to_parquet(
            tmp_path / "data" / f"{split}-00000-of-00001.parquet"
        )
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
    assert list(open_source(str(tmp_path / "two")).files) == ["train", "test"]
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
    [(f"{GOOD}\n{GOOD}\n{GOOD[:20]}\n{GOOD}\n", 3), (f"{GOOD}\n\n{GOOD}\n{GOOD[:-1]}", 4), (f'{GOOD}\n"text"\n', 2)],
)
def test_a_broken_line_is_named(tmp_path: Path, content: str, line: int) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(content)
    for name in (file, tmp_path):
        source = open_source(str(name))
        with pytest.raises(UserError, match=rf"train\.jsonl, line {line}: not valid JSON"):
            load_split(source, "train")
        with pytest.raises(UserError, match=rf"train\.jsonl, line {line}: not valid JSON"):
            list(open_split_stream(source, "train"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("content", ["null", '\n null\n{"text": "a"}\n', "\ufeffnull"])
def test_a_first_row_that_is_null_does_not_end_the_process(tmp_path: Path, content: str, streaming: bool) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"a\.jsonl: its first row is null"):
        (open_split_stream if streaming else load_split)(open_source(str(tmp_path / "a.jsonl")), "train")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_file_that_this_user_may_not_read_is_named(name: str, streaming: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to other users
        Path(folder).chmod(0o755)
        path = Path(folder, name)
        path.write_text('{"text": "a"}\n')
        path.chmod(0)
        source, user = open_source(str(path)), os.geteuid()
        try:
            if user == 0:  # who may read everything
                os.seteuid(NOBODY)
            with pytest.raises(UserError, match=rf"--dataset_name .*: this user may not read {path}; change its perm"):
                (open_split_stream if streaming else load_split)(source, "train")
        finally:
            os.seteuid(user)


@pytest.mark.parametrize(
    ("value", "reason"),
    [("[" * 100_000 + "]" * 100_000, "recursion"), ("1" * 5000, "5000 digits")],
    ids=["nested", "digits"],
)
def test_what_python_cannot_read_either_is_named(tmp_path: Path, value: str, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": ' + value + "}\n")
    with pytest.raises(UserError, match=rf"a\.jsonl, line 2: not valid JSON \(.*{reason}"):
        load_split(open_source(str(path)), "train")


def test_a_broken_list_and_a_broken_parquet_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1)[:-30])
    with pytest.raises(UserError, match=r"a\.json, line \d+: not valid JSON"):
        load_split(open_source(str(tmp_path / "a.json")), "train")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more than that")
    with pytest.raises(UserError, match=r"--dataset_name .*a\.parquet: split 'train' cannot be read"):
        load_split(open_source(str(tmp_path / "a.parquet")), "train")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"problem": "1 + 1?", "problem": "2", "generated_solution": "2"}', "the key 'problem' comes twice"),
        ('{"problem": "1 + 1?", "generated_solution": "\\ud800"}', r"'\\ud800' is half of a character"),
    ],
)
@pytest.mark.parametrize("num_before", [0, 3])
def test_what_python_reads_and_arrow_does_not_is_named_with_its_line(tmp_path, line, reason, num_before):
    good = '{"problem": "2 + 2?", "generated_solution": "4"}'
    (tmp_path / "train.jsonl").write_text("\n".join([good] * num_before + [line]))
    with pytest.raises(UserError, match=rf"train\.jsonl, line {num_before + 1}: not valid JSON \({reason}\)"):
        load_split(open_source(str(tmp_path / "train.jsonl")), "train")


def test_later_rows_may_have_other_columns_or_types(tmp_path):
    """In one file beyond the first 10 MB, which the library takes for all, and in another file."""
    wide = "x" * 2000
    rows = [{"problem": f"{i}", "generated_solution": wide, "level": i} for i in range(6000)]
    rows += [{"problem": "last", "generated_solution": wide, "level": "hard", "note": "late"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text(json.dumps({"problem": "p", "generated_solution": "s", "source": "b"}) + "\n")
    whole = load_split(open_source(str(tmp_path / "a.jsonl")), "train")
    assert len(whole) == 6001 and whole[0]["note"] is None and whole[6000]["note"] == "late"
    both = load_split(open_source(str(tmp_path / "*.jsonl")), "train")
    assert len(both) == 6002 and both[6001]["source"] == "b" and both[6001]["note"] is None
    assert load_split(open_source(str(tmp_path / "*.jsonl")), "train")._fingerprint == both._fingerprint


@pytest.mark.parametrize(
    ("code", "said"), [(errno.EROFS, "Read-only file system"), (errno.EACCES, "Permission denied")]
)
def test_a_cache_that_cannot_be_written_is_no_broken_dataset(tmp_path, monkeypatch, code, said):
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))

    def read_only(*args, **kwargs):
        try:
            raise OSError(code, said, str(tmp_path / "json.lock"))
        except OSError as error:
            raise datasets.exceptions.DatasetGenerationError("wrapped") from error

    monkeypatch.setattr(datasets, "load_dataset", read_only)
    with pytest.raises(UserError, match=rf"^{tmp_path}: {said}; choose .* \(HF_DATASETS_CACHE or HF_HOME\)"):
        load_split(open_source(str(tmp_path / "a.jsonl")), "train")


@pytest.mark.parametrize("name", ["embedded", "a.jsonl"])
def test_a_cache_that_cannot_be_made_is_no_broken_dataset(name, monkeypatch):
    """As in a container that runs as a user without a home folder. A folder and a file are opened in two ways."""
    with tempfile.TemporaryDirectory() as home:  # pytest's own is closed to other users
        Path(home, "a.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
        os.chmod(home, 0o555)
        cache = f"{home}/.cache/huggingface/datasets"
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        monkeypatch.chdir(home)
        user = os.geteuid()
        try:
            if user == 0:  # who may write anywhere
                os.seteuid(NOBODY)
            with pytest.raises(UserError, match=rf"^{cache}: Permission denied; choose .*HF_HOME"):
                load_split(open_source(name), "train")
        finally:
            os.seteuid(user)


def test_evaluation_is_on_one_dataset(tmp_path):
    for name in ("a", "b", "c", "b,c"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    data, several = DataConfig(dataset_name=f"{tmp_path}/a.jsonl"), f"{tmp_path}/b.jsonl,{tmp_path}/c.jsonl"
    with pytest.raises(UserError, match=f"^--eval_dataset_name {several} names several datasets, and evaluation is on"):
        find_splits(dataclasses.replace(data, eval_dataset_name=several))
    of_that_name = str(tmp_path / "b,c.jsonl")
    ((source, _),) = find_splits(dataclasses.replace(data, eval_dataset_name=of_that_name))[1]
    assert source.name == of_that_name


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


COMMIT = "a" * 40


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does: for one dataset that is there, for one that is gated, and for others that are not
    there.
    """

    files: dict[str, bytes]
    downloads: list[str]

    def _answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "own/math" not in path:
            self._refuse(403, "GatedRepo") if "gated" in path else self._refuse(404, "RepoNotFound")
        elif "/resolve/" in path:
            file = path.split("/resolve/")[1].split("/", 1)[1]
            if file not in self.files:
                return self._refuse(404, "EntryNotFound")
            if self.command == "GET":
                self.downloads.append(file)
            self._send(
                self.files[file], {"ETag": f'"{hashlib.sha1(self.files[file]).hexdigest()}"', "X-Repo-Commit": COMMIT}
            )
        elif "/tree/" in path:
            folder = path.split(COMMIT)[1].strip("/")
            inside = [file for file in self.files if folder in ("", file.split("/")[0])]
            entries = [{"type": "file", "path": file, "size": len(self.files[file]), "oid": COMMIT} for file in inside]
            directory = [{"type": "directory", "path": "data", "oid": COMMIT}]
            self._send_json(entries if folder else [e for e in entries if "/" not in str(e["path"])] + directory)
        else:
            info = {"id": "own/math", "sha": COMMIT, "private": False, "gated": False, "disabled": False, "tags": []}
            self._send_json({**info, "siblings": [{"rfilename": file} for file in self.files]})

    do_GET = do_HEAD = do_POST = _answer

    def _send_json(self, content: Any) -> None:
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        for name, value in {
            "X-Error-Code": code,
            "X-Error-Message": "no",
            "X-Repo-Commit": COMMIT,
            "Content-Length": "0",
        }.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    splits = "".join(f"  - split: {split}\n    path: data/{split}-*\n" for split in ("train", "train_1M"))
    _Hub.files = {"README.md": f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n".encode()}
    for split, rows in (("train", ROWS), ("train_1M", ROWS[:3])):
        Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
        _Hub.files[f"data/{split}-00000-of-00001.parquet"] = (tmp_path / "rows.parquet").read_bytes()
    _Hub.downloads = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def _run_with_hub(hub: str, home: Path, program: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    flag = "1" if offline else "0"
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub,
        "HF_HUB_OFFLINE": flag,
        "HF_DATASETS_OFFLINE": flag,
        "HF_HOME": str(home),
    }
    environment["HF_DATASETS_CACHE"] = str(home / "datasets")
    command = [sys.executable, "-c", "from llm_fp8.data.load import *\n" + program]
    return subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_a_hub_that_refuses(hub: str, tmp_path: Path) -> None:
    program = """
for name in ("nobody/nothing", "somebody/gated"):
    try:
        open_source(name)
    except UserError as error:
        print(error)
"""
    said = _run_with_hub(hub, tmp_path / "home", program).stdout.splitlines()
    for name, sentence in zip(("nobody/nothing", "somebody/gated"), said, strict=True):
        assert sentence.startswith(
            f"--dataset_name {name} is not a local path, and the Hugging Face hub has no such dataset"
        )


@pytest.mark.slow
def test_a_hub_dataset_and_then_without_the_hub(hub: str, tmp_path: Path) -> None:
    program = """
source = open_source("own/math")
split = source.training_split(None)
rows = list(open_split_stream(source, split))
print(list(source.files), split, len(load_split(source, split)), len(rows))
"""
    online = _run_with_hub(hub, tmp_path / "home", program)
    assert online.stdout.strip() == "['train', 'train_1M'] train_1M 3 3", online.stderr
    assert {file for file in _Hub.downloads if file.startswith("data/")} == {"data/train_1M-00000-of-00001.parquet"}
    offline = _run_with_hub("http://127.0.0.1:9", tmp_path / "home", program, offline=True)
    assert offline.stdout.strip() == "['train_1M'] train_1M 3 3", offline.stderr


@pytest.mark.slow
def test_a_configuration_on_the_hub(hub: str, tmp_path: Path) -> None:
    program = """
source = open_source("own/math", "default")
print(list(source.files), len(load_split(source, "train_1M")))
try:
    open_source("own/math", "main")
except UserError as error:
    print(error)
"""
    online = _run_with_hub(hub, tmp_path / "home", program)
    assert online.stdout.splitlines() == [
        "['train', 'train_1M'] 3",
        "--dataset_name own/math has no configuration main; write --dataset_name own/math:CONFIG with one of: default.",
    ], online.stderr
    offline = _run_with_hub("http://127.0.0.1:9", tmp_path / "home", program.split("try")[0], offline=True)
    assert offline.stdout.splitlines() == ["['train_1M'] 3"], offline.stderr


@pytest.mark.slow
def test_a_cache_without_the_data_is_no_dataset(hub: str, tmp_path: Path) -> None:
    # Only the README was ever fetched.
    online = _run_with_hub(hub, tmp_path / "home", "open_source('own/math')")
    assert online.returncode == 0, online.stderr
    offline = _run_with_hub("http://127.0.0.1:9", tmp_path / "home", "open_source('own/math')", offline=True)
    assert (
        "UserError: --dataset_name own/math is not a local path, and the Hugging Face hub cannot be reached"
        in offline.stderr
    )
