"""Sequences in global batches: `MapSequences` of a prepared dataset, `StreamSequences` of a stream (`--streaming`).

A sequence is a packed group of documents, or a single one. Both classes yield global batches without end, each with the
position after it, a dict that JSON can hold; from a position they continue exactly. A global batch depends on its size
alone (batch_size * gradient_accumulation_steps * world_size), not on how ranks share it.

`MapSequences` visits every sequence once an epoch, in an order drawn from (seed, epoch); the last global batch of an
epoch may be smaller.

`StreamSequences` reads and packs a buffer of tokenised rows and shuffles its sequences by (seed, number of the buffer).
At its end the stream begins anew, and no global batch is smaller. Every rank reads the full stream. A position has the
number of a buffer, the state of the `datasets` stream before it (None at the beginning), how many of its sequences are
done and a hash of its documents (None before it was read): resuming fills the buffer again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from llm_fp8.data.load import DatasetSource, reading_of
from llm_fp8.data.pack import PackingPlan
from llm_fp8.data.split import is_held_out
from llm_fp8.data.tokenise import DataReport, Document, content_key, document_reader, figures_of, next_rows
from llm_fp8.utils.errors import UserError

Position = dict[str, Any]
Documents = list[Document]
Reader = Callable[[], Documents]
"""Reads the documents of a sequence, so that a rank reads only its own."""
GlobalBatch = tuple[list[Reader], Position, float]
"""Sequences of one optimizer step, the position and the progress in epochs after them."""

STREAM_BUFFER_ROWS = 8192
"""Dataset rows that are read, packed and shuffled at a time."""


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

    def order(self, epoch: int) -> Any:
        """The numbers of the sequences, as they come in an epoch."""
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.plan))

    def global_batches(self, position: Position, size: int) -> Iterator[GlobalBatch]:
        epoch, next_row = int(position["epoch"]), int(position["next_row"])
        while True:
            order = self.order(epoch)
            while next_row < len(order):
                chosen = order[next_row : next_row + size].tolist()
                next_row += len(chosen)
                ended = next_row == len(order)
                after = {**self.start(), "epoch": epoch + ended, "next_row": 0 if ended else next_row}
                yield sequence_readers(self.plan, self.read, chosen), after, epoch + next_row / len(order)
            epoch, next_row = epoch + 1, 0


@dataclass
class StreamSequences:
    """Training sequences of the tokenised rows of `sources`.

    `open_stream` begins anew; `fraction` of the problems are held out; `plan` makes sequences of the documents of these
    numbers, given the lengths of all; `report` is kept up to date. `data` identifies all of it.
    """

    sources: Sequence[DatasetSource]
    open_stream: Callable[[], IterableDataset]
    fraction: float
    plan: Callable[[Any, Any], PackingPlan]
    seed: int
    data: str
    report: DataReport
    buffer_rows: int = STREAM_BUFFER_ROWS

    num_sequences = None  # not known

    def start(self) -> Position:
        begin = {"kind": "stream", "data": self.data, "epoch": 0}
        return {**begin, "buffer": 0, "next_row": 0, "source": None, "content": None}

    def global_batches(self, position: Position, size: int) -> Iterator[GlobalBatch]:
        sequences = self._sequences(position)
        while True:
            batch = list(islice(sequences, size))
            after = batch[-1][1]
            yield [reader for reader, _ in batch], after, float(after["epoch"])

    def _sequences(self, position: Position) -> Iterator[tuple[Reader, Position]]:
        """Every sequence from `position` on, each with the position after it."""
        begin = dict(position)
        self.report.forget_rows()
        while True:
            stream, ended = self.open_stream(), False
            if begin["source"] is not None:
                stream.load_state_dict(copy.deepcopy(begin["source"]))
            rows = iter(stream)
            while not ended:
                with reading_of(*self.sources):
                    buffer = next_rows(rows, self.buffer_rows)
                ended = len(buffer) < self.buffer_rows
                sequences, content = self._sequences_of(buffer)
                if begin["content"] not in (None, content):
                    raise UserError("--resume_from: the stream's rows are not those that the checkpoint's run read.")
                order = np.random.default_rng([self.seed, begin["buffer"]]).permutation(len(sequences)).tolist()
                for done, number in enumerate(order[begin["next_row"] :], start=begin["next_row"] + 1):
                    yield sequences[number], {**begin, "next_row": done, "content": content}
                begin |= {"epoch": begin["epoch"] + ended, "buffer": begin["buffer"] + 1, "next_row": 0}
                begin |= {"source": None if ended else stream.state_dict(), "content": None}

    def _sequences_of(self, rows: Dataset) -> tuple[list[Reader], str]:
        """The sequences of the rows of this buffer, and what identifies the rows."""
        figures = figures_of(rows)
        held_out = is_held_out(figures["problem_key"], self.fraction)
        self.report.count(rows, figures, held_out)
        plan = self.plan(figures["length"], np.flatnonzero((figures["length"] > 0) & ~held_out))
        self.report.num_rows_of_batches += len(plan)
        return sequence_readers(plan, document_reader(rows)), content_key(figures["document_key"])


Sequences = MapSequences | StreamSequences
