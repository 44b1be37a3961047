"""Tokenise the rows of a dataset and cache the result.

`datasets.map` writes an Arrow file in HF_DATASETS_CACHE. The file's name is a hash of everything that determines its
content (`cache_key`). The file has one row for each row of the dataset, used or not, with the columns `FEATURES`. Rows
of a stream are tokenised to the same columns when they are read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import signal
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import numpy.typing as npt
from datasets import Dataset, Features, IterableDataset, Json, Value
from datasets import Sequence as ListOf
from pyarrow import compute
from transformers import PreTrainedTokenizerBase

from llm_fp8.data.chat import FORMAT_VERSION, PLAIN_TURN, PROMPT_FORM, TEMPLATE_DATE, encode_batch
from llm_fp8.data.load import ROW
from llm_fp8.data.rows import RowForm, Unused, conversation_of, read_row
from llm_fp8.utils.hf_internals import fingerprint
from llm_fp8.utils.ranks import end_with_parent

FEATURES = Features(
    {
        "input_ids": ListOf(Value("int32")),  # ends with EOS unless truncated; empty if the row is not used
        "supervised": ListOf(Value("bool")),  # True if the token is a label
        "length": Value("int32"),  # number of tokens
        "num_supervised": Value("int32"),  # number of labels: the first token is never one
        "outcome": Value("int8"),  # an `Outcome`
        "end": Value("int32"),  # the last token's id; -1 if the row is unused or truncated
        "problem_key": Value("int64"),  # hash of the problem; determines if the row is held out
        "document_key": Value("int64"),  # hash of input_ids and supervised
        "row_id": Value("int64"),  # index of the row in the dataset's split
        "unused": Value("string"),  # JSON object: unused part of the row -> count
    }
)
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # contains the CPU time quota and its period, in microseconds
ROWS_PER_WORKER = 10_000  # takes a few seconds to tokenise; a process takes half a second to start
FIGURES = ("length", "num_supervised", "outcome", "end", "problem_key", "document_key")
Figures = dict[str, npt.NDArray[np.int64]]  # name in `FIGURES` -> column, int64 [number of rows]


class Outcome(IntEnum):
    USED = 0
    TRUNCATED = 1  # used, but truncated to max_seq_length, so it has no EOS
    OVERLONG = 2  # longer than max_seq_length and not used
    EMPTY = 3  # not used, since it has no text, no answer or no supervised token


@dataclass
class DataReport:
    """Counts of the training rows (of a stream: of those read so far), each used, held out, overlong or empty."""

    num_rows_read: int = 0
    num_rows_used: int = 0
    num_rows_held_out: int = 0
    num_overlong_dropped: int = 0
    num_overlong_truncated: int = 0
    num_empty: int = 0
    num_tokens: int = 0
    num_supervised_tokens: int = 0
    padding_efficiency: float | None = None  # tokens / positions in the first epoch; None for a stream
    num_rows_of_batches: int = 0  # number of sequences that the used rows are packed into
    num_eval_rows: int = 0
    eval_rows_left_out: dict[str, int] = field(default_factory=dict)  # reason -> number of rows
    ends: Counter[int] = field(default_factory=Counter)  # id of a last token -> number of used documents
    unused: Unused = field(default_factory=Unused)
    nothing_held_out: str = ""  # reason why no row is held out, if there should be some

    def count(self, tokenised: Dataset, figures: Figures, held_out: npt.NDArray[np.bool_]) -> None:
        """Add the counts of the training rows `tokenised`. `held_out` and each of `figures` have one entry per row."""
        outcomes = Counter(figures["outcome"].tolist())
        filled = figures["length"] > 0
        used = {name: column[filled & ~held_out] for name, column in figures.items()}
        self.num_rows_read += len(held_out)
        self.num_rows_used += len(used["length"])
        self.num_rows_held_out += int((filled & held_out).sum())
        self.num_overlong_truncated += outcomes[Outcome.TRUNCATED]
        self.num_overlong_dropped += outcomes[Outcome.OVERLONG]
        self.num_empty += outcomes[Outcome.EMPTY]
        self.num_tokens += int(used["length"].sum())
        self.num_supervised_tokens += int(used["num_supervised"].sum())
        self.ends += Counter(end for end in used["end"].tolist() if end >= 0)
        self.count_unused(tokenised)

    def count_unused(self, tokenised: Dataset) -> None:
        for value in compute.value_counts(tokenised.data.column("unused")).to_pylist():
            for part, times in json.loads(value["values"]).items():
                self.unused[part] += times * value["counts"]

    def forget_rows(self) -> None:
        """Reset all counts but those of evaluation rows and files, for a stream that is read again from its start."""
        files = Unused({part: number for part, number in self.unused.items() if part.startswith("file ")})
        evaluation = {name: vars(self)[name] for name in ("num_eval_rows", "eval_rows_left_out", "nothing_held_out")}
        vars(self).update(vars(DataReport(**evaluation, unused=files)))

    def summary(self) -> str:
        return (
            f"{self.num_rows_read} rows read, {self.num_rows_used} used, {self.num_rows_held_out} held out, "
            f"{self.num_overlong_dropped} dropped as longer than --max_seq_length, "
            f"{self.num_overlong_truncated} truncated to it, {self.num_empty} empty"
        )

    def describe_unused(self) -> str:
        return "not used: " + (", ".join(f"{part} ({n})" for part, n in self.unused.most_common()) or "nothing else")

    def describe(self) -> list[str]:
        """Return lines to print. They warn if more than 5% of the rows are dropped as overlong or empty."""
        left_out = [f", {number} left out because {why}" for why, number in self.eval_rows_left_out.items() if number]
        scope = "" if self.num_rows_of_batches else "the beginning of the stream: "
        lines = [f"  {scope}{self.summary()}", f"  evaluation: {self.num_eval_rows} rows{''.join(left_out)}"]
        if self.padding_efficiency is not None:  # None at the beginning of a stream
            tokens = f"{self.num_tokens} tokens, {self.num_supervised_tokens} of them supervised"
            filled = f"{self.padding_efficiency:.1%} of the positions filled"
            lines.insert(1, f"  {tokens}, in {self.num_rows_of_batches} sequences: {filled}")
        if self.unused:
            only_columns = all(part.startswith("column ") for part in self.unused)
            lines.append(f"  {'' if only_columns else 'WARNING: '}{self.describe_unused()}")
        if self.nothing_held_out:
            lines.append(f"  WARNING: nothing to evaluate on: {self.nothing_held_out}")
        if self.num_overlong_dropped + self.num_empty > 0.05 * self.num_rows_read:
            lines.append("  WARNING: many rows are not trained on; see the counts above, and --overlong")
        return lines


@dataclass(frozen=True)
class RowOptions:
    """Options for tokenising the rows of one dataset. Every field is part of the cache key."""

    form: RowForm
    columns: Mapping[str, str]  # our name of each column to read -> the dataset's name
    other_columns: Sequence[str]  # columns that are not used; empty for JSON files, whose rows may differ
    max_seq_length: int
    overlong: Literal["drop", "truncate"] = "drop"
    train_on_prompt: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for all rows; a row's column overrides them


@dataclass(frozen=True)
class Document:
    """A tokenised row: `input_ids` int64 [n], `supervised` bool [n] and `row_id`, the row's index in its split."""

    input_ids: npt.NDArray[np.int64]
    supervised: npt.NDArray[np.bool_]
    row_id: int

    def marked_text(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Decode the document to text, in which >>> and <<< enclose each supervised part."""
        ids, marked, end, shown = self.input_ids.tolist(), "", 0, 0
        for supervised, run in itertools.groupby(self.supervised):
            end += len(list(run))
            # Decode from the first token on, since decoding a part alone would drop its leading space.
            text = str(tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False))
            marked, shown = marked + (f">>>{text[shown:]}<<<" if supervised else text[shown:]), len(text)
        return marked


def _hash(content: bytes) -> int:
    """Return a 64-bit hash as a signed integer (Arrow int64)."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big", signed=True)


