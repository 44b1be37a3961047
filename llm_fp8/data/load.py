"""A hub id or a local path (--dataset_name) becomes one split of a `datasets` dataset.

    embedded                    the dataset of this repository
    owner/name                  a dataset of the Hugging Face hub
    path/to/folder              laid out as the hub lays them out, or written by `save_to_disk`
    path/to/file.jsonl          also .json, .parquet, .csv
    'path/to/train-*.jsonl'     all files that match, as one dataset
    any of these,another        several datasets; --dataset_weights says how many rows of each

Only the files of the requested split are downloaded and converted, however large the other splits are.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import dataclasses
import errno
import glob
import gzip
import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, IterableDataset
from datasets.data_files import get_data_patterns, sanitize_patterns
from datasets.exceptions import DatasetNotFoundError, DatasetsError
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCard, snapshot_download
from yaml import YAMLError

from llm_fp8.config.options import EMBEDDED, DataConfig
from llm_fp8.data.embedded import DATASET_DIR
from llm_fp8.data.prompt import names_a_form
from llm_fp8.utils.errors import UserError, reason_not_written

FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
DEFAULT_SPLITS = ("train_1M", "train")
"""`--split_name` defaults to the first of these that the dataset has."""
VALIDATION_SPLIT = "validation"
EVALUATION_SPLITS = (VALIDATION_SPLIT, "test", *DEFAULT_SPLITS)
"""Of --eval_dataset_name; `--validation_split_name` then defaults to the first of these that it has."""

MAX_REASON = 300
"""Characters of a library's error that are shown."""

SEPARATORS = {".csv": ",", ".tsv": "\t"}
COMPRESSIONS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
MAX_CELL = 2**31 - 1
"""Bytes of a cell that the csv module reads: its own limit of 131,072 is less than pandas takes."""

READ_ERRORS = (
    DatasetsError,
    OSError,
    ValueError,
    RuntimeError,
    TypeError,
    AttributeError,
    LookupError,
    YAMLError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
)
"""What `datasets` raises on something it cannot reach, find or parse: pyarrow's errors are ValueErrors, and a dataset
card of another form than it expects gives TypeError and the three after it. The last three are of compressed files.
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
    several: bool = False
    """Whether --columns is said of several datasets, some of which may have our names or another form."""
    config: str | None = None
    """Its configuration (NAME:CONFIG); None for the default one."""
    flag: str = "--dataset_name"
    """The option that names the dataset."""

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

    def evaluation_split(self, wanted: str | None) -> str:
        """The split of --eval_dataset_name: `wanted` (--validation_split_name), else the first that there is."""
        if wanted is not None:
            return self._check_split(wanted, "--validation_split_name")
        for split in EVALUATION_SPLITS:
            if split in self.files:
                return split
        raise UserError(f"{self.name}: choose --validation_split_name from its splits: {', '.join(self.files)}.")

    def renamed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row under our names."""
        renames = self.renames(row)
        ours = {ours: row[theirs] for theirs, ours in renames.items()}
        return {**{name: value for name, value in row.items() if name not in renames}, **ours}

    def renames(self, names: Iterable[str]) -> dict[str, str]:
        """The dataset's name -> ours, of the columns in --columns; `UserError` where `names`, all of the dataset's,
        lack one. Of several datasets, one that has none of them and is understood as it is keeps its names.
        """
        names, renames = list(names), {}
        if self.several and names_a_form(names) and not set(names) & set(self.columns.values()):
            return {}
        for ours, theirs in self.columns.items():
            if theirs in names:
                renames[theirs] = ours
            elif not (self.several and ours in names):
                raise UserError(
                    f"--columns {ours}={theirs}: {self.name} has no column '{theirs}'; it has: {', '.join(names)}."
                )
        return renames

    def _check_split(self, wanted: str, flag: str) -> str:
        if wanted not in self.files:
            raise UserError(f"{flag} {wanted}: {self.name} has no such split; it has: {', '.join(self.files)}.")
        return wanted


SourceSplit = tuple[DatasetSource, str]
"""A dataset and the name of one of its splits."""


