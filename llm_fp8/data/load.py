"""A hub id or a local path (--dataset_name) becomes one split of a `datasets` dataset.

    embedded                    the dataset of this repository
    owner/name                  a dataset of the Hugging Face hub
    path/to/folder              laid out as the hub lays them out, or written by `save_to_disk`
    path/to/file.jsonl          also .json, .parquet, .csv
    'path/to/train-*.jsonl'     all files that match, as one dataset
    any of these:configuration  one of its configurations (openai/gsm8k:main)
    any of these,another        several datasets; --dataset_weights says how many rows of each

Only the files of the requested split are downloaded and converted, however large the other splits are. Cells of CSV
files stay text.
"""

from __future__ import annotations

import dataclasses
import errno
import glob
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
from datasets import Dataset, DatasetDict, Features, IterableDataset, Value
from datasets.data_files import get_data_patterns, sanitize_patterns
from datasets.exceptions import DatasetGenerationError
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard, try_to_load_from_cache

from llm_fp8.config.options import EMBEDDED, DataConfig
from llm_fp8.data.embedded import DATASET_DIR
from llm_fp8.utils.errors import UserError, reading, reason_not_written

FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
SEPARATORS = {".csv": ",", ".tsv": "\t"}
DEFAULT_SPLITS = ("train_1M", "train")
"""`--split_name` defaults to the first of these that the dataset has."""
VALIDATION_SPLIT = "validation"
EVALUATION_SPLITS = (VALIDATION_SPLIT, "test", *DEFAULT_SPLITS)
"""`--validation_split_name` defaults to the first of these that --eval_dataset_name has."""


@dataclass(frozen=True)
class DatasetSource:
    """A dataset and its splits."""

    name: str
    path: str
    """What `datasets.load_dataset` takes."""
    files: dict[str, list[str]]
    """Split -> its data files, absolute or relative to the hub's repository; none where they are not known."""
    config: str | None = None
    """Its configuration; None for the default one."""
    flag: str = "--dataset_name"
    """The option that names the dataset."""
    saved: DatasetDict | None = field(default=None, repr=False)
    """The opened dataset of a `save_to_disk` folder."""

    def split(self, wanted: str | None, flag: str, defaults: Sequence[str]) -> str:
        """`wanted`, which `flag` names, or the first of `defaults` that there is."""
        for split in defaults if wanted is None else (wanted,):
            if split in self.files:
                return split
        has = f"{self.name} has the splits {', '.join(self.files)}"
        raise UserError(f"{flag} {wanted}: {has}." if wanted else f"{has}; choose one with {flag}.")

    def local_files(self, split: str) -> list[Path]:
        """The files of a split that are on this machine."""
        return [Path(file) for file in self.files[split] if os.path.isabs(file)]


SourceSplit = tuple[DatasetSource, str]
"""A dataset and the name of one of its splits."""


@contextmanager
def reading_of(*sources: DatasetSource) -> Iterator[None]:
    """`reading` around what is done with these datasets. It unwraps what `datasets` wraps, names the dataset of a row
    that is refused, the full disk of the cache, and the broken line of a local JSON file.
    """
    flag, name = sources[0].flag, ",".join(source.name for source in sources)
    with reading(flag, name, "the dataset", "Look at it, or fetch it again."):
        try:
            yield
        except UserError as error:
            raise UserError(str(error).replace("--dataset_name:", f"{flag} {name}:", 1)) from error
        except Exception as error:
            cause = (isinstance(error, DatasetGenerationError) and error.__cause__) or error
            if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                cache = Path(datasets.config.HF_DATASETS_CACHE)
                raise UserError(f"{cache}: {reason_not_written(cause, cache)} (HF_DATASETS_CACHE).") from error
            for path in {path for source in sources for split in source.files for path in source.local_files(split)}:
                if path.suffix == ".jsonl" and (broken := _broken_line(path)):
                    raise UserError(f"{flag} {name}: {path}, {broken}; fix or remove the line.") from error
            raise cause from None


