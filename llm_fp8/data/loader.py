"""Loaders: global batches cut into this rank's micro-batches, made ahead of time by one thread.

Micro-batch i of a step goes to rank i % world_size. Every rank gets as many micro-batches as every other: where the
last step of an epoch has too few rows for that, some ranks get a micro-batch without any row (all padding, no label),
so that collective operations still meet.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from llm_fp8.data.collate import Batch, Collate
from llm_fp8.data.pack import RowPlan
from llm_fp8.data.tokenise import Document
from llm_fp8.utils.errors import UserError

T = TypeVar("T")

STEPS_AHEAD = 2
"""Optimizer steps (or evaluation batches) that are made ready before they are asked for."""


@dataclass(frozen=True)
class Share:
    """Which part of the work is this process's: `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1

    def micro_batches(self, rows: Sequence[T], batch_size: int) -> list[Sequence[T]]:
        """This rank's micro-batches of at most `batch_size` rows; as many on every rank, empty where the rows run
        out.
        """
        chunks = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        rounds = -(-len(chunks) // self.world_size)
        own = chunks[self.rank :: self.world_size]
        return own + [rows[:0]] * (rounds - len(own))


@dataclass(frozen=True)
class _Failure:
    """An exception of the thread, on its way to the consumer."""

    error: BaseException


class _End:
    """Follows the last item."""


def prefetch(items: Iterator[T], depth: int) -> Iterator[T]:
    """`items`, made by a thread that is at most `depth` of them ahead.

    An exception in `items` is raised here in its turn. Closing this generator stops the thread and waits for it.
    """
    ready: queue.Queue[T | _Failure | _End] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: T | _Failure | _End) -> None:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(item)
                if stopped.is_set():
                    return
            put(_End())
        except BaseException as error:  # raised again by the consumer
            put(_Failure(error))

    thread = threading.Thread(target=work, name="data-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, _Failure):
                raise item.error
            if isinstance(item, _End):
                return
            yield item
    finally:
        stopped.set()
        thread.join()


class TrainLoader(Generic[T]):
    """Yields `list[Batch]`, this rank's micro-batches of one optimizer step, epoch after epoch without end.

    `state_dict()` is the position behind the last step that was yielded, whatever the thread has prepared beyond it. A
    loader that loads it yields exactly the steps that would have followed, also with another cut of the same global
    batch.
    """

    def __init__(
        self,
        rows: RowSource,
        collate: Collate,
        batch_size: int,
        num_micro_batches: int,
        share: Share,
        pin_memory: bool = False,
    ) -> None:
        """`num_micro_batches` is per rank and step (gradient_accumulation_steps)."""
        self._rows = rows
        self._collate = collate
        self._batch_size = batch_size
        self._share = share
        self._pin_memory = pin_memory
        self.global_batch_size = batch_size * num_micro_batches * share.world_size
        """Rows of an optimizer step over all ranks."""
        self._position = rows.start()
        self._epoch = 0.0

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in which every row is seen once; None when streaming."""
        num_rows = self._rows.num_rows
        return None if num_rows is None else -(-num_rows // self.global_batch_size)

    @property
    def epoch(self) -> float:
        """Passes over the data done by the steps yielded so far, with the fraction of the current one (0 when
        streaming).
        """
        return self._epoch

    def state_dict(self) -> Position:
        """The position, as a dict that JSON can hold."""
        return {"rows": self._position, "progress": self._epoch}

    def load_state_dict(self, state: Position) -> None:
        """Go on from `state`; `UserError` if it belongs to other data. Takes effect at the next `iter()`."""
        check_position(state["rows"], self._rows.start())
        self._position = state["rows"]
        self._epoch = state["progress"]

    def __iter__(self) -> Iterator[list[Batch]]:
        with closing(prefetch(self._steps(self._position), STEPS_AHEAD)) as steps:  # type: ignore[type-var]
            for batches, position, epoch in steps:
                self._position, self._epoch = position, epoch
                yield batches

    def _steps(self, position: Position) -> Iterator[tuple[list[Batch], Position, float]]:
        for step in self._rows.global_batches(position, self.global_batch_size):
            own = self._share.micro_batches(step.rows, self._batch_size)
            batches = [self._collate([read() for read in readers]) for readers in own]
            yield [b.pin_memory() for b in batches] if self._pin_memory else batches, step.position, step.epoch


class EvalLoader:
    """Yields this rank's `Batch`es of the held-out rows, the same ones in the same order every time it is iterated.

    `max_batches` limits the batches over all ranks, so that what is evaluated does not depend on their number.
    """

    def __init__(
        self,
        rows: Sequence[Callable[[], Row]],
        collate: Collate,
        batch_size: int,
        share: Share,
        max_batches: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        limit = None if max_batches is None else max_batches * batch_size
        self._micro_batches = share.micro_batches(rows[:limit], batch_size)
        self._collate = collate
        self._pin_memory = pin_memory

    def __len__(self) -> int:
        """Batches of this rank, the same number on every rank."""
        return len(self._micro_batches)

    def __iter__(self) -> Iterator[Batch]:
        with closing(prefetch(self._batches(), STEPS_AHEAD)) as batches:  # type: ignore[type-var]
            yield from batches

    def _batches(self) -> Iterator[Batch]:
        for readers in self._micro_batches:
            batch = self._collate([read() for read in readers])
            yield batch.pin_memory() if self._pin_memory else batch


# --- rows ------------------------------------------------------------------------------------------------
# Rows in the order in which they are trained on, cut into global batches.
#
# A row is what fills one line of a batch: a packed group of documents, or a single one. A row source hands out global
# batches of rows and, with each, the position after it. From a position it goes on exactly as if it had never stopped.
# Positions are plain dicts that JSON can hold.
#
# The rows of a global batch depend on its size alone (`batch_size * gradient_accumulation_steps * world_size`), not on
# how it is cut into micro-batches and ranks: every rank walks through the same global batches and takes its own part of
# each (loader.py).
#
# `MapRows`, here, knows all its rows: each epoch visits every row once, in an order drawn from (seed, epoch), and the
# last global batch of an epoch holds what is left. `StreamRows` (stream.py) makes its rows from a stream as it goes.

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
            "--resume_from: the checkpoint was made with other training data (dataset, split, tokenizer, "
            "max_seq_length, packing, held-out share or seed); resume with the options of that run."
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
