"""Rows from a stream (`--streaming`), for datasets too large to prepare first.

A buffer of source rows is read, tokenised and packed, and its rows are shuffled by (seed, number of the buffer). Rows
that came out poorly filled hand their documents on to the next buffer, each document at most once. When the stream ends
it is begun anew, and no global batch is short.

A position names the beginning of a buffer (the state of the `datasets` stream there, and the documents handed on to it)
and how many of its rows are done. Resuming fills that buffer once more and goes on behind those rows.

Every rank reads the whole stream and trains on its own part: what a global batch holds must not depend on the number of
ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from datasets import IterableDataset

from llm_fp8.data.loader import GlobalBatch, Position, Row
from llm_fp8.data.pack import RowPlan, one_per_row, pack
from llm_fp8.data.report import DataReport
from llm_fp8.data.tokenise import Document, Outcome
from llm_fp8.utils.errors import UserError

STREAM_BUFFER_ROWS = 8192
"""Rows of the source that are read, packed and shuffled at a time."""

POORLY_FILLED = 0.9
"""A packed row filled less than this hands its documents on to the next buffer."""

MAX_ROWS_HANDED_ON = 16
"""At most so many do, the emptiest first: their documents are part of every position."""


@dataclass(frozen=True)
class StreamedRow:
    """What became of one row of the source; `document` is there where the row is used or held out."""

    outcome: Outcome
    held_out: bool
    document: Document | None


@dataclass
class StreamRows:
    """Training rows of a stream, packed into `capacity` tokens, or one document to a row where `capacity` is None.

    `open_stream` returns the stream at its beginning, `iterate` yields the rows of one, `tokenise` takes some of them
    with their indices, and `report` is kept up to date. `data` identifies all of it.
    """

    open_stream: Callable[[], IterableDataset]
    iterate: Callable[[IterableDataset], Iterator[dict[str, Any]]]
    tokenise: Callable[[Sequence[dict[str, Any]], Sequence[int]], list[StreamedRow]]
    capacity: int | None
    seed: int
    data: str
    report: DataReport
    document_multiple: int = 1
    """What the length of a packed document is padded to a multiple of."""
    buffer_rows: int = STREAM_BUFFER_ROWS
    counted: tuple[int, int] = (0, 0)
    """Epoch and source row up to which the report counts: a buffer that is filled once more is not counted once
    more.
    """

    @property
    def num_rows(self) -> None:
        return None

    def start(self) -> Position:
        return {
            "kind": "stream",
            "data": self.data,
            "epoch": 0,
            "buffer": 0,  # how many buffers were begun before this one
            "next_row": 0,  # rows of it that are done
            "source_row": 0,  # index of its first row in the source
            "source": None,  # state of the stream before it; None for the beginning
            "carried": [],  # documents handed on to it
        }

    def global_batches(self, position: Position, size: int) -> Iterator[GlobalBatch]:
        batch: list[Row] = []
        for row, after in self._rows(position):
            batch.append(row)
            if len(batch) == size:
                yield GlobalBatch([lambda row=row: row for row in batch], after, float(after["epoch"]))  # type: ignore[misc]
                batch = []

    def _rows(self, position: Position) -> Iterator[tuple[Row, Position]]:
        """Every row from `position` on, each with the position after it."""
        begin = dict(position)
        while True:
            whole_pass = begin["source"] is None
            stream = self.open_stream()
            if begin["source"] is not None:
                stream.load_state_dict(copy.deepcopy(begin["source"]))
            source = self.iterate(stream)
            num_rows, ended = 0, False
            while not ended:
                raw = list(islice(source, self.buffer_rows))
                ended = len(raw) < self.buffer_rows
                next_source_row = begin["source_row"] + len(raw)
                streamed = self.tokenise(raw, range(begin["source_row"], next_source_row))
                used = [s.document for s in streamed if s.document is not None and not s.held_out]
                rows, handed_on = self._plan([_from_json(d) for d in begin["carried"]], used, ended)
                if (begin["epoch"], begin["source_row"]) >= self.counted:
                    self._count(streamed, used, len(rows))
                    self.counted = (begin["epoch"], next_source_row)
                order = np.random.default_rng([self.seed, begin["buffer"]]).permutation(len(rows)).tolist()
                for done, row in enumerate(order[begin["next_row"] :], start=begin["next_row"] + 1):
                    yield rows[row], {**begin, "next_row": done}
                num_rows += len(rows)
                begin = {
                    **begin,
                    "epoch": begin["epoch"] + ended,
                    "buffer": begin["buffer"] + 1,
                    "next_row": 0,
                    "source_row": 0 if ended else next_source_row,
                    "source": None if ended else stream.state_dict(),
                    "carried": [_to_json(d) for d in handed_on],
                }
            if whole_pass and num_rows == 0:
                raise UserError(f"--dataset_name: no row of the stream can be trained on: {self.report.summary()}.")

    def _count(self, streamed: Sequence[StreamedRow], used: Row, num_rows: int) -> None:
        self.report.count_unused([s.outcome for s in streamed])
        self.report.num_rows_held_out += sum(s.held_out and s.document is not None for s in streamed)
        self.report.num_rows_used += len(used)
        self.report.num_tokens += sum(len(document.input_ids) for document in used)
        self.report.num_supervised_tokens += sum(int(document.supervised[1:].sum()) for document in used)
        self.report.num_rows_of_batches += num_rows

    def _plan(self, carried: Row, fresh: Row, last: bool) -> tuple[list[Row], Row]:
        """Rows to train on and documents to hand on to the next buffer; none are handed on from the `last` of an
        epoch.
        """
        documents = carried + fresh
        if self.capacity is None:
            plan: RowPlan = one_per_row(len(documents))
        else:
            plan = pack([len(document.input_ids) for document in documents], self.capacity, self.document_multiple)
        emit, handed_on = list(range(len(plan))), []
        if self.capacity is not None and not last:
            fill = {row: sum(len(documents[i].input_ids) for i in plan[row]) for row in emit}
            poor = [r for r in emit if fill[r] < POORLY_FILLED * self.capacity and plan[r].min() >= len(carried)]
            handed_on = sorted(poor, key=lambda row: fill[row])[:MAX_ROWS_HANDED_ON]
            emit = sorted(set(emit) - set(handed_on))
        rows = [[documents[i] for i in plan[row]] for row in emit]
        return rows, [documents[i] for row in handed_on for i in plan[row]]


def _to_json(document: Document) -> dict[str, Any]:
    return {
        "input_ids": document.input_ids.tolist(),
        "supervised": document.supervised.astype(int).tolist(),
        "row_id": document.row_id,
    }


def _from_json(content: dict[str, Any]) -> Document:
    return Document(
        np.asarray(content["input_ids"], dtype=np.int64),
        np.asarray(content["supervised"], dtype=bool),
        content["row_id"],
    )
