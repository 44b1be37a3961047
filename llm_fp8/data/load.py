"""A hub id or a local path (--dataset_name) becomes one split of a `datasets` dataset.

    embedded                    the dataset of this repository
    owner/name                  a dataset of the Hugging Face hub
    path/to/folder              laid out as the hub lays them out, or written by `save_to_disk`
    path/to/file.jsonl          also .json, .parquet, .csv

Only the files of the requested split are downloaded and converted, however large the other splits are.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, IterableDataset
from datasets.data_files import get_data_patterns
from datasets.exceptions import DatasetNotFoundError, DatasetsError
from huggingface_hub import snapshot_download
from yaml import YAMLError

from llm_fp8.config.options import EMBEDDED
from llm_fp8.data.embedded import DATASET_DIR
from llm_fp8.utils.errors import UserError

FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
DEFAULT_SPLITS = ("train_1M", "train")
"""`--split_name` defaults to the first of these that the dataset has."""
VALIDATION_SPLIT = "validation"

READ_ERRORS = (DatasetsError, OSError, ValueError, RuntimeError, TypeError, AttributeError, LookupError, YAMLError)
"""What `datasets` raises on something it cannot reach, find or parse: pyarrow's errors are ValueErrors, and a dataset
card of another form than it expects gives any of the last four.
"""


@dataclass(frozen=True)
class DatasetSource:
    """A dataset and its splits."""

    name: str
    path: str
    """What `datasets.load_dataset` takes."""
    files: dict[str, list[str]]
    """Split -> its data files relative to `path`; none where they are not known."""
    saved: DatasetDict | None = field(default=None, repr=False)
    """The opened dataset of a `save_to_disk` folder."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """--columns: our name of a column -> the dataset's."""

    def training_split(self, wanted: str | None) -> str:
        """`wanted` (--split_name), or the default split; `UserError` where the dataset does not have it."""
        if wanted is not None:
            return self._check_split(wanted, "--split_name")
        for split in DEFAULT_SPLITS:
            if split in self.files:
                return split
        raise UserError(f"{self.name} has no split 'train'; choose --split_name from: {', '.join(self.files)}.")

    def validation_split(self, wanted: str | None, train: str) -> str | None:
        """`wanted` (--validation_split_name), else 'validation'; None where there is none beside the split `train`."""
        if wanted is None:
            return VALIDATION_SPLIT if VALIDATION_SPLIT in self.files and train != VALIDATION_SPLIT else None
        if wanted == train:
            raise UserError(f"--validation_split_name {wanted} is the split that is trained on; name another.")
        return self._check_split(wanted, "--validation_split_name")

    def renames(self, names: Iterable[str]) -> dict[str, str]:
        """The dataset's name -> ours, of the columns in --columns; `UserError` where `names`, all of the dataset's,
        lack one.
        """
        names = list(names)
        for ours, theirs in self.columns.items():
            if theirs not in names:
                raise UserError(
                    f"--columns {ours}={theirs}: {self.name} has no column '{theirs}'; it has: {', '.join(names)}."
                )
        return {theirs: ours for ours, theirs in self.columns.items()}

    def _check_split(self, wanted: str, flag: str) -> str:
        if wanted not in self.files:
            raise UserError(f"{flag} {wanted}: {self.name} has no such split; it has: {', '.join(self.files)}.")
        return wanted


def open_source(name: str, columns: Mapping[str, str] | None = None) -> DatasetSource:
    """Find the dataset called `name` and list its splits; reads no row. `columns` as in `DatasetSource`."""
    return dataclasses.replace(_find(name), columns=columns or {})


def _find(name: str) -> DatasetSource:
    path = DATASET_DIR if name == EMBEDDED else Path(name).expanduser()
    if path.exists():
        _check_path(name, path.resolve())
    if path.is_file():
        if path.suffix not in FILE_BUILDERS:
            known = ", ".join(FILE_BUILDERS)
            raise UserError(
                f"--dataset_name {name}: '{path.suffix}' files are not understood; give {known} or a folder."
            )
        return DatasetSource(name, FILE_BUILDERS[path.suffix], {"train": [str(path.resolve())]})
    if path.is_dir():
        try:
            if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                loaded = datasets.load_from_disk(str(path))
                saved = (
                    loaded if isinstance(loaded, DatasetDict) else DatasetDict({str(loaded.split or "train"): loaded})
                )
                return DatasetSource(name, str(path), {split: [] for split in saved}, saved)
            folder = str(path.resolve())
            return _source(name, folder, datasets.load_dataset_builder(folder))
        except READ_ERRORS as error:
            reason = _first_line(error)
            raise UserError(f"--dataset_name {name}: the folder holds no data that can be read: {reason}") from error
    if name.startswith((".", "/", "~")) or path.suffix in FILE_BUILDERS or name.count("/") > 1:
        raise UserError(f"--dataset_name {name}: no such file or folder.")
    return _open_hub(name)


