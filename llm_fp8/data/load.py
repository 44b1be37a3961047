"""Load one split of a dataset from the Hugging Face hub or a local path (docs/data_and_checkpoints.md).

Cells of CSV files stay text, and rows of JSON files are loaded as JSON text (`JsonRows`). Otherwise `datasets` would
convert text that looks like a date to a date, and would not distinguish null fields from missing ones. Other files in a
folder, such as editors' backups and partial downloads, are not read. The report lists those that look like data files.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import fsspec  # type: ignore[import-untyped]
import pyarrow as pa
import xxhash
from datasets import ArrowBasedBuilder, DatasetDict, DatasetInfo, Features, Json, SplitGenerator, Value
from datasets.builder import Key
from datasets.data_files import DataFilesList, get_data_patterns, resolve_pattern
from datasets.exceptions import DatasetGenerationError
from huggingface_hub import try_to_load_from_cache
from pyarrow import csv

from llm_fp8.config.options import EMBEDDED, DataConfig
from llm_fp8.data.embedded import DATASET_DIR
from llm_fp8.data.rows import read_row
from llm_fp8.utils.errors import UserError, nearest_existing, reading

FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
DEFAULT_SPLITS, VALIDATION_SPLIT = ("train_1M", "train"), "validation"
DATA_FILE = re.compile(r"(\.(?:jsonl?|ndjson|parquet|csv|tsv|txt|arrow|zip))(?:\.(?:gz|bz2|xz|zst|lz4))?$")
MOST_OTHER_FILES = 10_000  # limit for a folder's non-data files, since `datasets` lists only 1,000 files a second
LIKE_DATA = re.compile(r"\.(jsonl?|ndjson|parquet|csv|tsv|arrow)(?![a-z])[^/]*$")  # reported if they are not read
FIRST_ROWS = 1000  # number of rows of a JSON file from which its columns are determined
ROW = "row of a JSON file"  # name of the only column, which contains the JSON text of each row
_BETWEEN = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class DatasetSource:
    """A dataset, its splits and the split to read. `==` ignores the name and the flag that the user gave."""

    name: str = field(compare=False)
    path: str  # argument of `datasets.load_dataset`
    config: str | None = None
    flag: str = field(default="--dataset_name", compare=False)
    files: dict[str, list[str]] = field(default_factory=dict)  # split -> paths or hub addresses; [] if unknown
    split: str = ""
    is_json: bool = False
    left_out: tuple[str, ...] = ()  # names of files that look like data but are not read

    def with_split(self, requested: str | None, flag: str, defaults: Sequence[str]) -> DatasetSource:
        """Return a copy with the split `requested` by `flag` or, if that is None, the first existing of `defaults`."""
        for split in defaults if requested is None else (requested,):
            if split in self.files:
                return dataclasses.replace(self, split=split)
        has = f"{self.name} has the splits {', '.join(self.files)}"
        raise UserError(f"{flag} {requested}: {has}." if requested else f"{has}; choose one with {flag}.")


@contextmanager
def reading_of(*sources: DatasetSource) -> Iterator[None]:
    """Convert errors in the block, which reads `sources`, to `UserError`. Add the datasets' names to a row's error."""
    flag, name = sources[0].flag, ",".join(source.name for source in sources)
    with reading(flag, name, "the dataset", "Check its files."):
        try:
            yield
        except UserError as error:
            raise UserError(str(error).replace("--dataset_name:", f"{flag} {name}:", 1)) from error
        except DatasetGenerationError as error:
            raise error.__cause__ or error from None  # the outer error only says that an error occurred


def find_splits(data: DataConfig) -> tuple[list[DatasetSource], list[DatasetSource]]:
    """Return the splits to train on and to evaluate on. If the second list is empty, training rows are held out."""
    sources = _open_sources(data.dataset_name, "--dataset_name")
    train = [source.with_split(data.split_name, "--split_name", DEFAULT_SPLITS) for source in sources]
    requested, defaults = data.validation_split_name, (VALIDATION_SPLIT, "test", *DEFAULT_SPLITS)
    if data.eval_dataset_name is not None:
        sources = _open_sources(data.eval_dataset_name, "--eval_dataset_name")
    elif requested is None:
        has_validation = all(VALIDATION_SPLIT in source.files and source.split != VALIDATION_SPLIT for source in train)
        if data.validation_fraction is not None or not has_validation:
            return train, []
    evaluation = [source.with_split(requested, "--validation_split_name", defaults) for source in sources]
    for source in evaluation:
        if source in train:
            raise UserError(f"{source.flag} {source.name}: split {source.split} is trained on; choose another split.")
    return train, evaluation


def _open_sources(text: str, flag: str) -> list[DatasetSource]:
    """Open the datasets in `text`, the value of `flag`. An existing path is one dataset, even if it has commas."""
    names = [text] if Path(text).expanduser().exists() else text.split(",")
    return [open_source(name.strip(), flag) for name in names]


def open_source(name: str, flag: str = "--dataset_name") -> DatasetSource:
    """Find the dataset `name` and its splits without reading a row. `flag` is the option that contains the name."""
    if not name:  # `Path("")` is the current folder
        raise UserError(f"{flag} has an empty name between two commas or at an end; remove a comma.")
    is_whole = ":" not in name or Path(name).expanduser().exists()
    location, config = (name, None) if is_whole else name.rsplit(":", 1)
    path = (DATASET_DIR if location == EMBEDDED else Path(location).expanduser()).absolute()
    is_pattern = glob.has_magic(location) and not path.exists()
    builder, files = str(path) if path.is_dir() else location, dict[str, list[str]]()
    kind, beginning = DATA_FILE.search(path.name), nearest_existing(path)
    others = (file for _, _, names in os.walk(path) for file in names if not DATA_FILE.search(file))
    advice = "If it is gated, run 'hf auth login' and accept its terms on the hub; else check its name and files."
    with reading(flag, name, "the dataset", advice):
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            saved: Any = datasets.load_from_disk(path, keep_in_memory=False)
            # The folder may also contain older shards and caches of `map`, so its files are not listed.
            shards = (saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)).cache_files
            names = {split: [file["filename"] for file in shard_files] for split, shard_files in shards.items()}
            builder, files = "arrow", {split: DataFilesList(paths, []) for split, paths in names.items()}
        elif path.is_file() or is_pattern:
            if kind is None or kind[1] not in FILE_BUILDERS:
                raise UserError(f"{flag} {name}: a file or pattern must end in one of {', '.join(FILE_BUILDERS)}.")
            pattern = Path(glob.escape(str(beginning)), path.relative_to(beginning))
            builder, files = FILE_BUILDERS[kind[1]], {"train": [str(pattern)]}
        elif not path.is_dir():
            if location[0] in "./~" or kind is not None or location.count("/") > 1:
                raise UserError(f"{flag} {name}: no such file or folder, and a hub id is OWNER/NAME.")
        elif any(True for _ in itertools.islice(others, MOST_OTHER_FILES, None)):
            problem = f"{name}: the folder holds more than {MOST_OTHER_FILES} files that are not data"
            raise UserError(f"{flag} {problem}; give the folder of the data, or its files ('FOLDER/*.jsonl').")
        elif glob.has_magic(builder):
            raise UserError(f"{flag} {name}: `datasets` reads *, ? and [ in a folder's path as a pattern; rename it.")
        source = DatasetSource(name, builder, config, flag)
        try:
            return _of_builder(source, files or None)
        except Exception:  # if the hub is unreachable, use the files that `hf download` stored in its cache
            is_local = files or path.is_dir()
            card = None if is_local else try_to_load_from_cache(location, "README.md", repo_type="dataset")
            if not isinstance(card, str):
                raise
            source = dataclasses.replace(source, path=str(Path(card).parent))
            # The card may list splits that were never downloaded.
            return _of_builder(source, None if config else get_data_patterns(source.path))


def _of_builder(source: DatasetSource, data_files: Any) -> DatasetSource:
    """Return `source` with a list of files for each split. If `data_files` is None, let `datasets` find the files."""
    builder = datasets.load_dataset_builder(source.path, source.config, data_files=data_files)
    if builder.config.data_files is None:
        # Without the hub, `datasets` opens the dataset that an earlier run stored in its cache.
        return dataclasses.replace(source, files={split: [] for split in builder.info.splits or {}})
    listed = {str(split): list(names) for split, names in builder.config.data_files.items()}
    files = {split: data for split, names in listed.items() if (data := list(filter(DATA_FILE.search, names)))}
    if not files:
        raise FileNotFoundError("no file matches")
    others = set(itertools.chain(*listed.values()))
    if source.config is None and Path(source.path).is_absolute():  # also list files of other types or of no split
        others.update(filter(LIKE_DATA.search, resolve_pattern("**", str(Path(source.path).resolve()))))
    left_out = tuple(sorted(Path(name).name for name in others.difference(*files.values())))
    return dataclasses.replace(source, files=files, is_json=builder.name == "json", left_out=left_out)


def load_split(source: DatasetSource, streaming: bool = False, num_rows: int | None = None) -> Any:
    """Load the split of `source`, or its first `num_rows` rows. Read streams in `reading_of`, which explains errors."""
    # Without a list of files, `datasets` would download and convert all other splits too.
    split, files = source.split, source.files[source.split]
    first = next(iter(files), "")
    with reading_of(source):
        # `datasets` identifies a file by its mtime, which `cp -p` and `rsync -t` copy; an address has the revision.
        contents = [(file if streaming or "://" in file else _checksum(file),) for file in files]
        data_files: dict[str, Any] = {split: DataFilesList(files, contents)}
        if source.is_json:
            builder = JsonRows(dataset_name="json_rows", data_files=data_files)
            if not streaming:
                builder.download_and_prepare()
            rows = (builder.as_streaming_dataset if streaming else builder.as_dataset)(split=split)
        else:
            if "://" in first:  # `datasets` wants only `path` of hf://datasets/owner/name@revision/path, as a pattern
                data_files = {split: [re.sub("^hf://[^@]*@[^/]*/", "", glob.escape(file)) for file in files]}
            options = {"data_files": data_files if files else None, **_as_text(files)}
            rows = datasets.load_dataset(source.path, source.config, split=split, streaming=streaming, **options)
        return rows if num_rows is None else rows.take(num_rows)


def _checksum(file: str) -> str:
    """Hash a file's bytes. 2 GiB took 0.5 s from the page cache and 2.2 s from a disk."""
    with pa.memory_map(file) as mapped:
        return xxhash.xxh3_128_hexdigest(mapped.read_buffer())


