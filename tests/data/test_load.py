"""Reading datasets: files, folders, patterns, splits, the hub's cache, and the errors for unreadable datasets."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest
from datasets import Dataset, DatasetDict

from llm_fp8.config.options import DataConfig
from llm_fp8.data.load import MOST_OTHER_FILES, ROW, find_splits, load_split, open_source
from llm_fp8.data.rows import read_row
from llm_fp8.utils.errors import UserError
from tests.support.small import write_jsonl

ROWS = [{"problem": f"p{i}", "generated_solution": f"s{i}"} for i in range(7)]


def _read(name: Path | str, split: str = "train") -> list[dict[str, Any]]:
    """Return the rows of `split` of the dataset `name`. Check that streaming gives the same rows."""
    source = open_source(str(name)).with_split(split, "--split_name", ())
    rows = list(load_split(source))
    assert list(load_split(source, streaming=True)) == rows
    return [read_row(row[ROW]) if ROW in row else row for row in rows]


def test_files_of_every_format_give_the_same_rows(tmp_path: Path) -> None:
    for first in "pq":  # the second time, other rows in files of the same name, size and time, as `cp -p` leaves them
        rows = [{**row, "problem": f"{first}{i}"} for i, row in enumerate(ROWS)]
        dataset = Dataset.from_list(rows)
        dataset.to_parquet(tmp_path / "a.parquet")
        dataset.to_csv(tmp_path / "a.csv")
        write_jsonl(tmp_path / "a.jsonl", rows)
        (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
        for name in ("a.parquet", "a.csv", "a.jsonl", "a.json", "b.jsonl.gz"):
            os.utime(tmp_path / name, (0, 0))
            assert _read(tmp_path / name) == rows, name
    dataset.to_pandas().to_csv(tmp_path / "index.csv")
    assert _read(tmp_path / "index.csv") == [{"Unnamed: 0": str(i), **row} for i, row in enumerate(rows)]


@pytest.mark.parametrize("name", ["train.csv", "train.tsv", "train.csv.gz"])
def test_csv_cells_are_unchanged_text(tmp_path: Path, name: str) -> None:
    cells = ["42", "02139", "0.10", "", "None", "N/A", "null", "2024-01-31", '"a, ""b"""']
    text = "problem,generated_solution\n" + "".join(f"p{i},{cell}\n" for i, cell in enumerate(cells))
    text = text.replace(",", "\t").replace("a\t", "a,") if "tsv" in name else text
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    for source in (tmp_path, tmp_path / name) if name != "train.tsv" else (tmp_path,):
        assert [row["generated_solution"] for row in _read(source)] == [*cells[:-1], 'a, "b"']


def test_csv_row_with_more_cells_than_the_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("problem,generated_solution\n1, 2 or 3?,3\np,s\n")
    with pytest.raises(UserError, match=r"--dataset_name .*train\.csv: .*Expected 2 columns, got 3"):
        _read(tmp_path / "train.csv")


def test_wildcards_match_files(tmp_path: Path) -> None:
    for part, rows in (("train-1", ROWS[:3]), ("train-2", ROWS[3:5]), ("deep/train-3", ROWS[5:]), ("valid", ROWS[:1])):
        write_jsonl(tmp_path / f"{part}.jsonl", rows)
    assert _read(tmp_path / "train-*.jsonl") == ROWS[:5]
    rows = _read(tmp_path / "**" / "train-[0-9].jsonl")
    assert sorted(row["problem"] for row in rows) == [f"p{i}" for i in range(7)]
    write_jsonl(tmp_path / "a[b]*.jsonl", ROWS)
    assert _read(tmp_path / "a[b]*.jsonl") == ROWS
    for pattern in ("train-*", "nothing-*.jsonl"):
        with pytest.raises(UserError, match="--dataset_name .*-"):
            open_source(str(tmp_path / pattern))


def test_folders_are_read_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rows in (
        ("train-00000-of-00002", ROWS[:4]),
        ("train-00001-of-00002", ROWS[4:]),
        ("validation-00000-of-00001", ROWS[:2]),
    ):
        write_jsonl(Path("hub", "data", f"{name}.jsonl"), rows)
    assert list(open_source("hub").files) == ["train", "validation"]
    assert _read("hub") == _read("./hub") == ROWS and _read("hub", "validation") == ROWS[:2]
    Path("hub", "data", "validation-00000-of-00001.jsonl").write_text('{"problem": "broken\n')
    assert _read("hub") == ROWS, "only the files of the split are read"
    shutil.copytree("hub", "[hub]*")
    assert _read("[hub]*/data/train-?????-of-*.jsonl") == ROWS
    with pytest.raises(UserError, match=r"--dataset_name \[hub\]\*: .* rename it"):
        open_source("[hub]*")
    for split, number in (("old", 3), ("test", 1)):  # the second time overwrites the folders
        Dataset.from_list(ROWS * number).save_to_disk("one", num_shards=number)
        DatasetDict({"train": Dataset.from_list(ROWS), split: Dataset.from_list(ROWS[:1])}).save_to_disk("two")
    assert list(open_source("two").files) == ["train", "test"]
    datasets.load_from_disk("one").map(lambda row: {"problem": "cached"})  # leaves a cache file in the folder
    assert _read("one") == ROWS and _read("two", "test") == ROWS[:1]
    assert len(_read("embedded", "validation")) == 300