def _check_path(name: str, path: Path) -> None:
    """Refuse what `datasets` would take for other files, or search for hours."""
    if path in (Path.home().resolve(), Path("/")):
        raise UserError(f"--dataset_name {name} is the folder {path} itself; name the dataset's folder or file in it.")
    if os.path.expandvars(path) != str(path) or (path.is_dir() and str(path) != glob.escape(str(path))):
        raise UserError(
            f"--dataset_name {name}: to datasets, $NAME in a path is a variable, and [, * and ? in a folder's are "
            "patterns; rename it."
        )


def _open_hub(name: str) -> DatasetSource:
    try:
        return _source(name, name, datasets.load_dataset_builder(name))
    except DatasetNotFoundError as error:
        raise UserError(
            f"--dataset_name {name} is not a local path, and the Hugging Face hub has no such dataset or wants a "
            "login for it ('hf auth login', and accept its terms on its page if it is gated)."
        ) from error
    except READ_ERRORS as error:
        try:  # the files that an earlier run or `hf download` left in the hub's cache
            path = snapshot_download(name, repo_type="dataset", local_files_only=True)
            return _source(name, path, datasets.load_dataset_builder(path, data_files=get_data_patterns(path)))
        except READ_ERRORS:
            pass
        if isinstance(error, ConnectionError):
            raise UserError(
                f"--dataset_name {name} is not a local path, and the Hugging Face hub cannot be reached; where it "
                f"can, fetch it with 'hf download {name} --repo-type dataset --local-dir DIR', and pass that folder."
            ) from error
        raise UserError(f"--dataset_name {name}: the dataset cannot be opened: {_first_line(error)}") from error


def _source(name: str, path: str, builder: datasets.DatasetBuilder) -> DatasetSource:
    if builder.config.data_files is None:
        # The hub cannot be reached, and the builder is that of a dataset that `load_dataset` converted earlier.
        return DatasetSource(name, path, {split: [] for split in builder.info.splits or {}})
    by_split = builder.config.data_files.items()
    return DatasetSource(
        name, path, {str(split): [_relative(file, path) for file in files] for split, files in by_split}
    )


def _relative(file: str, dataset_path: str) -> str:
    """A data file's path inside its dataset, from a local path or `hf://datasets/owner/name@revision/path`."""
    if file.startswith("hf://"):
        return file.split("@", 1)[1].split("/", 1)[1]
    return str(Path(file).relative_to(dataset_path))


def load_split(source: DatasetSource, split: str) -> Dataset:
    """One split as memory-mapped Arrow. Raises `UserError` with file and line of a broken JSON line."""
    dataset = source.saved[split] if source.saved is not None else _load(source, split, streaming=False)
    renames = source.renames(dataset.column_names)
    hidden = [ours for ours in renames.values() if ours in dataset.column_names and ours not in renames]
    return dataset.remove_columns(hidden).rename_columns(renames) if renames else dataset


def open_split_stream(source: DatasetSource, split: str) -> IterableDataset:
    """One split as a stream from its beginning; read it with `iterate`, which renames the columns."""
    if source.saved is not None:
        return source.saved[split].to_iterable_dataset()
    return _load(source, split, streaming=True)


def _load(source: DatasetSource, split: str, streaming: bool) -> Any:
    # Naming the files keeps `datasets` from downloading and converting every other split too.
    # They are patterns to it, and names may hold [ and *.
    data_files = {split: [glob.escape(file) for file in source.files[split]]} if source.files[split] else None
    try:
        return datasets.load_dataset(source.path, data_files=data_files, split=split, streaming=streaming)
    except StopIteration as error:  # an empty JSON file
        raise UserError(f"--dataset_name {source.name}: split '{split}' holds no row.") from error
    except READ_ERRORS as error:
        raise unreadable(source, split, error) from error


def iterate(source: DatasetSource, split: str, stream: IterableDataset) -> Iterator[dict[str, Any]]:
    """The rows of a stream under our names, with unreadable ones turned into a `UserError`."""
    try:
        for row in stream:
            renamed = {ours: row[theirs] for theirs, ours in source.renames(row).items()}
            yield {**{name: value for name, value in row.items() if name not in source.columns.values()}, **renamed}
    except READ_ERRORS as error:
        raise unreadable(source, split, error) from error


def unreadable(source: DatasetSource, split: str, error: BaseException) -> UserError:
    """The error of a broken file, with the line where it is in a local JSON file."""
    root = Path(source.path) if Path(source.path).is_dir() else Path()
    for file in source.files[split]:
        path = root / file
        if path.suffix in (".jsonl", ".json") and path.is_file():
            if (broken := _broken_line(path)) is not None:
                line, reason = broken
                return UserError(f"{path}, line {line}: not valid JSON ({reason}); fix or remove the line.")
    reason = _first_line(error.__cause__ or error)
    return UserError(f"--dataset_name {source.name}: split '{split}' cannot be read: {reason}")


def _broken_line(path: Path) -> tuple[int, str] | None:
    """Number (from 1) of the first line that is no JSON object, and why; None if there is none."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
        json.loads(text)
        return None  # one JSON document, however it is broken into lines
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1, f"not UTF-8: {error.reason}"
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("["):
            return error.lineno, error.msg
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            row = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            return number, error.msg
        if not isinstance(row, dict):
            return number, f"a {type(row).__name__}, not an object"
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