def _as_text(files: Sequence[str]) -> dict[str, Any]:
    """Return arguments to read CSV cells as text, as pandas reads 42 as 42.0 beside empty cells. Files must agree."""
    kind, names = DATA_FILE.search(next(iter(files), "")), list[str]()
    if kind is None or kind[1] not in (".csv", ".tsv"):
        return {}
    parsing = csv.ParseOptions(delimiter="," if kind[1] == ".csv" else "\t", newlines_in_values=True)
    for file in files:
        with fsspec.open(file, compression="infer") as opened:
            header = csv.open_csv(opened, parse_options=parsing).schema.names  # raises if an early row has more cells
        names += [name or f"Unnamed: {number}" for number, name in enumerate(header)]  # an unnamed index in pandas
    return {"features": Features(dict.fromkeys(names, Value("string"))), "keep_default_na": False}


def first_row(source: DatasetSource, dataset: Any) -> dict[str, Any]:
    """Return the first row, with None for columns that only later rows have. Raise `UserError` if there is no row."""
    number, features = FIRST_ROWS if source.is_json else 1, dataset.features or {}
    with reading_of(source):
        table = next(dataset.with_format("arrow").iter(number), None)  # Arrow does not decode images
        rows = [] if table is None else table.to_pylist()
        if source.is_json:
            rows = [read_row(row[ROW]) for row in rows]
        for name in (name for name, feature in features.items() if isinstance(feature, Json)):
            rows = [{**row, name: row[name] and read_row(row[name])} for row in rows]
    if not rows:
        raise UserError(f"{source.flag} {source.name}: split {source.split} has no row.")
    return dict.fromkeys(name for row in rows for name in row) | rows[0]