def problem_key(text: str) -> int:
    """Return a hash of a problem's text. It ignores case, white space and Unicode compatibility forms."""
    return _hash(" ".join(unicodedata.normalize("NFKC", text).casefold().split()).encode())


def content_key(document_keys: Sequence[int] | npt.NDArray[np.int64]) -> str:
    """Return a hash of an ordered sequence of documents, computed from their keys."""
    return hashlib.blake2b(np.asarray(document_keys, dtype=np.int64).tobytes(), digest_size=8).hexdigest()


def _tokenise_batch(
    batch: dict[str, list[Any]],
    row_ids: list[int],
    features: Any,
    tokenizer: PreTrainedTokenizerBase,
    options: RowOptions,
    main_pid: int,
) -> dict[str, list[Any]]:
    """Tokenise a batch, whose columns have types `features`, to columns `FEATURES`. Only `main_pid` heeds Ctrl-C."""
    if main_pid != os.getpid():
        # A terminal sends Ctrl-C to workers too, and each would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_with_parent()
    conversations = []
    for row in _rows_of(batch, features):
        chat = conversation_of({ours: row.get(theirs) for ours, theirs in options.columns.items()}, options.form)
        unread = [name for name in row.keys() - {*options.columns.values()} if row[name] not in (None, "", [], {})]
        chat.unused.update(f"column '{name}'" for name in (*options.other_columns, *unread))
        conversations.append(chat._replace(template_kwargs={**options.template_kwargs, **chat.template_kwargs}))
    encoded = encode_batch(conversations, options.form, tokenizer, options.train_on_prompt)
    rows: list[Sequence[Any]] = []
    for chat, row_id, (ids, supervised) in zip(conversations, row_ids, encoded, strict=True):
        outcome = Outcome.USED
        if len(ids) > options.max_seq_length:
            outcome = Outcome.TRUNCATED if options.overlong == "truncate" else Outcome.OVERLONG
            ids, supervised = ids[: options.max_seq_length], supervised[: options.max_seq_length]
        if outcome is not Outcome.OVERLONG and not any(supervised[1:]):
            outcome = Outcome.OVERLONG if outcome is Outcome.TRUNCATED else Outcome.EMPTY
        if outcome >= Outcome.OVERLONG:
            ids, supervised = [], []
        document_key = _hash(np.array(ids, np.int32).tobytes() + np.array(supervised, bool).tobytes())
        ended = outcome is Outcome.USED and (options.form != "token_ids" or ids[-1] in tokenizer.added_tokens_decoder)
        figures = len(ids), sum(supervised[1:]), outcome, ids[-1] if ended else -1
        unused = json.dumps(+chat.unused, sort_keys=True)
        rows.append((ids, supervised, *figures, problem_key(chat.problem()), document_key, row_id, unused))
    return {name: [values[i] for values in rows] for i, name in enumerate(FEATURES)}