def find_splits(data: DataConfig) -> tuple[list[SourceSplit], list[SourceSplit]]:
    """What to train on, and what to evaluate on: nothing where a share of the former is to be held out."""
    asked = [(name, "--dataset_name") for name in _names(data.dataset_name)]
    num_trained = len(asked)
    if data.eval_dataset_name is not None:
        if len(_names(data.eval_dataset_name)) > 1:
            raise UserError(
                f"--eval_dataset_name {data.eval_dataset_name} names several datasets, and evaluation is on one; name "
                "one, or a pattern of files."
            )
        asked.append((data.eval_dataset_name, "--eval_dataset_name"))
    sources = [
        dataclasses.replace(
            open_source(*name_and_config(name), flag), columns=data.column_names, several=len(asked) > 1
        )
        for name, flag in asked
    ]
    train = [(source, source.training_split(data.split_name)) for source in sources[:num_trained]]
    for number, part in enumerate(train):
        if any(_share_data(part, other) for other in train[:number]):
            raise UserError(
                f"--dataset_name {data.dataset_name}: {part[0].name} has files that are named twice, and no row may "
                "come twice in an epoch; drop them in one place."
            )
    wanted = data.validation_split_name
    if data.eval_dataset_name is not None:
        evaluation = [(source, source.evaluation_split(wanted)) for source in sources[num_trained:]]
        if any(_share_data(part, other) for part in evaluation for other in train):
            raise UserError(
                f"--eval_dataset_name {data.eval_dataset_name} has files that --dataset_name {data.dataset_name} "
                "trains on; name others, or a --validation_split_name that is not trained on."
            )
        return train, evaluation
    if data.validation_fraction is not None:
        return train, []
    found = [(source, source.validation_split(wanted, split)) for source, split in train]
    evaluation = [(source, split) for source, split in found if split is not None]
    return train, evaluation if len(evaluation) == len(train) else []


def name_and_config(word: str) -> tuple[str, str | None]:
    """The dataset and the configuration that NAME:CONFIG asks for, None for the default one. What exists on this
    machine is a name as it stands, and so is a pattern or an address.
    """
    name, _, config = word.rpartition(":")
    if not name or not config or set("/*?[") & set(config) or Path(word).expanduser().exists():
        return word, None
    return name, config


def _share_data(one: SourceSplit, other: SourceSplit) -> bool:
    """Whether rows are read from the same files, or split, as far as that is known."""
    parts, others = (_data_of(*part) for part in (one, other))
    return not parts.isdisjoint(others)


def _data_of(source: DatasetSource, split: str) -> set[Any]:
    """What tells a split's files from others, under whichever name they were given; else the split itself."""
    if paths := _local_files(source, split):
        return {path.resolve() for path in paths}
    return {(source.path, source.config, part) for part in source.files[split] or [split]}


def _names(text: str) -> list[str]:
    """The datasets of --dataset_name; a path that exists is one, whatever commas it holds."""
    return [text] if Path(text).expanduser().exists() else [name.strip() for name in text.split(",")]


def open_source(name: str, config: str | None = None, flag: str = "--dataset_name") -> DatasetSource:
    """Find the dataset called `name` and list its splits; reads no row. `config` and `flag` as in `DatasetSource`."""
    source = _find(name, config, flag)
    if config is not None and (source.saved is not None or source.path in FILE_BUILDERS.values()):
        raise UserError(f"{flag} {name} is no dataset with configurations, which {config} would be one of; drop it.")
    return dataclasses.replace(source, config=config, flag=flag)


