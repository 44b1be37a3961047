"""JSON files become rows of text: every row is its JSON text in the file.

`datasets` would read rows into Arrow's types: text that looks like a date would become one, and a null field of a row
would look like a field that only other rows have.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import ArrowBasedBuilder, DatasetInfo, Features, SplitGenerator, Value
from datasets.builder import Key

ROW = "row of a JSON file"
"""Name of the only column."""
_BETWEEN = re.compile(r"[\s,]*")


class JsonRows(ArrowBasedBuilder):
    """Reader of JSON files, also compressed or streamed: one object a line, or a list of objects."""

    def _info(self) -> DatasetInfo:
        return DatasetInfo(features=Features({ROW: Value("string")}))

    def _split_generators(self, dl_manager: Any) -> list[SplitGenerator]:
        dl_manager.download_config.extract_on_the_fly = True  # a copy would be known by its path alone
        splits = dl_manager.download_and_extract(self.config.data_files).items()
        parts = {split: [file for place in places for file in dl_manager.iter_files(place)] for split, places in splits}
        return [SplitGenerator(name=split, gen_kwargs={"files": files}) for split, files in parts.items()]

    def _generate_tables(self, files: list[str]) -> Iterator[tuple[Key, pa.Table]]:
        for number, file in enumerate(files):
            with open(file, encoding="utf-8-sig") as stream:
                rows = _rows(stream, Path(file).name)
                for batch, texts in enumerate(iter(lambda: list(itertools.islice(rows, 1000)), [])):  # noqa: B023
                    yield Key(number, batch), pa.table({ROW: texts})


def read_row(text: str) -> Any:
    """Parse a row; a number that is no integer keeps its text for columns that hold text."""
    return json.loads(text, parse_float=_Number)


class _Number(float):
    """A number that prints as its text in the file."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


def _rows(stream: Any, name: str) -> Iterator[str]:
    """Yield the text of each row; `ValueError` names the line of a text that is no row."""
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
        raise ValueError(f"after the list there is {rest[:80]}")


def _object(value: Any, text: str) -> str:
    if isinstance(value, str):
        return json.dumps({"text": value})
    if not isinstance(value, dict):
        raise ValueError(f"a row must be an object, and one is {text[:80]}")
    return text