class JsonRows(ArrowBasedBuilder):
    """Dataset builder for JSON files with one object per line, or with a list of objects."""

    def _info(self) -> DatasetInfo:
        return DatasetInfo(features=Features({ROW: Value("string")}))

    def _split_generators(self, dl_manager: Any) -> list[SplitGenerator]:
        dl_manager.download_config.extract_on_the_fly = True  # an extracted copy would be identified by its path alone
        splits = dl_manager.download_and_extract(self.config.data_files).items()
        parts = {split: [file for place in places for file in dl_manager.iter_files(place)] for split, places in splits}
        return [SplitGenerator(name=split, gen_kwargs={"files": files}) for split, files in parts.items()]

    def _generate_tables(self, files: list[str]) -> Iterator[tuple[Key, pa.Table]]:
        for number, file in enumerate(files):
            with open(file, encoding="utf-8-sig") as stream:
                rows = _rows(stream, Path(file).name)
                for batch, texts in enumerate(iter(lambda: list(itertools.islice(rows, 1000)), [])):  # noqa: B023
                    yield Key(number, batch), pa.table({ROW: texts})


def _rows(stream: Any, name: str) -> Iterator[str]:
    """Yield each row's JSON text. Raise `ValueError` with `name` and the line number if a row is not a JSON object."""
    number = 0
    try:
        for number, line in enumerate(map(str.strip, stream), 1):  # noqa: B007
            if line.startswith("["):
                yield from _items(f"{line}\n{stream.read()}")
            elif line:
                yield _object(json.loads(line), line)
    except ValueError as error:
        raise ValueError(f"{name}, from line {number}: {error}") from error


def _items(text: str) -> Iterator[str]:
    at, decoder = _BETWEEN.match(text, 1).end(), json.JSONDecoder()  # type: ignore[union-attr]
    while text[at : at + 1] != "]":
        value, end = decoder.raw_decode(text, at)
        yield _object(value, text[at:end])
        at = _BETWEEN.match(text, end).end()  # type: ignore[union-attr]
    if rest := text[at + 1 :].strip():
        raise ValueError(f"unexpected text after the list: {rest[:80]}")


def _object(value: Any, text: str) -> str:
    if not isinstance(value, dict):
        raise ValueError(f"a row must be an object, but one is {text[:80]}")
    return text