def _rows_of(batch: dict[str, list[Any]], features: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch as they are in the file, that is, without the None fields that Arrow added."""
    if ROW in batch:
        yield from map(read_row, batch[ROW])
        return
    for values in zip(*batch.values(), strict=True):
        yield {name: _as_stored(value, (features or {}).get(name)) for name, value in zip(batch, values, strict=True)}


def _as_stored(value: Any, feature: Any) -> Any:
    """Return `value` without the None fields that Arrow adds if rows have different fields. JSON columns have none."""
    if isinstance(feature, Json):
        return value
    if isinstance(value, Mapping):
        inner: Any = feature if isinstance(feature, Mapping) else {}
        return {name: _as_stored(item, inner.get(name)) for name, item in value.items() if item is not None}
    inner = getattr(feature, "feature", None)
    return [_as_stored(item, inner) for item in value] if isinstance(value, list) else value


def cache_key(dataset_fingerprint: str, tokenizer: PreTrainedTokenizerBase, options: RowOptions) -> str:
    """Return a hash of everything that determines the tokenised dataset, for the name of its cache file."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        # Padding and truncation are settings of earlier calls; ours use neither.
        rules: Any = {**json.loads(backend.to_str()), "padding": None, "truncation": None}
    else:
        rules = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), repr(tokenizer.init_kwargs)]
    special = [tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token]
    constants = [FORMAT_VERSION, PROMPT_FORM, PLAIN_TURN, TEMPLATE_DATE.isoformat(), FEATURES.to_dict()]
    content = [dataset_fingerprint, rules, special, dataclasses.asdict(options), constants]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:32]


def tokenise(dataset: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, options: RowOptions) -> Any:
    """Return the tokenised dataset or stream, with the columns `FEATURES`. A tokenised dataset is cached on disk."""
    columns = [ROW] if dataset.column_names == [ROW] else list(options.columns.values())
    selected = dataset.select_columns(columns)
    settings: dict[str, Any] = {"batched": True, "with_indices": True, "remove_columns": columns, "features": FEATURES}
    arguments = {"tokenizer": tokenizer, "options": options, "main_pid": os.getpid()}
    settings["fn_kwargs"] = {"features": selected.features, **arguments}
    if isinstance(selected, IterableDataset):
        return selected.map(_tokenise_batch, **settings)
    key = cache_key(fingerprint(dataset), tokenizer, options)
    file = Path(datasets.config.HF_DATASETS_CACHE) / "llm_fp8" / f"tokenised-{key}.arrow"
    file.parent.mkdir(parents=True, exist_ok=True)
    settings |= {"new_fingerprint": key, "cache_file_name": str(file), "desc": "tokenising"}
    workers = min(cores_of_job(), 1 + len(selected) // ROWS_PER_WORKER)
    return selected.map(_tokenise_batch, num_proc=workers if workers > 1 else None, **settings)


def cores_of_job() -> int:
    """Return the number of CPU cores that this process may use. CPU affinity and container quota limit it."""
    cores = len(os.sched_getaffinity(0))
    quota, period = CPU_QUOTA.read_text().split() if CPU_QUOTA.exists() else ("max", "")
    return cores if quota == "max" else min(cores, math.ceil(int(quota) / int(period)))


def next_rows(stream: Iterator[dict[str, Any]], number: int) -> Dataset:
    """Read the next `number` rows of a tokenised stream, or fewer if the stream ends."""
    rows = list(itertools.islice(stream, number))
    return Dataset.from_dict({name: [row[name] for row in rows] for name in FEATURES}, FEATURES)


def figures_of(tokenised: Dataset) -> Figures:
    columns = tokenised.with_format("numpy", columns=list(FIGURES))[:]
    return {name: np.asarray(columns[name], dtype=np.int64) for name in FIGURES}


def document_reader(tokenised: Dataset) -> Callable[[Sequence[int]], list[Document]]:
    """Return a function that reads the documents at given indices of a tokenised dataset."""
    names = ["input_ids", "supervised", "row_id"]
    rows = tokenised.with_format("numpy", columns=names)

    def read(indices: Sequence[int]) -> list[Document]:
        columns = rows[list(indices)]
        return [
            Document(ids.astype(np.int64), supervised.astype(bool), int(row_id))
            for ids, supervised, row_id in zip(*(columns[name] for name in names), strict=True)
        ]

    return read
