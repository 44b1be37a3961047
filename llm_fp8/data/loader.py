"""Loaders: global batches cut into this rank's micro-batches, made ahead of time by one thread.

Micro-batch i of a step goes to rank i % world_size. Every rank gets as many micro-batches as every other: where the last
step of an epoch has too few rows for that, some ranks get a micro-batch without any row (all padding, no label), so that
collective operations still meet.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, TypeVar

from llm_fp8.data.collate import Batch, Collate
from llm_fp8.data.rows import Position, Row, RowSource, check_position

T = TypeVar("T")

STEPS_AHEAD = 2
"""Optimizer steps (or evaluation batches) that are made ready before they are asked for."""


@dataclass(frozen=True)
class Share:
    """Which part of the work is this process's: `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1

    def micro_batches(self, rows: Sequence[T], batch_size: int) -> list[Sequence[T]]:
        """This rank's micro-batches of at most `batch_size` rows; as many on every rank, empty where the rows run out."""
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
    loader that loads it yields exactly the steps that would have followed, also with another cut of the same global batch.
    """

    def __init__(
        self, rows: RowSource, collate: Collate, batch_size: int, num_micro_batches: int, share: Share, pin_memory: bool = False
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
        """Passes over the data done by the steps yielded so far, with the fraction of the current one (0 when streaming)."""
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