def _find(name: str, config: str | None, flag: str) -> DatasetSource:
    if not name.strip():  # to Path the current folder
        raise UserError(f"{flag} has an empty name; give each dataset's, with one comma between two.")
    path = DATASET_DIR if name == EMBEDDED else Path(name).expanduser()
    if path.exists():
        _check_path(name, path.resolve(), flag)
    if path.is_file():
        if path.suffix not in FILE_BUILDERS:
            known = ", ".join(FILE_BUILDERS)
            raise UserError(f"{flag} {name}: '{path.suffix}' files are not understood; give {known} or a folder.")
        return DatasetSource(name, FILE_BUILDERS[path.suffix], {"train": [str(path.resolve())]})
    if not path.exists() and glob.has_magic(name):
        return _matching_files(name, flag)
    if path.is_dir():
        try:
            if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
                loaded = datasets.load_from_disk(str(path))
                saved = (
                    loaded if isinstance(loaded, DatasetDict) else DatasetDict({str(loaded.split or "train"): loaded})
                )
                return DatasetSource(name, str(path.resolve()), {split: [] for split in saved}, saved)
            folder = str(path.resolve())
            return _source(name, folder, _builder(name, folder, config, flag))
        except READ_ERRORS as error:
            reason = _said(error)
            raise _unwritable_cache(error) or UserError(
                f"{flag} {name}: the folder holds no data that can be read: {reason}"
            ) from error
    if name.startswith((".", "/", "~")) or path.suffix in FILE_BUILDERS or name.count("/") > 1:
        raise UserError(f"{flag} {name}: no such file or folder.")
    return _open_hub(name, config, flag)


def _matching_files(name: str, flag: str) -> DatasetSource:
    """All files that match the pattern `name`, sorted, as one dataset; once where a link to one matches too."""
    matches = map(Path, sorted(glob.glob(os.path.expanduser(name), recursive=True)))
    files = list(dict.fromkeys(path.resolve() for path in matches if path.is_file()))
    for path in files:
        _check_path(str(path), path, flag)
    kinds = sorted({path.suffix for path in files})
    if len(kinds) != 1 or kinds[0] not in FILE_BUILDERS:
        found = f"matches {', '.join(kind or 'no suffix' for kind in kinds)} files" if files else "matches no file"
        raise UserError(f"{flag} '{name}' {found}; give a pattern of files of one kind: {', '.join(FILE_BUILDERS)}.")
    return DatasetSource(name, FILE_BUILDERS[kinds[0]], {"train": [str(path) for path in files]})


def _builder(name: str, path: str, config: str | None, flag: str, **arguments: Any) -> datasets.DatasetBuilder:
    """`load_dataset_builder`, with a `UserError` for a configuration that is missing or not there."""
    try:
        return datasets.load_dataset_builder(path, config, **arguments)
    except ValueError:
        known = datasets.get_dataset_config_names(path)
        if (config or datasets.get_dataset_default_config_name(path)) in known:
            raise
        why = "has several configurations" if config is None else f"has no configuration {config}"
        raise UserError(f"{flag} {name} {why}; write {flag} {name}:CONFIG with one of: {', '.join(known)}.") from None


def _check_path(name: str, path: Path, flag: str) -> None:
    """Refuse what `datasets` would take for other files, or search for hours."""
    if path in (Path.home().resolve(), Path("/")):
        raise UserError(f"{flag} {name} is the folder {path} itself; name the dataset's folder or file in it.")
    if os.path.expandvars(path) != str(path) or (path.is_dir() and str(path) != glob.escape(str(path))):
        raise UserError(
            f"{flag} {name}: to datasets, $NAME in a path is a variable, and [, * and ? in a folder's are "
            "patterns; rename it."
        )


def _open_hub(name: str, config: str | None, flag: str) -> DatasetSource:
    try:
        return _source(name, name, _builder(name, name, config, flag))
    except DatasetNotFoundError as error:
        raise UserError(
            f"{flag} {name} is not a local path, and the Hugging Face hub has no such dataset or wants a "
            "login for it ('hf auth login', and accept its terms on its page if it is gated)."
        ) from error
    except READ_ERRORS as error:
        try:  # the files that an earlier run or `hf download` left in the hub's cache
            path = snapshot_download(name, repo_type="dataset", local_files_only=True)
            files = _files_of_config(Path(path), config) if config else get_data_patterns(path)
            return _source(name, path, _builder(name, path, config, flag, data_files=files))
        except READ_ERRORS:
            pass
        if isinstance(error, ConnectionError):
            raise UserError(
                f"{flag} {name} is not a local path, and the Hugging Face hub cannot be reached; where it "
                f"can, fetch it with 'hf download {name} --repo-type dataset --local-dir DIR', and pass that folder."
            ) from error
        raise _unwritable_cache(error) or UserError(
            f"{flag} {name}: the dataset cannot be opened: {_said(error)}"
        ) from error


