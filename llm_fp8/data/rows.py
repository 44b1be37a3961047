"""Rows in the order in which they are trained on, cut into global batches.

A row is what fills one line of a batch: a packed group of documents, or a single one. A row source hands out global batches
of rows and, with each, the position after it. From a position it goes on exactly as if it had never stopped. Positions are
plain dicts that JSON can hold.

The rows of a global batch depend on its size alone (`batch_size * gradient_accumulation_steps * world_size`), not on how it
is cut into micro-batches and ranks: every rank walks through the same global batches and takes its own part of each
(loader.py).

`MapRows`, here, knows all its rows: each epoch visits every row once, in an order drawn from (seed, epoch), and the last
global batch of an epoch holds what is left. `StreamRows` (stream.py) makes its rows from a stream as it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from llm_fp8.data.pack import RowPlan
from llm_fp8.data.tokenise import Document
from llm_fp8.errors import UserError

Position = dict[str, Any]
Row = list[Document]


@dataclass(frozen=True)
class GlobalBatch:
    """Rows of one optimizer step, the position after them, and the progress in epochs after them.

    A row is a function that reads its documents, so that a rank only reads its own.
    """

    rows: Sequence[Callable[[], Row]]
    position: Position
    epoch: float


def row_readers(plan: RowPlan, read: Callable[[Sequence[int]], Row], rows: Iterable[int]) -> list[Callable[[], Row]]:
    """For each of `rows` of the plan a function that reads its documents."""
    return [partial(lambda row: read(plan[row].tolist()), row) for row in rows]


class RowSource(Protocol):
    """An endless sequence of global batches that can be entered at any position."""

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch; None when nobody knows."""

    def start(self) -> Position:
        """The position before the first global batch."""

    def global_batches(self, position: Position, size: int) -> Iterator[GlobalBatch]:
        """Global batches of `size` rows from `position` on, without end."""


def check_position(position: Position, start: Position) -> None:
    """Raise `UserError` unless `position` belongs to the data that begin at `start`."""
    if position.get("kind") != start["kind"] or position.get("data") != start["data"]:
        raise UserError(
            "--resume_from: the checkpoint was made with other training data (dataset, split, tokenizer, max_seq_length, packing, "
            "held-out share or seed); resume with the options of that run."
        )


@dataclass(frozen=True)
class MapRows:
    """Rows of a plan over documents that are all at hand. `data` identifies plan and documents."""

    plan: RowPlan
    read: Callable[[Sequence[int]], Row]
    seed: int
    data: str

    @property
    def num_rows(self) -> int:
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
                yield GlobalBatch(row_readers(self.plan, self.read, chosen), after, epoch + next_row / len(order))
            epoch, next_row = epoch + 1, 0