def find_splits(data: DataConfig) -> tuple[list[SourceSplit], list[SourceSplit]]:
    """What to train on, and what to evaluate on: nothing where a share of the former is to be held out."""
    sources = [open_source(name) for name in _names(data.dataset_name)]
    train = [(source, source.split(data.split_name, "--split_name", DEFAULT_SPLITS)) for source in sources]
    wanted, flag, evaluation = data.validation_split_name, "--validation_split_name", list[SourceSplit]()
    if data.eval_dataset_name is not None:
        sources = [open_source(name, "--eval_dataset_name") for name in _names(data.eval_dataset_name)]
        evaluation = [(source, source.split(wanted, flag, EVALUATION_SPLITS)) for source in sources]
    elif data.validation_fraction is None and (wanted or all(VALIDATION_SPLIT in source.files for source in sources)):
        found = [(source, source.split(wanted, flag, (VALIDATION_SPLIT,))) for source in sources]
        evaluation = found if wanted or not any(part in train for part in found) else []
    seen: set[Any] = set()
    for source, split in (*train, *evaluation):
        own = {path.resolve() for path in source.local_files(split)} or {(source.path, source.config, split)}
        if seen & own:
            raise UserError(f"{source.flag} {source.name}: files of split {split} are named twice, or trained on.")
        seen |= own
    return train, evaluation


def _names(text: str) -> list[str]:
    """The datasets of --dataset_name; a path that exists is one, whatever commas it holds."""
    return [text] if Path(text).expanduser().exists() else [name.strip() for name in text.split(",")]


def open_source(name: str, flag: str = "--dataset_name") -> DatasetSource:
    """Find the dataset called `name` and list its splits; reads no row. `flag` names it."""
    if not name.strip():  # to Path the current folder
        raise UserError(f"{flag} has an empty name; give each dataset's, with one comma between two.")
    wanted, config = name, None
    if not Path(name).expanduser().exists() and ":" in name:
        wanted, _, config = name.rpartition(":")
    path = (DATASET_DIR if wanted == EMBEDDED else Path(wanted).expanduser()).resolve()
    source = DatasetSource(name, wanted, {}, config, flag)
    if path.is_file() or glob.has_magic(wanted) and not path.exists():
        return _files(source, wanted)
    if path.is_dir():
        with reading_of(source):
            if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                saved = datasets.load_from_disk(str(path))
                if not isinstance(saved, DatasetDict):
                    saved = DatasetDict({str(saved.split or "train"): saved})
                return dataclasses.replace(source, path=str(path), files={split: [] for split in saved}, saved=saved)
            return _of_builder(dataclasses.replace(source, path=str(path)))
    if wanted.startswith((".", "/", "~")) or path.suffix in FILE_BUILDERS or wanted.count("/") > 1:
        raise UserError(f"{flag} {name}: no such file or folder.")
    return _open_hub(source)


def _files(source: DatasetSource, pattern: str) -> DatasetSource:
    """A file, or all files that match a pattern, sorted, once where a link to one matches too."""
    path = Path(pattern).expanduser()
    matches = [path] if path.is_file() else map(Path, sorted(glob.glob(str(path), recursive=True)))
    files = list(dict.fromkeys(str(match.resolve()) for match in matches if match.is_file()))
    kinds = {Path(file).suffix for file in files}
    if len(kinds) != 1 or not kinds <= FILE_BUILDERS.keys():
        found = f"names {', '.join(sorted(kinds))} files" if files else "matches no file"
        raise UserError(f"{source.flag} {source.name} {found}; give files of one kind: {', '.join(FILE_BUILDERS)}.")
    return dataclasses.replace(source, path=FILE_BUILDERS[kinds.pop()], files={"train": files})


def _of_builder(source: DatasetSource, **arguments: Any) -> DatasetSource:
    """The dataset with the files of its splits, as `datasets` finds them."""
    try:
        builder = datasets.load_dataset_builder(source.path, source.config, **arguments)
    except ValueError:
        known = datasets.get_dataset_config_names(source.path)
        if (source.config or datasets.get_dataset_default_config_name(source.path)) in known:
            raise
        choice = f"write {source.path}:CONFIG with one of {', '.join(known)}"
        raise UserError(f"{source.flag} {source.name} has several configurations; {choice}.") from None
    if builder.config.data_files is None:
        # The hub cannot be reached, and the builder is that of a dataset that `load_dataset` converted earlier.
        return dataclasses.replace(source, files={split: [] for split in builder.info.splits or {}})
    files = {str(split): list(map(_in_repository, found)) for split, found in builder.config.data_files.items()}
    return dataclasses.replace(source, files=files)