def _files_of_config(folder: Path, config: str) -> dict[str, list[str]]:
    """Split -> patterns of its files, as the card in `folder` has them for `config`; of splits that are there."""
    configs = MetadataConfigs.from_dataset_card_data(DatasetCard.load(folder / "README.md").data)
    patterns: dict[str, list[str]] = sanitize_patterns(configs[config]["data_files"])
    return {split: named for split, named in patterns.items() if any(any(folder.glob(each)) for each in named)}


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
    for path in _local_files(source, split):
        if not os.access(path, os.R_OK, effective_ids=True):
            raise UserError(f"{source.flag} {source.name}: this user may not read {path}; change its permissions.")
    for path in _local_json(source, split):
        with open(path, "rb") as file:
            if file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"null"):
                # pyarrow 26 ends the process with a segmentation fault
                raise UserError(f"{path}: its first row is null, not an object; fix or remove the line.")
    # Naming the files keeps `datasets` from downloading and converting every other split too.
    # They are patterns to it, and names may hold [ and *.
    data_files = {split: [glob.escape(file) for file in source.files[split]]} if source.files[split] else None
    try:
        return datasets.load_dataset(
            source.path,
            source.config,
            data_files=data_files,
            split=split,
            streaming=streaming,
            **_as_text(source, split),
            **_state_of(_local_files(source, split)),
        )
    except StopIteration as error:  # an empty JSON file
        raise no_row(source, split) from error
    except READ_ERRORS as error:
        paths = _local_json(source, split)
        if not streaming and paths and len(paths) == len(source.files[split]):
            return _load_whole_files(source, split, paths)
        raise unreadable([(source, split)], error) from error


def _as_text(source: DatasetSource, split: str) -> dict[str, Any]:
    """Options by which the cells of local CSV and TSV files stay text: pandas would make 42.0 of 42 in a column with an
    empty cell, and nothing of "None".
    """
    paths = [path for path in _local_files(source, split) if _plain_name(path).suffix in SEPARATORS]
    if len(paths) < max(1, len(source.files[split])):
        return {}
    header = [_csv_header(path) for path in paths][0]
    return {"converters": dict.fromkeys(header, str), "keep_default_na": False}


