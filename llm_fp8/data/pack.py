"""Best-fit-decreasing packing of whole documents into sequences of a fixed number of tokens.

Longest first, each document goes into the sequence with the least room that still holds it. Lengths are small integers,
so documents of one length are placed together, in one NumPy operation per amount of room left: O(n log n), a million
documents take about a second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackingPlan:
    """Sequence s holds documents `samples[offsets[s]:offsets[s + 1]]` (int64; `offsets` has length sequences + 1)."""

    samples: IntArray
    offsets: IntArray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, sequence: int) -> IntArray:
        return self.samples[self.offsets[sequence] : self.offsets[sequence + 1]]


def one_per_sequence(num_samples: int) -> PackingPlan:
    """The plan of padded batches: one document per sequence."""
    return PackingPlan(np.arange(num_samples), np.arange(num_samples + 1))


def pack(lengths: npt.ArrayLike, capacity: int, multiple: int = 1) -> PackingPlan:
    """Sequences of at most `capacity` tokens for documents of these `lengths`, each padded to a multiple of `multiple`.

    Deterministic. Raises `ValueError` for a length outside 1..capacity, or a capacity that is no multiple.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) == 0:
        return one_per_sequence(0)
    if sizes.min() < 1 or sizes.max() > capacity:
        raise ValueError(f"lengths must lie in 1..{capacity}, not {sizes.min()}..{sizes.max()}")
    if capacity % multiple:
        raise ValueError(f"sequences of {capacity} tokens cannot be filled with multiples of {multiple}")
    sizes = -(-sizes // multiple) * multiple

    by_length = np.argsort(-sizes, kind="stable")
    bin_of = np.empty(len(sizes), dtype=np.int64)
    buckets: dict[int, list[IntArray]] = {}  # room left -> bins with that room
    bins_with_room = np.zeros(capacity + 1, dtype=np.int64)
    num_bins = 0

    def put_back(bins: IntArray, room: int) -> None:
        if len(bins) and room:
            buckets.setdefault(room, []).append(bins)
            bins_with_room[room] += len(bins)

    def deal(members: IntArray, bins: IntArray, room: int, length: int) -> int:
        """Put as many `members` (documents of one `length`) into each of `bins` as fit `room`; returns how many."""
        each = room // length
        dealt = min(len(members), each * len(bins))
        bin_of[members[:dealt]] = np.repeat(bins, each)[:dealt]
        put_back(bins[:-1], room - each * length)
        put_back(bins[-1:], room - (dealt - each * (len(bins) - 1)) * length)
        return dealt

    distinct, counts = np.unique(sizes, return_counts=True)
    done = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        members = by_length[done : done + count]
        done += count
        placed = 0
        # The best fit is the bin with the least sufficient room. After taking one document it has less room still, so
        # it stays the best fit for the next of the same length until it is full.
        for room in (length + np.flatnonzero(bins_with_room[length:])).tolist():
            if placed == count:
                break
            bins = np.concatenate(buckets.pop(room))
            bins_with_room[room] = 0
            needed = min(len(bins), -(-(count - placed) // (room // length)))
            put_back(bins[needed:], room)
            placed += deal(members[placed:], bins[:needed], room, length)
        if placed < count:
            needed = -(-(count - placed) // (capacity // length))
            bins = np.arange(num_bins, num_bins + needed)
            num_bins += needed
            deal(members[placed:], bins, capacity, length)

    samples = np.argsort(bin_of, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(bin_of, minlength=num_bins))])
    return PackingPlan(samples, offsets)
