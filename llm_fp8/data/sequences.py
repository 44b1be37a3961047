"""Sequences in global batches: `MapSequences` of a prepared dataset, `StreamSequences` of a stream (`--streaming`).

A sequence is a packed group of documents, or a single one. Sequences come in buffers without end, those of a buffer in
an order drawn from (seed, number of the buffer). A global batch depends on its size alone (batch_size *
gradient_accumulation_steps * world_size), not on how ranks share it. With it comes the position after it, a dict that
JSON can hold, from which the sequences continue exactly.

`MapSequences` has one buffer, of all sequences, in every epoch; the last global batch of an epoch may be smaller.

`StreamSequences` reads and packs a buffer of tokenised rows at a time. At its end the stream begins anew, and no global
batch is smaller. Every rank reads the full stream. A position has the state of the `datasets` stream before its buffer
(None at the beginning) and a hash of the buffer's documents (None before it was read): resuming fills it again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from datasets import IterableDataset

from llm_fp8.data.load import DatasetSource, reading_of
from llm_fp8.data.pack import PackingPlan
from llm_fp8.data.split import is_held_out
from llm_fp8.data.tokenise import DataReport, Document, content_key, document_reader, figures_of, next_rows
from llm_fp8.utils.errors import UserError

Position = dict[str, Any]
Reader = Callable[[], list[Document]]
"""Reads the documents of a sequence, so that a rank reads only its own."""
ReadDocuments = Callable[[Sequence[int]], list[Document]]
"""Reads documents by index."""
Buffer = tuple[PackingPlan, ReadDocuments, Position, Position]
"""A plan over the documents of these indices, the position at its first sequence and that after its last."""

STREAM_BUFFER_ROWS = 8192
"""Dataset rows that are read, packed and shuffled at a time."""


@dataclass(frozen=True)
class Sequences:
    """Sequences that `data` identifies."""

    seed: int
    data: str

    @property
    def num_sequences(self) -> int | None:
        """Those of an epoch; None where they are not known."""
        return None

    def start(self) -> Position:
        return {"data": self.data, "epoch": 0, "buffer": 0, "next_row": 0, "source": None, "content": None}

    def buffers(self, position: Position) -> Iterator[Buffer]:
        """The buffers from that of a position on."""
        raise NotImplementedError

    def order(self, buffer: int, num_sequences: int) -> Any:
        """The numbers of a buffer's sequences, as they come."""
        return np.random.default_rng([self.seed, buffer]).permutation(num_sequences)

    def global_batches(self, position: Position, size: int) -> Iterator[tuple[list[Reader], Position]]:
        """The sequences of each optimizer step from `position` on, and the position after it."""
        batch, next_row = list[Reader](), position["next_row"]
        for plan, read, begin, after in self.buffers(position):
            order = self.order(begin["buffer"], len(plan))
            for done, number in enumerate(order[next_row:].tolist(), next_row + 1):
                batch.append(partial(read, plan[number].tolist()))
                is_last = done == len(order)
                if len(batch) == size or (is_last and self.num_sequences is not None):
                    yield batch, after if is_last else {**begin, "next_row": done}
                    batch = []
            next_row = 0


@dataclass(frozen=True)
class MapSequences(Sequences):
    """Sequences of a plan over the documents that `read` returns."""

    plan: PackingPlan
    read: ReadDocuments

    @property
    def num_sequences(self) -> int:
        return len(self.plan)

    def buffers(self, position: Position) -> Iterator[Buffer]:
        for epoch in count(position["epoch"]):
            begin, after = ({**self.start(), "epoch": number, "buffer": number} for number in (epoch, epoch + 1))
            yield self.plan, self.read, begin, after


@dataclass(frozen=True)
class StreamSequences(Sequences):
    """Sequences of the tokenised rows of `sources`.

    `open_stream` begins anew; `fraction` of the problems are held out; `plan` makes sequences of the documents of these
    numbers, given the lengths of all; `report` is kept up to date.
    """

    sources: Sequence[DatasetSource]
    open_stream: Callable[[], IterableDataset]
    fraction: float
    plan: Callable[[Any, Any], PackingPlan]
    report: DataReport

    def buffers(self, position: Position) -> Iterator[Buffer]:
        begin, ended = {**position, "next_row": 0}, True
        self.report.forget_rows()
        while True:
            if ended:
                stream = self.open_stream()
                if begin["source"] is not None:
                    stream.load_state_dict(copy.deepcopy(begin["source"]))
                rows = iter(stream)
            with reading_of(*self.sources):
                buffer = next_rows(rows, STREAM_BUFFER_ROWS)
            figures, ended = figures_of(buffer), len(buffer) < STREAM_BUFFER_ROWS
            content = content_key(figures["document_key"])
            if begin["content"] not in (None, content):
                raise UserError("--resume_from: the stream's rows are not those that the checkpoint's run read.")
            held_out = is_held_out(figures["problem_key"], self.fraction)
            self.report.count(buffer, figures, held_out)
            plan = self.plan(figures["length"], np.flatnonzero((figures["length"] > 0) & ~held_out))
            self.report.num_rows_of_batches += len(plan)
            after = {**begin, "epoch": begin["epoch"] + ended, "buffer": begin["buffer"] + 1, "content": None}
            after["source"] = None if ended else stream.state_dict()
            yield plan, document_reader(buffer), {**begin, "content": content}, after
            begin = after