def _plain_name(path: Path) -> Path:
    """Without the suffix of a compression."""
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def _csv_header(path: Path) -> list[str]:
    """Names of a CSV file's columns; `UserError` where its first row has more cells, for pandas would take the first
    ones for an index, and each column's text from the next cell.
    """
    csv.field_size_limit(MAX_CELL)
    separator = SEPARATORS[_plain_name(path).suffix]
    open_text = COMPRESSIONS.get(path.suffix, open)
    with open_text(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = (row for row in csv.reader(file, delimiter=separator) if row)
        header, first = next(rows, []), next(rows, [])
    if len(first) > len(header):
        raise UserError(
            f"{path}: its first row has {len(first)} cells and its header {len(header)}; quote text that holds commas."
        )
    return header


def _state_of(paths: Sequence[Path]) -> dict[str, Any]:
    """A description of local files that changes with them, by which `datasets` finds its converted copy: by itself it
    asks for path and mtime alone, which `cp -p`, rsync and archives set to an older file's.
    """
    if not paths:
        return {}
    states = [[stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns] for stat in map(os.stat, paths)]
    return {"description": hashlib.sha256(json.dumps(states).encode()).hexdigest()}


def _load_whole_files(source: DatasetSource, split: str, paths: Sequence[Path]) -> Dataset:
    """JSON files whose later rows have other columns, or types, than their first 10 MB, which `datasets` takes for
    all: each is parsed at once, and columns that a file lacks are None there.
    """
    try:
        parts = [
            datasets.load_dataset(
                "json",
                data_files=glob.escape(str(path)),
                split="train",
                chunksize=max(1, path.stat().st_size),
                **_state_of([path]),
            )
            for path in paths
        ]
        return datasets.concatenate_datasets(parts)
    except READ_ERRORS as error:
        raise unreadable([(source, split)], error) from error


def no_row(source: DatasetSource, split: str) -> UserError:
    """The error of a split without rows."""
    return UserError(f"{source.flag} {source.name}: split '{split}' holds no row.")


def iterate(source: DatasetSource, split: str, stream: IterableDataset) -> Iterator[dict[str, Any]]:
    """The rows of a stream under our names, with unreadable ones turned into a `UserError`."""
    try:
        for row in stream:
            yield source.renamed(row)
    except READ_ERRORS as error:
        raise unreadable([(source, split)], error) from error


def unreadable(parts: Sequence[SourceSplit], error: BaseException) -> UserError:
    """The error of a broken file of one of `parts`, with the line where it is in a local JSON file; or of the cache
    that could not be written.
    """
    if (cache_error := _unwritable_cache(error)) is not None:
        return cache_error
    for source, split in parts:
        for path in _local_json(source, split):
            if (broken := _broken_line(path)) is not None:
                line, reason = broken
                return UserError(f"{path}, line {line}: not valid JSON ({reason}); fix or remove the line.")
    reason = _said(error.__cause__ or error)
    which = ", ".join(f"{source.flag} {source.name}: split '{split}'" for source, split in parts)
    is_json = any(_local_json(source, split) for source, split in parts)
    advice = "give all rows the same columns, and each column one type" if is_json else "look at it, or fetch it again"
    return UserError(f"{which} cannot be read: {reason.rstrip('.')}; {advice}.")


def _unwritable_cache(error: BaseException) -> UserError | None:
    """The error of the cache of `datasets` that could not be written; None where `error` is of another kind."""
    cause = error.__cause__ or error
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    if not isinstance(cause, OSError):
        return None
    if cause.errno in (errno.EACCES, errno.EPERM):
        # Where the cache is not there yet, a folder above it is what could not be made.
        if not (str(cause.filename).startswith(str(cache)) or cache.is_relative_to(str(cause.filename))):
            return None
    elif cause.errno not in (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return None
    return UserError(f"{cache}: {reason_not_written(cause, cache)} (HF_DATASETS_CACHE or HF_HOME).")


def _local_json(source: DatasetSource, split: str) -> list[Path]:
    """The JSON files of a split that are on this machine."""
    return _local_files(source, split, ".jsonl", ".json")


def _local_files(source: DatasetSource, split: str, *suffixes: str) -> list[Path]:
    """The files of a split that are on this machine, of any kind or with one of `suffixes`."""
    root = Path(source.path)
    if not root.is_absolute() and source.path not in FILE_BUILDERS.values():
        return []  # of the hub: a file of that name in the current folder is another
    paths = [root / file for file in source.files[split]]  # single files are named by their whole path
    return [path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes)]


def _broken_line(path: Path) -> tuple[int, str] | None:
    """Number (from 1) of the first line that is no JSON object, and why; None if there is none."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
        if text.lstrip().startswith("[") or "\n" in text.strip():
            json.loads(text)
            return None  # one JSON document, however it is broken into lines
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1, f"not UTF-8: {error.reason}"
    except json.JSONDecodeError as error:
        if text.lstrip().startswith("["):
            return error.lineno, error.msg
    except (ValueError, RecursionError):  # a number of thousands of digits, deep nesting: its line is found below
        pass
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            row = json.loads(line, object_pairs_hook=_without_twins) if line.strip() else {}
            json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is no Unicode
        except UnicodeEncodeError as error:
            return number, f"{error.object[error.start]!a} is half of a character"
        except (ValueError, RecursionError) as error:
            return number, getattr(error, "msg", None) or _said(error)
        if not isinstance(row, dict):
            return number, f"a {type(row).__name__}, not an object"
    return None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs; ValueError for a key that comes twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"the key '{twice}' comes twice")
    return row


def _said(error: BaseException) -> str:
    """The beginning of what an error says, in one line: some say what is wrong in their second."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + "..."
