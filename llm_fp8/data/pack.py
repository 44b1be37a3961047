"""Best-fit-decreasing packing of whole samples into rows of a fixed number of tokens.

Padding every sample to the longest wastes most of a batch when lengths vary; cutting a stream of text into rows splits
samples. Here samples stay whole: taken longest first, each goes into the row with the least room that still holds it.

Lengths are small integers, so equal samples are placed together: rows are kept in one bucket per amount of room left,
and all samples of one length are dealt to a bucket in one NumPy operation. The work is O(n log n) for the sort and, for
each different length, a scan over the buckets; a million samples take about a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowPlan:
    """Which samples each row holds: row r has `samples[offsets[r]:offsets[r + 1]]` (both int64, `offsets` of length
    rows + 1).
    """

    samples: IntArray
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> IntArray:
        return self.samples[self.offsets[row] : self.offsets[row + 1]]


def one_per_row(num_samples: int) -> RowPlan:
    """The plan of padded batches: every sample is a row of its own."""
    return RowPlan(np.arange(num_samples), np.arange(num_samples + 1))


def pack(lengths: npt.ArrayLike, capacity: int, multiple: int = 1) -> RowPlan:
    """Rows of at most `capacity` tokens for samples of these `lengths`, each of which takes up a multiple of `multiple`
    tokens.

    The same input gives the same plan. Raises `ValueError` for a sample that is empty or longer than `capacity`, and
    for a capacity that is not such a multiple itself.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) == 0:
        return one_per_row(0)
    if sizes.min() < 1 or sizes.max() > capacity:
        raise ValueError(f"lengths must lie in 1..{capacity}, not {sizes.min()}..{sizes.max()}")
    if capacity % multiple:
        raise ValueError(f"rows of {capacity} tokens cannot be filled with multiples of {multiple}")
    sizes = -(-sizes // multiple) * multiple

    by_length = np.argsort(-sizes, kind="stable")
    row_of = np.empty(len(sizes), dtype=np.int64)
    buckets: dict[int, list[IntArray]] = {}  # room left -> rows with that room
    rows_with_room = np.zeros(capacity + 1, dtype=np.int64)
    num_rows = 0

    def put_back(rows: IntArray, room: int) -> None:
        if len(rows) and room:
            buckets.setdefault(room, []).append(rows)
            rows_with_room[room] += len(rows)

    distinct, counts = np.unique(sizes, return_counts=True)
    done = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        members = by_length[done : done + count]
        done += count
        placed = 0
        # The best fit for a sample is the row with the least sufficient room. After taking one sample that row has less
        # room still, so it stays the best fit for the next of the same length until it is full: `each` of them.
        for room in (length + np.flatnonzero(rows_with_room[length:])).tolist():
            if placed == count:
                break
            each = room // length
            rows = np.concatenate(buckets.pop(room))
            rows_with_room[room] = 0
            needed = min(len(rows), -(-(count - placed) // each))
            put_back(rows[needed:], room)
            placed += _deal(members[placed:], rows[:needed], each, room, length, row_of, put_back)
        if placed < count:
            each = capacity // length
            needed = -(-(count - placed) // each)
            rows = np.arange(num_rows, num_rows + needed)
            num_rows += needed
            _deal(members[placed:], rows, each, capacity, length, row_of, put_back)

    samples = np.argsort(row_of, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=num_rows))])
    return RowPlan(samples, offsets)


def _deal(
    members: IntArray,
    rows: IntArray,
    each: int,
    room: int,
    length: int,
    row_of: IntArray,
    put_back: Callable[[IntArray, int], None],
) -> int:
    """Put up to `each` of `members` (samples of one `length`) into each of `rows`; returns how many were placed.

    Only the last row may get fewer than `each`.
    """
    dealt = min(len(members), each * len(rows))
    row_of[members[:dealt]] = np.repeat(rows, each)[:dealt]
    in_last = dealt - each * (len(rows) - 1)
    put_back(rows[:-1], room - each * length)
    put_back(rows[-1:], room - in_last * length)
    return dealt