def test_split_is_train_or_the_only_variant_or_the_users_choice(tmp_path: Path) -> None:
    for name in ("a/train", "b/train", "b/train_1M", "c/test"):
        Dataset.from_list(ROWS).to_parquet(tmp_path / f"{name}-00000-of-00001.parquet")
    splits = "".join(f"  - split: {s}\n    path: {s}-*\n" for s in ("train", "train_1M"))
    (tmp_path / "b" / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n")

    def chosen_split(name: str, **options: Any) -> str:
        ((source,), _) = find_splits(DataConfig(dataset_name=str(tmp_path / name), **options))
        return source.split

    assert (chosen_split("a"), chosen_split("b")) == ("train", "train_1M")
    with pytest.raises(UserError, match="--split_name train_2M: .* train"):
        chosen_split("a", split_name="train_2M")
    with pytest.raises(UserError, match="test; choose one with --split_name"):
        chosen_split("c")


def test_dataset_name_may_have_configurations_and_commas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`c:main` is a configuration of the dataset `c`, a folder laid out like openai/gsm8k on the hub. Its card lists
    the files of two configurations. A comma separates datasets, unless it is part of a file's name.
    """
    monkeypatch.chdir(tmp_path)
    card = ""
    for number, config in enumerate(("main", "socratic")):
        Dataset.from_list(ROWS[: 5 + number]).to_parquet(Path("c", config, "train-00000-of-00001.parquet"))
        Dataset.from_list(ROWS[5 + number :]).to_parquet(Path("c", config, "test-00000-of-00001.parquet"))
        card += f"- config_name: {config}\n  data_files:\n"
        card += "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in ("train", "test"))
    Path("c", "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    assert _read("c:main") == ROWS[:5] and _read("c:socratic", "test") == ROWS[6:]
    for name in ("c", "c:man"):
        with pytest.raises(UserError, match=f"--dataset_name {name}: .*main.*socratic"):
            open_source(name)
    for name in ("a", "a,b", "a:b"):
        write_jsonl(Path(f"{name}.jsonl"), ROWS)

    def splits_of(name: str, **options: Any) -> list[list[tuple[str, str]]]:
        parts = find_splits(DataConfig(dataset_name=name, **options))
        return [[(source.name, source.split) for source in each] for each in parts]

    assert splits_of("a.jsonl, c:main") == [[("a.jsonl", "train"), ("c:main", "train")], []]
    assert splits_of("a,b.jsonl") == [[("a,b.jsonl", "train")], []], "a file of that name is one dataset"
    assert splits_of("a:b.jsonl")[0] == [("a:b.jsonl", "train")]
    assert splits_of("a.jsonl", eval_dataset_name="c:main")[1] == [("c:main", "test")]
    with pytest.raises(UserError, match="--eval_dataset_name .*: split train is trained on"):
        splits_of("a.jsonl", eval_dataset_name="./a.jsonl")
    with pytest.raises(UserError, match="--dataset_name has an empty name"):
        splits_of("a.jsonl,")


def test_unreadable_dataset_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1)[:-30])
    (tmp_path / "a.jsonl").write_text('{"problem": "p"}\n{"problem": \n')
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more than that")
    (tmp_path / "bad.csv").write_text('"problem,generated_solution\n' + "p,s\n" * 50)
    for name in ("a.json", "a.jsonl", "a.parquet", "bad.csv"):
        with pytest.raises(UserError, match=f"--dataset_name .*{name}: cannot read the dataset"):
            _read(tmp_path / name)
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "card").mkdir()
    write_jsonl(tmp_path / "card" / "train.jsonl", ROWS)
    (tmp_path / "card" / "README.md").write_text("---\nconfigs: 3\n---\n")
    (tmp_path / "home").mkdir()
    for number in range(MOST_OTHER_FILES + 1):
        (tmp_path / "home" / f"{number}.py").touch()
    with pytest.raises(UserError, match=r"--dataset_name .*home: the folder holds more than"):
        open_source(str(tmp_path / "home"))
    names = ("/no/such/folder", "./here", "missing.jsonl", "some/where/deep", "nobody/nothing")  # HF_HUB_OFFLINE=1
    for name in (*names, str(tmp_path / "a.txt"), str(tmp_path / "empty"), str(tmp_path / "card")):
        with pytest.raises(UserError, match=f"--dataset_name {name}"):
            open_source(name)


def test_only_the_files_of_the_split_are_loaded_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {split: [f"hf://datasets/own/math@0a1b/data/{split}-00000.parquet"] for split in ("train", "train_1M")}
    builder = SimpleNamespace(name="parquet", config=SimpleNamespace(data_files=files))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *name, **files: builder)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: (names, options["data_files"]))
    ((source,), _) = find_splits(DataConfig(dataset_name="own/math:main"))
    expected = ("own/math", "main"), {"train_1M": ["data/train_1M-00000.parquet"]}
    assert load_split(source) == load_split(source, streaming=True) == expected


def test_hub_dataset_is_read_from_the_cache_when_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache has only one of the two splits that the dataset's card lists."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder, commit = tmp_path / "datasets--own--math", "a" * 40
    snapshot = folder / "snapshots" / commit
    Dataset.from_list(ROWS).to_parquet(snapshot / "data" / "train_1M-00000-of-00001.parquet")
    splits = "".join(f"  - split: {split}\n    path: data/{split}-*\n" for split in ("train", "train_1M"))
    (snapshot / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    assert _read("own/math", "train_1M") == ROWS
