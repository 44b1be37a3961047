"""Rows become documents, once: the tokenised dataset and its cache.

The tokenised rows are an Arrow file that `datasets.map` writes and memory-maps. Its name is a hash of everything that
shapes its content (`cache_key`): batch size, seed, packing and held-out share reuse the file; another tokenizer or chat
template makes a new one. Every row of the dataset has its row there, also the unused ones; the columns are `FEATURES`.

Beside each file stands its checksum (xxh3, 10 GB/s; sha256 would take 1 s per GB at every start): a file that was
damaged or cut would train on other tokens without a word, so it is made anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from datasets import Dataset, Features, Value
from datasets import Sequence as ListOf
from transformers import PreTrainedTokenizerBase

from llm_fp8.data.prompt import (
    COLUMNS,
    FORMAT_VERSION,
    OPTIONAL_COLUMNS,
    PLAIN_TURN,
    PROMPT_FORM,
    TEMPLATE_DATE,
    ColumnForm,
    encode_batch,
    problem_of,
)
from llm_fp8.data.split import problem_key
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import write_text_atomic
from llm_fp8.utils.subprocesses import forked_processes_end_with_this_one

FEATURES = Features(
    {
        "input_ids": ListOf(Value("int32")),  # EOS last; empty where the row is not used
        "supervised": ListOf(Value("bool")),  # whether the token is to be predicted
        "length": Value("int32"),
        "num_supervised": Value("int32"),  # after the shift: the first token is never predicted
        "outcome": Value("int8"),  # an `Outcome`
        "problem_key": Value("int64"),  # hash of the problem, by which the held-out share is cut
        "document_key": Value("int64"),  # hash of input_ids and supervised
        "row_id": Value("int64"),  # index of the row in the dataset's split
    }
)

FIGURES = ("length", "num_supervised", "outcome", "problem_key", "document_key")
Figures = dict[str, npt.NDArray[np.int64]]
"""Columns of `FIGURES`, [number of rows] each."""


MANY_DROPPED = 0.05
"""Share of the rows from which dropping them is warned of."""


class Outcome(IntEnum):
    USED = 0
    TRUNCATED = 1  # used, but cut at max_seq_length: without EOS
    OVERLONG = 2  # longer than max_seq_length and dropped
    EMPTY = 3  # without a solution, or without a supervised token


NOTHING_TO_LEARN = "nothing to learn: no text, no answer, or no turn of the role 'assistant'"
"""Of rows that are counted as empty."""


@dataclass
class DataReport:
    """Counts over the training split; with streaming over what this process has read so far, pass after pass.

    rows read = used + held out + overlong dropped + empty. Truncated rows are used or held out.
    """

    num_rows_read: int = 0
    num_rows_used: int = 0
    """Rows trained on."""
    num_rows_held_out: int = 0
    """Rows of the training split kept for evaluation."""
    num_overlong_dropped: int = 0
    num_overlong_truncated: int = 0
    num_empty: int = 0
    first_overlong_row: int | None = None
    """Of those dropped, its number in the split."""
    first_empty_row: int | None = None
    num_tokens: int = 0
    """Of the rows trained on."""
    num_supervised_tokens: int = 0
    num_rows_of_batches: int = 0
    """Sequences of max_seq_length tokens into which they were packed, or padded."""
    max_seq_length: int = 0
    num_eval_rows: int = 0
    """Whichever split they came from."""
    num_eval_rows_seen_in_training: int = 0
    """Rows left out of a validation split because their problem is trained on."""

    @property
    def padding_efficiency(self) -> float | None:
        """The filled share of the positions."""
        positions = self.num_rows_of_batches * self.max_seq_length
        return self.num_tokens / positions if positions else None

    def count(self, figures: Figures, held_out: npt.NDArray[np.bool_]) -> None:
        """Add rows of the training split by their `figures`."""
        outcomes = np.bincount(figures["outcome"], minlength=len(Outcome)).tolist()
        filled = figures["length"] > 0
        used = filled & ~held_out
        first = {
            outcome: self.num_rows_read + int(np.argmax(figures["outcome"] == outcome))
            for outcome in Outcome
            if outcomes[outcome]
        }
        if self.first_overlong_row is None:
            self.first_overlong_row = first.get(Outcome.OVERLONG)
        if self.first_empty_row is None:
            self.first_empty_row = first.get(Outcome.EMPTY)
        self.num_rows_read += len(held_out)
        self.num_rows_used += int(used.sum())
        self.num_rows_held_out += int((filled & held_out).sum())
        self.num_overlong_truncated += outcomes[Outcome.TRUNCATED]
        self.num_overlong_dropped += outcomes[Outcome.OVERLONG]
        self.num_empty += outcomes[Outcome.EMPTY]
        self.num_tokens += int(figures["length"][used].sum())
        self.num_supervised_tokens += int(figures["num_supervised"][used].sum())

    def summary(self) -> str:
        return (
            f"{self.num_rows_read} rows read, {self.num_rows_used} used, {self.num_rows_held_out} held out, "
            f"{self.num_overlong_dropped} dropped as longer than {self.max_seq_length} tokens, "
            f"{self.num_overlong_truncated} truncated to that, {self.num_empty} empty"
        )

    def warning(self) -> str | None:
        """A sentence where more than `MANY_DROPPED` of the rows are not used."""
        dropped = self.num_overlong_dropped + self.num_empty
        if dropped <= MANY_DROPPED * self.num_rows_read:
            return None
        reasons = []
        if self.num_overlong_dropped:
            reasons.append(
                f"{self.num_overlong_dropped} are longer than {self.max_seq_length} tokens (the first is row "
                f"{self.first_overlong_row}; --max_seq_length or --overlong truncate keeps them)"
            )
        if self.num_empty:
            reasons.append(f"{self.num_empty} have {NOTHING_TO_LEARN} (the first is row {self.first_empty_row})")
        share = dropped / self.num_rows_read
        return f"WARNING: {share:.1%} of the rows are not trained on: {' and '.join(reasons)}"

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "padding_efficiency": self.padding_efficiency}


@dataclass(frozen=True)
class TokeniseOptions:
    """How rows become documents; every field shapes the cached result."""

    form: ColumnForm
    max_seq_length: int
    overlong: Literal["drop", "truncate"] = "drop"
    train_on_prompt: bool = False


@dataclass(frozen=True)
class Document:
    """One tokenised row: `input_ids` int64 [n], `supervised` bool [n] and the row's index."""

    input_ids: npt.NDArray[np.int64]
    supervised: npt.NDArray[np.bool_]
    row_id: int

    @classmethod
    def of(cls, input_ids: Sequence[int], supervised: Sequence[bool], row_id: int) -> Document:
        return cls(np.array(input_ids, dtype=np.int64), np.array(supervised, dtype=bool), row_id)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `of` takes it back."""
        supervised = self.supervised.astype(int).tolist()
        return {"input_ids": self.input_ids.tolist(), "supervised": supervised, "row_id": self.row_id}


def document_key(input_ids: Sequence[int], supervised: Sequence[bool]) -> int:
    """64-bit hash of a document as a signed integer (Arrow int64)."""
    content = np.array(input_ids, dtype=np.int32).tobytes() + np.array(supervised, dtype=bool).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big", signed=True)


def content_key(document_keys: npt.NDArray[np.int64]) -> str:
    """Hash of documents in their order, by their keys."""
    return hashlib.blake2b(document_keys.tobytes(), digest_size=8).hexdigest()


def tokenise_rows(
    rows: Sequence[Mapping[str, Any]],
    row_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    options: TokeniseOptions,
) -> dict[str, list[Any]]:
    """The columns of `FEATURES` for `rows`."""
    columns: dict[str, list[Any]] = {name: [] for name in FEATURES}
    encoded = encode_batch(rows, options.form, tokenizer, options.train_on_prompt)
    for row, row_id, (ids, supervised) in zip(rows, row_ids, encoded, strict=True):
        outcome = Outcome.USED
        if len(ids) > options.max_seq_length:
            outcome = Outcome.TRUNCATED if options.overlong == "truncate" else Outcome.OVERLONG
            ids, supervised = ids[: options.max_seq_length], supervised[: options.max_seq_length]
        if outcome is not Outcome.OVERLONG and not any(supervised[1:]):
            outcome = Outcome.EMPTY
        if outcome in (Outcome.OVERLONG, Outcome.EMPTY):
            ids, supervised = [], []
        key = problem_key(problem_of(row, options.form))
        own = document_key(ids, supervised)
        values = (ids, supervised, len(ids), sum(supervised[1:]), int(outcome), key, own, row_id)
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
    return columns


def _tokenise_columns(
    batch: dict[str, list[Any]], row_ids: list[int], tokenizer: PreTrainedTokenizerBase, options: TokeniseOptions
) -> dict[str, list[Any]]:
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    return tokenise_rows(rows, row_ids, tokenizer, options)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of what the tokenizer does to a text: vocabulary, rules, chat template and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # padding and truncation are left behind by earlier calls; ours ask for neither.
        rules: Any = {**json.loads(backend.to_str()), "padding": None, "truncation": None}
    else:
        init = repr(sorted(tokenizer.init_kwargs.items(), key=str))
        rules = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), init]
    content = [rules, tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def cache_key(dataset_fingerprint: str, tokenizer: PreTrainedTokenizerBase, options: TokeniseOptions) -> str:
    """Hash of everything that shapes the tokenised dataset."""
    content = [
        dataset_fingerprint,
        tokenizer_digest(tokenizer),
        [options.form, options.max_seq_length, options.overlong, options.train_on_prompt],
        [FORMAT_VERSION, PROMPT_FORM, PLAIN_TURN, TEMPLATE_DATE.isoformat(), FEATURES.to_dict()],
    ]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def tokenise(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    options: TokeniseOptions,
    cache_dir: str | None = None,
    num_workers: int = 1,
) -> Dataset:
    """The tokenised form of `dataset`, cached."""
    key = cache_key(dataset._fingerprint, tokenizer, options)
    optional = OPTIONAL_COLUMNS.get(options.form, ())
    columns = [*COLUMNS[options.form], *(name for name in optional if name in dataset.column_names)]
    root = Path(cache_dir) if cache_dir is not None else Path(datasets.config.HF_DATASETS_CACHE) / "llm_fp8"
    folder = root / f"tokenised-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:  # a file, or a link to a disk that is not there
        raise UserError(
            f"the datasets cache {root} is, or lies below, what is no folder; set HF_DATASETS_CACHE to another."
        ) from error
    with _only_writer_in(folder):
        for path in folder.glob("*.arrow"):
            if _checksum_file(path).is_file() and _checksum_file(path).read_text() == _checksum(path):
                continue
            print(f"the token cache {path} is damaged or incomplete, and is made anew", flush=True)
            path.unlink()
            _checksum_file(path).unlink(missing_ok=True)
        with _workers_that_end_with_us():
            tokenised = dataset.select_columns(columns).map(
                _tokenise_columns,
                batched=True,
                with_indices=True,
                fn_kwargs={"tokenizer": tokenizer, "options": options},
                remove_columns=columns,
                features=FEATURES,
                num_proc=num_workers if num_workers > 1 else None,
                new_fingerprint=key,
                cache_file_name=str(folder / "rows.arrow"),
                load_from_cache_file=True,
                desc="tokenising",
            )
        for path in {Path(file["filename"]) for file in tokenised.cache_files}:  # none where there are no rows
            if not _checksum_file(path).is_file():
                write_text_atomic(_checksum_file(path), _checksum(path))
    return tokenised


@contextlib.contextmanager
def _workers_that_end_with_us() -> Iterator[None]:
    """Around `datasets.map`: Ctrl-C and signals end its processes too, and Ctrl-C stays Ctrl-C."""
    try:
        with forked_processes_end_with_this_one():
            yield
    except Exception as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # `map` asks its workers for results on the way out
            raise KeyboardInterrupt from None
        raise


@contextlib.contextmanager
def _only_writer_in(folder: Path) -> Iterator[None]:
    """Wait until no other process writes to `folder`, and remove what killed ones left half written."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # read-only, or a file system without locks
            lock = stack.enter_context(open(folder / ".lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            for path in folder.glob("tmp*"):
                path.unlink()
        yield


def _checksum_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.xxh3")


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()


def document_reader(tokenised: Dataset) -> Callable[[Sequence[int]], list[Document]]:
    """Reads documents of a tokenised dataset by index from its memory-mapped columns, in about 10 us each; through a
    `datasets` row it takes many times longer.
    """
    table = arrow_table(tokenised)
    columns = [table.column(name) for name in ("input_ids", "supervised", "row_id")]

    def read(indices: Sequence[int]) -> list[Document]:
        documents = []
        for index in indices:
            ids, supervised, row_id = (column[index] for column in columns)
            supervised = supervised.values.to_numpy(zero_copy_only=False)  # the file holds bits
            documents.append(Document(ids.values.to_numpy().astype(np.int64), supervised, row_id.as_py()))
        return documents

    return read


def arrow_table(tokenised: Dataset) -> pa.Table:
    """The memory-mapped table of a `tokenise`d dataset; `ValueError` if rows were picked or shuffled since."""
    if tokenised._indices is not None:
        raise ValueError("the dataset's rows are not in the order of its table")
    return tokenised.data.table