def _in_repository(file: str) -> str:
    """A data file's path inside its repository, of `hf://datasets/owner/name@revision/path`; local ones as they are."""
    return file.split("@", 1)[1].split("/", 1)[1] if file.startswith("hf://") else file


def _open_hub(source: DatasetSource) -> DatasetSource:
    """A dataset of the hub; without the hub the files that an earlier run or `hf download` left in its cache."""
    advice = (
        "It is no local path. If it is gated, use 'hf auth login' and accept its terms; where the hub cannot be "
        f"reached, 'hf download {source.path} --repo-type dataset --local-dir DIR' elsewhere and pass that folder."
    )
    with reading(source.flag, source.name, "the dataset", advice):
        try:
            return _of_builder(source)
        except UserError:
            raise
        except Exception:
            folder = try_to_load_from_cache(source.path, "README.md", repo_type="dataset")
            if not isinstance(folder, str):
                raise
            path = Path(folder).parent
            return _of_builder(
                dataclasses.replace(source, path=str(path)), data_files=_files_there(path, source.config)
            )


def _files_there(folder: Path, config: str | None) -> dict[str, list[str]]:
    """Split -> patterns of its files, as the card in `folder` has them; of splits that are there."""
    configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(folder / "README.md").data)
    patterns = sanitize_patterns(configs[config]["data_files"]) if config in configs else get_data_patterns(str(folder))
    return {split: named for split, named in patterns.items() if any(any(folder.glob(each)) for each in named)}


def load_split(source: DatasetSource, split: str) -> Dataset:
    """One split as memory-mapped Arrow."""
    with reading_of(source):
        return source.saved[split] if source.saved is not None else _load(source, split, streaming=False)


def open_split_stream(source: DatasetSource, split: str) -> IterableDataset:
    """One split as a stream from its beginning; to be read within `reading_of`."""
    with reading_of(source):
        return source.saved[split].to_iterable_dataset() if source.saved is not None else _load(source, split, True)


def _load(source: DatasetSource, split: str, streaming: bool) -> Any:
    # Naming the files keeps `datasets` from downloading and converting every other split too.
    # They are patterns to it, and names may hold [ and *.
    data_files = {split: list(map(glob.escape, source.files[split]))} if source.files[split] else None
    options: dict[str, Any] = {"split": split, "streaming": streaming, "data_files": data_files}
    paths = source.local_files(split)
    if paths and all(SEPARATORS.keys() & set(path.suffixes) for path in paths):
        # pandas would make 42.0 of 42 in a column with an empty cell, and nothing of "None".
        names = [_columns_of_csv(source, path) for path in paths][0]
        options |= {"features": Features({name: Value("string") for name in names}), "keep_default_na": False}
    try:
        return datasets.load_dataset(source.path, source.config, **options)
    except DatasetGenerationError:
        if streaming or not paths or not all(path.suffix in (".jsonl", ".json") for path in paths):
            raise
        # Later rows have other columns, or types, than the first 10 MB, which `datasets` takes for all: each file is
        # parsed at once, and columns that a file lacks are None there.
        parts = [
            datasets.load_dataset(
                "json", data_files=glob.escape(str(path)), split="train", chunksize=max(1, path.stat().st_size)
            )
            for path in paths
        ]
        return datasets.concatenate_datasets(parts)


def _columns_of_csv(source: DatasetSource, path: Path) -> list[str]:
    """Names of a CSV file's columns; `UserError` where its first row has more cells than its header, for pandas would
    take the first ones for an index, and each column's text from the next cell.
    """
    separator = next(SEPARATORS[suffix] for suffix in path.suffixes if suffix in SEPARATORS)
    table = pd.read_csv(path, sep=separator, nrows=1, dtype=str, keep_default_na=False)
    if not isinstance(table.index, pd.RangeIndex):
        raise UserError(f"{source.flag} {source.name}: the first row of {path} has more cells than its header.")
    return [str(name) for name in table.columns]


def _broken_line(path: Path) -> str | None:
    """Number (from 1) of the first line of a .jsonl file that is no JSON object, and why; None if there is none."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line) if line.strip() else {}
            except ValueError as error:
                return f"line {number}: not valid JSON ({getattr(error, 'msg', error)})"
            if not isinstance(row, dict):
                return f"line {number}: a {type(row).__name__}, not an object"
    return None
