"""Sequences in global batches: `MapSequences` of a prepared dataset, `StreamSequences` of a stream (`--streaming`).

A sequence is a packed group of documents, or a single one. Both classes yield global batches without end, each with the
position after it, a dict that JSON can hold; from a position they continue exactly. A global batch depends on its size
alone (batch_size * gradient_accumulation_steps * world_size), not on how ranks share it.

`MapSequences` visits every sequence once an epoch, in an order drawn from (seed, epoch); the last global batch of an
epoch may be smaller.

`StreamSequences` reads, tokenises and packs a buffer of dataset rows and shuffles its sequences by (seed, number of the
buffer). Poorly filled sequences pass their documents on to the next buffer, each document at most once. At its end the
stream begins anew, and no global batch is smaller. A position names the beginning of a buffer (the state of the
`datasets` stream and the documents passed on to it) and how many of its sequences are done: resuming fills the buffer
again. Every rank reads the full stream.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from datasets import IterableDataset

from llm_fp8.data.pack import PackingPlan, pack
from llm_fp8.data.tokenise import DataReport, Document, Figures, content_key
from llm_fp8.utils.errors import UserError

Position = dict[str, Any]
Documents = list[Document]
Reader = Callable[[], Documents]
"""Reads the documents of a sequence, so that a rank reads only its own."""

STREAM_BUFFER_ROWS = 8192
"""Dataset rows that are read, packed and shuffled at a time."""

POORLY_FILLED = 0.9
"""A packed sequence filled less than this hands its documents on to the next buffer."""

MAX_SEQUENCES_HANDED_ON = 16
"""At most so many do, the emptiest first: their documents are part of every position."""


class GlobalBatch(NamedTuple):
    """Sequences of one optimizer step, the position and the progress in epochs after them."""

    sequences: Sequence[Reader]
    position: Position
    epoch: float


def sequence_readers(
    plan: PackingPlan, read: Callable[[Sequence[int]], Documents], chosen: Iterable[int] | None = None
) -> list[Reader]:
    """Readers of the `chosen` sequences of the plan, by default of all."""
    numbers = range(len(plan)) if chosen is None else chosen
    return [partial(lambda number: read(plan[number].tolist()), number) for number in numbers]


@dataclass(frozen=True)
class MapSequences:
    """Sequences of a plan over the documents that `read` returns by index. `data` identifies plan and documents."""

    plan: PackingPlan
    read: Callable[[Sequence[int]], Documents]
    seed: int
    data: str

    @property
    def num_sequences(self) -> int:
        return len(self.plan)

    def start(self) -> Position:
        return {"kind": "rows", "data": self.data, "epoch": 0, "next_row": 0}

    def global_batches(self, position: Position, size: int) -> Iterator[GlobalBatch]:
        epoch, next_row = int(position["epoch"]), int(position["next_row"])
        while True:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.plan))
            while next_row < len(order):
                chosen = order[next_row : next_row + size].tolist()
                next_row += len(chosen)
                ended = next_row == len(order)
                after = {**self.start(), "epoch": epoch + ended, "next_row": 0 if ended else next_row}
                yield GlobalBatch(sequence_readers(self.plan, self.read, chosen), after, epoch + next_row / len(order))
            epoch, next_row = epoch + 1, 0


class StreamedRows(NamedTuple):
    """Rows of a stream, tokenised: documents to train on and held-out ones, and the columns that are counted."""

    train: Documents
    held_out: Documents
    figures: Figures
    is_held_out: npt.NDArray[np.bool_]


@dataclass
class StreamSequences:
    """Training sequences of a stream, packed into `capacity` tokens, or one document each where `capacity` is None.

    `open_stream` returns the stream at its beginning, `iterate` yields its rows, `tokenise` takes some with their
    indices; `report` is kept up to date. `data` identifies all of it.
    """

    open_stream: Callable[[], IterableDataset]
    iterate: Callable[[IterableDataset], Iterator[Any]]
    tokenise: Callable[[Sequence[Any], Sequence[int]], StreamedRows]
    capacity: int | None
    seed: int
    data: str
    report: DataReport
    document_multiple: int = 1
    """Packed documents are padded to a multiple of this."""
    buffer_rows: int = STREAM_BUFFER_ROWS
    counted: tuple[int, int] = (0, 0)
    """Epoch and dataset row up to which the report counts: a refilled buffer is not counted again."""

    num_sequences = None  # not known

    def start(self) -> Position:
        return {
            "kind": "stream",
            "data": self.data,
            "epoch": 0,
            "buffer": 0,  # how many buffers were begun before this one
            "next_row": 0,  # sequences of it that are done
            "source_row": 0,  # index of its first row in the dataset
            "source": None,  # state of the stream before it; None for the beginning
            "carried": [],  # documents handed on to it
            "content": None,  # hash of its rows' documents; None before it was read
        }

    def global_batches(self, position: Position, size: int) -> Iterator[GlobalBatch]:
        batch: list[Documents] = []
        for sequence, after in self._sequences(position):
            batch.append(sequence)
            if len(batch) == size:
                yield GlobalBatch([documents.copy for documents in batch], after, float(after["epoch"]))
                batch = []

    def _sequences(self, position: Position) -> Iterator[tuple[Documents, Position]]:
        """Every sequence from `position` on, each with the position after it."""
        begin = dict(position)
        while True:
            full_pass = begin["source"] is None
            stream = self.open_stream()
            if begin["source"] is not None:
                stream.load_state_dict(copy.deepcopy(begin["source"]))
            source = self.iterate(stream)
            num_sequences, ended = 0, False
            while not ended:
                raw = list(islice(source, self.buffer_rows))
                ended = len(raw) < self.buffer_rows
                next_source_row = begin["source_row"] + len(raw)
                streamed = self.tokenise(raw, range(begin["source_row"], next_source_row))
                content = content_key(streamed.figures["document_key"])
                if begin.get("content") not in (None, content):
                    raise UserError(
                        f"--resume_from: rows {begin['source_row']} to {next_source_row} of the stream are not those "
                        "that the checkpoint's run read; restore the dataset, or begin a new run."
                    )
                carried = [Document.of(**document) for document in begin["carried"]]
                sequences, handed_on = self._plan(carried, streamed.train, ended)
                if (begin["epoch"], begin["source_row"]) >= self.counted:
                    self.report.count(streamed.figures, streamed.is_held_out)
                    self.report.num_rows_of_batches += len(sequences)
                    self.counted = (begin["epoch"], next_source_row)
                order = np.random.default_rng([self.seed, begin["buffer"]]).permutation(len(sequences)).tolist()
                for done, number in enumerate(order[begin["next_row"] :], start=begin["next_row"] + 1):
                    yield sequences[number], {**begin, "next_row": done, "content": content}
                num_sequences += len(sequences)
                begin = {
                    **begin,
                    "epoch": begin["epoch"] + ended,
                    "buffer": begin["buffer"] + 1,
                    "next_row": 0,
                    "source_row": 0 if ended else next_source_row,
                    "source": None if ended else stream.state_dict(),
                    "carried": [document.to_dict() for document in handed_on],
                    "content": None,
                }
            if full_pass and num_sequences == 0:
                raise UserError(f"--dataset_name: no row of the stream can be trained on: {self.report.summary()}.")

    def _plan(self, carried: Documents, fresh: Documents, last: bool) -> tuple[list[Documents], Documents]:
        """Sequences to train on, and documents to hand on to the next buffer (none from an epoch's `last`)."""
        documents = carried + fresh
        if self.capacity is None:
            return [[document] for document in documents], []
        lengths = [len(document.input_ids) for document in documents]
        plan = pack(lengths, self.capacity, self.document_multiple)
        emit, handed_on = list(range(len(plan))), []
        if not last:
            fill = {number: sum(lengths[i] for i in plan[number]) for number in emit}
            poor = [n for n in emit if fill[n] < POORLY_FILLED * self.capacity and plan[n].min() >= len(carried)]
            handed_on = sorted(poor, key=fill.__getitem__)[:MAX_SEQUENCES_HANDED_ON]
            emit = sorted(set(emit) - set(handed_on))
        sequences = [[documents[i] for i in plan[number]] for number in emit]
        return sequences, [documents[i] for number in handed_on for i in plan[number]]
