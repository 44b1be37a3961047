"""Cut the global batch of each optimizer step into the ranks' micro-batches. A thread collates them in advance.

A sequence is a packed group of documents, or a single document. The sequences come in an endless series of buffers,
each shuffled with the seed (run's seed, index of the buffer). The content of a global batch depends only on its size
(batch_size * gradient_accumulation_steps * world_size). Each global batch is yielded with the position after it, a
JSON-serialisable dict from which the series continues exactly.

The last global batch of an epoch may be smaller. A stream restarts at its end, every rank reads all of it, and all
global batches have full size. A position contains the state of the `datasets` stream before its buffer (None at the
start of the stream) and a hash of the buffer's documents (None before it is read): a resumed run reads it again.

Micro-batch i is processed by rank i % world_size. All ranks get the same number of micro-batches, since they must call
the same collectives. If the last step of an epoch has too few sequences, some ranks get a micro-batch of padding.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np
from datasets import IterableDataset

from llm_fp8.data.collate import Batch, Layout, PackingPlan, Reader
from llm_fp8.data.load import DatasetSource, reading_of
from llm_fp8.data.tokenise import DataReport, Document, content_key, document_reader, figures_of, next_rows
from llm_fp8.utils.errors import UserError

T = TypeVar("T")
Position = dict[str, Any]
ReadDocuments = Callable[[Sequence[int]], list[Document]]  # by index
Buffer = tuple[PackingPlan, ReadDocuments, Position, Position]  # positions: at the first sequence, after the last

STREAM_BUFFER_ROWS = 8192  # rows that are read, packed and shuffled at a time
STEPS_AHEAD = 2  # optimizer steps, or evaluation batches, to prefetch


@dataclass(frozen=True)
class Sequences:
    """The endless series of sequences on which a run trains."""

    seed: int
    data: str  # hash of the data and of the options that determine the sequences
    buffers: Callable[[Position], Iterator[Buffer]]  # yields the buffers from a position on, without end
    num_sequences: int | None = None  # per epoch; None for a stream

    def start(self) -> Position:
        return {"data": self.data, "epoch": 0, "buffer": 0, "next_row": 0, "source": None, "content": None}

    def order(self, buffer: int, num_sequences: int) -> Any:
        """Return the indices 0 to `num_sequences` - 1 in the shuffled order of the buffer with the number `buffer`."""
        return np.random.default_rng([self.seed, buffer]).permutation(num_sequences)

    def global_batches(self, position: Position, size: int) -> Iterator[tuple[list[Reader], Position]]:
        """For each optimizer step from `position` on, yield readers of up to `size` sequences and the next position."""
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


def epochs(plan: PackingPlan, read: ReadDocuments, position: Position) -> Iterator[Buffer]:
    """Yield one buffer per epoch from `position` on, each with all sequences of `plan`. `read` returns documents."""
    for epoch in count(position["epoch"]):
        begin, after = ({**position, "epoch": number, "buffer": number, "next_row": 0} for number in (epoch, epoch + 1))
        yield plan, read, begin, after


def stream_buffers(
    sources: Sequence[DatasetSource],
    open_stream: Callable[[], IterableDataset],
    is_held_out: Callable[[Any], Any],
    plan_of: Callable[[Any, Any], PackingPlan],
    report: DataReport,
    position: Position,
) -> Iterator[Buffer]:
    """Yield buffers of the stream of tokenised rows from `position` on and count its rows in `report`. `is_held_out`
    maps `problem_key` hashes to a mask. `plan_of` packs documents, given all lengths and the indices to train on.
    """
    begin, ended = {**position, "next_row": 0}, True
    report.forget_rows()
    while True:
        if ended:
            stream = open_stream()
            if begin["source"] is not None:
                stream.load_state_dict(copy.deepcopy(begin["source"]))
            rows = iter(stream)
        with reading_of(*sources):
            buffer = next_rows(rows, STREAM_BUFFER_ROWS)
        figures, ended = figures_of(buffer), len(buffer) < STREAM_BUFFER_ROWS
        content = content_key(figures["document_key"])
        if begin["content"] not in (None, content):
            raise UserError("--resume_from: the stream's rows are not those of the earlier run; give the same data.")
        held_out = is_held_out(figures["problem_key"])
        report.count(buffer, figures, held_out)
        plan = plan_of(figures["length"], np.flatnonzero((figures["length"] > 0) & ~held_out))
        report.num_rows_of_batches += len(plan)
        after = {**begin, "epoch": begin["epoch"] + ended, "buffer": begin["buffer"] + 1, "content": None}
        after["source"] = None if ended else stream.state_dict()
        yield plan, document_reader(buffer), {**begin, "content": content}, after
        begin = after


@dataclass(frozen=True)
class DataRank:
    """Assigns micro-batches to data-parallel rank `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1

    def micro_batches(self, sequences: Sequence[T], batch_size: int) -> list[Sequence[T]]:
        """Return this rank's micro-batches of up to `batch_size` sequences. All ranks get equally many, some empty."""
        chunks = [sequences[start : start + batch_size] for start in range(0, len(sequences), batch_size)]
        rounds = -(-len(chunks) // self.world_size)
        mine = chunks[self.rank :: self.world_size]
        return mine + [sequences[:0]] * (rounds - len(mine))


def prefetch(items: Iterator[T]) -> Generator[T]:
    """Yield `items`. A thread computes up to `STEPS_AHEAD` of them in advance. Errors in the thread are raised here."""
    end: Any = object()
    thread = ThreadPoolExecutor(1, "data-prefetch")
    try:
        ahead = deque(thread.submit(next, items, end) for _ in range(STEPS_AHEAD))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(thread.submit(next, items, end))
            yield item
    finally:
        thread.shutdown(cancel_futures=True)


class TrainLoader:
    """Endless iterable over optimizer steps. Each item is the list of this rank's micro-batches (`list[Batch]`).

    `state_dict()` returns the position after the last yielded step, regardless of prefetching. A loader that loads this
    state yields exactly the steps that would have followed, even if the number of micro-batches or ranks differs.
    """

    def __init__(self, sequences: Sequences, layout: Layout, num_micro_batches: int, data_rank: DataRank) -> None:
        """Start at the first sequence. `num_micro_batches` is the number that each rank gets per optimizer step."""
        self._sequences, self._layout, self._data_rank = sequences, layout, data_rank
        self.global_batch_size = layout.batch_size * num_micro_batches * data_rank.world_size  # over all ranks
        self._position = sequences.start()

    @property
    def epoch(self) -> float:
        """Number of epochs so far, with the finished fraction of the current one. For a stream, only whole epochs."""
        num_sequences = self._sequences.num_sequences
        done = 0.0 if num_sequences is None else self._position["next_row"] / num_sequences
        return float(self._position["epoch"] + done)

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of optimizer steps per epoch, or None for a stream."""
        num_sequences = self._sequences.num_sequences
        return None if num_sequences is None else -(-num_sequences // self.global_batch_size)

    def steps_left(self, num_epochs: int, state: Position | None = None) -> int:
        """Count the steps from `state` (default: the start) to the end of epoch `num_epochs`. Fails for a stream."""
        position = self._sequences.start() if state is None else self._position_in(state)
        assert self.steps_per_epoch is not None and self._sequences.num_sequences is not None
        in_this_epoch = -(-(self._sequences.num_sequences - position["next_row"]) // self.global_batch_size)
        return in_this_epoch + (num_epochs - position["epoch"] - 1) * self.steps_per_epoch

    def state_dict(self) -> Position:
        return {"rows": self._position}

    def load_state_dict(self, state: Position) -> None:
        """Make the next `iter()` continue from `state`. Raise `UserError` if `state` is from other training data."""
        self._position = self._position_in(state)

    def first_step(self) -> list[Batch]:
        """Return the micro-batches of the next step without advancing the loader."""
        return next(self._steps(self._position))[0]

    def _position_in(self, state: Position) -> Position:
        if state["rows"]["data"] != self._sequences.data:
            advice = "give the same dataset, split, tokenizer, max_seq_length, packing, held-out share and seed"
            raise UserError(f"--resume_from: the checkpoint was made with other training data; {advice}.")
        return state["rows"]

    def __iter__(self) -> Iterator[list[Batch]]:
        with closing(prefetch(self._steps(self._position))) as steps:
            for batches, self._position in steps:
                yield batches

    def _steps(self, position: Position) -> Iterator[tuple[list[Batch], Position]]:
        for sequences, after in self._sequences.global_batches(position, self.global_batch_size):
            micro_batches = self._data_rank.micro_batches(sequences, self._layout.batch_size)
            yield list(map(self._layout.read, micro_batches)), after


class EvalLoader:
    """Iterable over this rank's evaluation batches. All ranks get equally many, some of which contain only padding."""

    def __init__(
        self, sequences: Sequence[Reader], data: str, layout: Layout, data_rank: DataRank, limit: int | None
    ) -> None:
        """Use all sequences, or the first `limit`. `data` identifies the full list, and `self.data` the used part."""
        self._micro_batches = data_rank.micro_batches(sequences[:limit], layout.batch_size)
        self._layout = layout
        self.data = data if limit is None or limit >= len(sequences) else f"{data}, the first {limit}"

    def __iter__(self) -> Iterator[Batch]:
        with closing(prefetch(map(self._layout.read, self._micro_batches))) as batches:
            yield from batches
