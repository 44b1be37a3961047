"""Damages the files that users bring, a thousand ways, and counts what their readers make of it.

    python -m tests.faults.fuzz --seed 1 --count 3000 [--readers config.json,latest] [--output inputs.json]

A reader may succeed or refuse: a `UserError` that names the file. Any other exception and more than `LIMIT_S` seconds
are failures. The program prints a JSON summary, and the first failures of each reader with the seed that repeats them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import transformers

from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.limits import time_limit

LIMIT_S = 20.0
"""For one file. The slowest reader builds a model of two layers."""

OTHER_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 0.5, -0.0, 2**31, 2**63, 10**30, 1e308, float("inf"), float("nan")),
    *("", "text", "0", "NaN", "Infinity", "[bold]", "a\x00b", "../..", "\ud800", "é" * 50),
    *([], [1], ["a", None], [[]], {}, {"a": 1}, {"": None}),
)


@dataclass
class Tally:
    """What became of the damaged files of one reader."""

    tried: int = 0
    accepted: int = 0
    refused: int = 0
    tracebacks: int = 0
    failures: list[str] = field(default_factory=list)
    """Text of each kind of failure once, with its seed."""
    kinds: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Reader:
    """One kind of file: where it lies below the folder of good files, and what reads it."""

    file: str
    read: Callable[[Path], object]
    """Given the folder."""
    named: str = ""
    """What a refusal must hold, default the file's name."""
    deepest: int = 100_000
    """Levels of nesting that are tried. pyarrow 26's JSON reader ends the process at some ten thousand."""


def damaged(text: bytes, rng: random.Random, deepest: int = Reader.deepest) -> bytes:
    """`text` with one to three things wrong."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        mutate = rng.choice((_change_value, _change_value, _change_value, _change_bytes))
        text = mutate(text, rng, deepest)
    return text


def _change_value(text: bytes, rng: random.Random, deepest: int) -> bytes:
    """One value of a JSON or JSONL file is replaced, dropped, doubled, renamed or nested; another file loses bytes."""
    lines = text.split(b"\n")
    at = rng.randrange(len(lines)) if text.count(b"\n{") else None
    try:
        tree = json.loads(text if at is None else lines[at])
    except (ValueError, RecursionError):
        return _change_bytes(text, rng, deepest)
    places = list(_places(tree))
    if not places:
        return json.dumps(rng.choice(OTHER_VALUES)).encode()
    parent, key = rng.choice(places)
    how = rng.choice(("replace", "replace", "replace", "drop", "rename", "double", "nest", "digits"))
    marker = "\u0001marker"
    if how == "drop":
        del parent[key]
    elif how == "rename" and isinstance(parent, dict):
        parent[rng.choice(("", "x", key + " "))] = parent.pop(key)
    elif how == "double" and isinstance(parent, dict):
        parent[marker] = rng.choice(OTHER_VALUES)
    elif how in ("nest", "digits"):
        parent[key] = marker
    else:
        parent[key] = rng.choice(OTHER_VALUES)
    words = json.dumps(tree, indent=1 if at is None else None)
    deep = min(rng.choice((50, 2000, 100_000)), deepest)
    value = "[" * deep + "]" * deep if how == "nest" else rng.choice("19") * rng.choice((400, 5000))
    quoted = json.dumps(marker)
    words = words.replace(quoted, json.dumps(key) if how == "double" else value)
    return words.encode() if at is None else b"\n".join((*lines[:at], words.encode(), *lines[at + 1 :]))


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) in a tree, those near the root as often as all the others of the tree: a
    tokenizer's file is nearly all vocabulary.
    """
    found: list[tuple[Any, Any]] = []
    level = [tree]
    for depth in range(6):
        here = [
            (node, key)
            for node in level
            for key in (node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ())
        ]
        found += random.Random(depth).sample(here, min(len(here), 60))
        level = [node[key] for node, key in here]
    return found


def _change_bytes(text: bytes, rng: random.Random, deepest: int) -> bytes:
    """Bytes are cut off, cut out, flipped, put in or doubled."""
    how = rng.randrange(7)
    start, stop = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    if how == 0:
        return text[:start]
    if how == 1:
        return text[:start] + text[stop:]
    if how == 2 and text:
        flipped = bytearray(text)
        for _ in range(rng.choice((1, 1, 5))):
            flipped[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if how == 3:
        return (
            text[:start]
            + rng.choice((b"\xff", b"\x00", b"\n", b"{", b'"', b"\xef\xbb\xbf", b"1e999", b"!!timestamp ", b"!!int "))
            + text[start:]
        )
    if how == 4:
        return rng.choice((b"", b"\xff\xfe", b"null", b"[]", b"{}", b"\n", b"\xef\xbb\xbf" + text, b"\x00" * 100))
    if how == 5:
        return text[:start] + text[start:stop] * 2 + text[stop:]
    return text[:start] + bytes(rng.randrange(256) for _ in range(8)) + text[start:]


def try_reader(reader: Reader, folder: Path, seed: int, count: int) -> Tally:
    """Read `count` damaged copies of the reader's file in `folder`, which holds it whole again afterwards."""
    path, tally = folder / reader.file, Tally()
    good = path.read_bytes()
    reader.read(folder)
    try:
        for case in range(count):
            label = f"{seed}/{case}"
            path.write_bytes(damaged(good, random.Random(f"{reader.file} {label}"), reader.deepest))
            tally.tried += 1
            try:
                said = io.StringIO()
                with time_limit(LIMIT_S), warnings.catch_warnings(), contextlib.redirect_stderr(said):
                    warnings.simplefilter("ignore")
                    reader.read(folder)
                tally.accepted += 1
            except (UserError, SystemExit) as error:
                text = str(error) if isinstance(error, UserError) else said.getvalue()
                if (reader.named or path.name) in text and "\n" not in text.rstrip("\n"):
                    tally.refused += 1
                else:
                    _fail(tally, f"not one line that names {reader.named or path.name}", f"{label}: {text}")
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}"
                _fail(tally, kind, f"{label}: {''.join(traceback.format_exception(error)[-6:])}")
    finally:
        path.write_bytes(good)
    return tally


def _fail(tally: Tally, kind: str, text: str) -> None:
    tally.tracebacks += 1
    tally.kinds[kind] += 1
    if tally.kinds[kind] == 1:
        tally.failures.append(text)


def main() -> int:
    """Try every reader; 1 where one fails."""
    from tests.faults.readers import READERS, write_good_files

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000, help="damaged files for each reader")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--readers", default=",".join(READERS))
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)
    summary = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        datasets.config.HF_DATASETS_CACHE = folder / "cache"
        write_good_files(folder)
        for reader in options.readers.split(","):
            tally = try_reader(READERS[reader], folder, options.seed, options.count)
            counts = {key: getattr(tally, key) for key in ("tried", "accepted", "refused", "tracebacks")}
            summary.append({"reader": reader, **counts, "kinds": dict(tally.kinds)})
            print(f"{reader}: {counts}", file=sys.stderr, flush=True)
            for failure in tally.failures:
                print(f"---- {reader} {failure}", file=sys.stderr, flush=True)
    print(json.dumps(summary, indent=1))
    if options.output:
        record = {"provenance": collect_provenance(sys.argv), "seed": options.seed, "readers": summary}
        write_json_atomic(options.output, record)
    return int(any(entry["tracebacks"] for entry in summary))


if __name__ == "__main__":
    sys.exit(main())
