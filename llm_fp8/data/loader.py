"""Global batches cut into this rank's micro-batches, collated ahead of the training by one thread.

Every rank walks through the same global batches: micro-batch i goes to rank i % world_size. Every rank gets as many:
where the last step of an epoch has too few sequences, some get one of padding, so that all collectives meet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

from llm_fp8.data.collate import Batch, Collate
from llm_fp8.data.sequences import Position, Reader, Sequences
from llm_fp8.utils.errors import UserError

T = TypeVar("T")

STEPS_AHEAD = 2
"""Optimizer steps (or evaluation batches) that are prefetched."""


@dataclass(frozen=True)
class Share:
    """This process's part of the work: `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1

    def micro_batches(self, rows: Sequence[T], batch_size: int) -> list[Sequence[T]]:
        """This rank's micro-batches of at most `batch_size` rows, the same number on every rank, empty at the end."""
        chunks = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
        rounds = -(-len(chunks) // self.world_size)
        own = chunks[self.rank :: self.world_size]
        return own + [rows[:0]] * (rounds - len(own))


def prefetch(items: Iterator[T], depth: int) -> Generator[T]:
    """`items`, made by a thread at most `depth` of them ahead, which ends with this generator; exceptions too."""
    end: Any = object()
    thread = ThreadPoolExecutor(1, "data-prefetch")
    try:
        ahead = deque(thread.submit(next, items, end) for _ in range(depth))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(thread.submit(next, items, end))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)


class TrainLoader:
    """Yields `list[Batch]`, this rank's micro-batches of one optimizer step, epoch after epoch without end.

    `state_dict()` is the position after the last step that was yielded, whatever has been prefetched. A loader that
    loads it yields exactly the steps that would have followed, also with another cut of the same global batch.
    """

    def __init__(
        self, sequences: Sequences, collate: Collate, batch_size: int, num_micro_batches: int, share: Share
    ) -> None:
        """`num_micro_batches` is per rank and step (gradient_accumulation_steps)."""
        self._sequences, self._collate, self._batch_size, self._share = sequences, collate, batch_size, share
        self.global_batch_size = batch_size * num_micro_batches * share.world_size
        """Sequences of an optimizer step over all ranks."""
        self._position = sequences.start()

    @property
    def epoch(self) -> float:
        """Passes over the data done by the steps yielded so far, a fraction (full passes when streaming)."""
        num_sequences = self._sequences.num_sequences
        done = 0.0 if num_sequences is None else self._position["next_row"] / num_sequences
        return float(self._position["epoch"] + done)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps that see every sequence once; None when streaming."""
        num_sequences = self._sequences.num_sequences
        return None if num_sequences is None else -(-num_sequences // self.global_batch_size)

    def steps_left(self, num_epochs: int, state: Position | None = None) -> int:
        """Optimizer steps from `state` (default: the beginning) to the end of `num_epochs`; not when streaming."""
        position = self._sequences.start() if state is None else self._own_rows(state)
        assert self.steps_per_epoch is not None and self._sequences.num_sequences is not None
        in_this_epoch = -(-(self._sequences.num_sequences - position["next_row"]) // self.global_batch_size)
        return in_this_epoch + (num_epochs - position["epoch"] - 1) * self.steps_per_epoch

    def state_dict(self) -> Position:
        return {"rows": self._position}

    def load_state_dict(self, state: Position) -> None:
        """Continue from `state` at the next `iter()`; `UserError` if it belongs to other data."""
        self._position = self._own_rows(state)

    def _own_rows(self, state: Position) -> Position:
        if state["rows"]["data"] != self._sequences.data:
            what = "dataset, split, tokenizer, max_seq_length, packing, held-out share or seed"
            raise UserError(f"--resume_from: the checkpoint was made with other training data ({what}); give the same.")
        return state["rows"]

    def __iter__(self) -> Iterator[list[Batch]]:
        with closing(prefetch(self._steps(self._position), STEPS_AHEAD)) as steps:
            for batches, self._position in steps:
                yield batches

    def _steps(self, position: Position) -> Iterator[tuple[list[Batch], Position]]:
        for sequences, after in self._sequences.global_batches(position, self.global_batch_size):
            own = self._share.micro_batches(sequences, self._batch_size)
            yield [self._collate([read() for read in readers]) for readers in own], after


class EvalLoader:
    """Yields this rank's `Batch`es of the first evaluation sequences, as many on every rank, so that what is evaluated
    does not depend on their number.
    """

    def __init__(
        self, sequences: Sequence[Reader], data: str, collate: Collate, size: int, share: Share, limit: int | None
    ) -> None:
        """`data` identifies the sequences, `limit` of which are taken."""
        self._micro_batches = share.micro_batches(sequences[:limit], size)
        self._collate = collate
        self.data = data if limit is None or limit >= len(sequences) else f"{data}, the first {limit}"
        """Identifies what is evaluated on."""

    def __iter__(self) -> Iterator[Batch]:
        made = (self._collate([read() for read in readers]) for readers in self._micro_batches)
        with closing(prefetch(made, STEPS_AHEAD)) as batches:
            yield from batches
