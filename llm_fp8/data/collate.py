"""Collate documents (tokenised rows of the dataset) into a `Batch`, packed into one row or padded to equal length.

THE LABELS ARE ALREADY SHIFTED: `labels[..., t]` is the token after position t of the same document, or -100. The loss
is the cross entropy of `logits[..., t, :]` and `labels[..., t]`. Hugging Face models would shift the labels again.

    field                             packed, T = batch_size * max_seq_length        padded on the right
    input_ids, labels, position_ids   int64 [1, T]                                   int64 [B, S]
    cu_seqlens                        int32 [n + 1], 0 = first < ... < last = T      None
    attention_mask                    None; bool [1, T] if batches are sliced        bool [B, S]

`attention_mask` is True for tokens of documents. `cu_seqlens` stores the boundaries of segments. A segment is one
document, or the padding at the end of a sequence of max_seq_length positions. `position_ids` start at 0 in each
segment; padding in a padded batch has position 0. S is the length of the longest document, rounded up to a multiple of
128 (times the number of slices), but at most max_seq_length.

If C ranks share a sequence, each processes a slice of the batch. Then every document is padded, inside its segment, to
a multiple of 2 C. Attention is causal, so no token attends to this padding. If fewer than batch_size sequences remain,
padding replaces the missing ones. In a padded batch, `attention_mask` is True for the first position of such a
sequence, because some kernels return NaN for a sequence that attends to nothing.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llm_fp8.data.tokenise import Document
from llm_fp8.kernels.cross_entropy import IGNORE_INDEX
from llm_fp8.observability.metrics import StepTokens

IntArray = npt.NDArray[np.int64]
PADDED_MULTIPLE = 128  # padded lengths are multiples of it, so shapes are few and fp8 kernels accept them


@dataclass(frozen=True)
class Batch:
    """One micro-batch; shapes and dtypes are in the module's docstring."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int  # upper bound on the length of a segment
    num_tokens: int
    num_real_tokens: int  # without padding
    num_supervised_tokens: int
    sum_squared_lengths: int  # of segments (packed) or sequences (padded), for attention's FLOPs; a slice has its part
    row_ids: tuple[int, ...]  # of the documents' rows

    def to(self, device: str | torch.device, non_blocking: bool = False) -> Batch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        moved: dict[str, Any] = {name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **moved)


Reader = Callable[[], list[Document]]  # reads the documents of one sequence; a rank calls only those of its batches


def count_tokens(batches: Sequence[Batch]) -> StepTokens:
    return StepTokens(*(sum(getattr(batch, name) for batch in batches) for name in StepTokens._fields))


@dataclass(frozen=True)
class PackingPlan:
    """Assignment of documents to sequences. The documents of sequence s are `samples[offsets[s]:offsets[s + 1]]`."""

    samples: IntArray  # [number of documents], indices of documents
    offsets: IntArray  # [number of sequences + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, sequence: int) -> IntArray:
        return self.samples[self.offsets[sequence] : self.offsets[sequence + 1]]


def pack(lengths: npt.ArrayLike, capacity: int, multiple: int = 1) -> PackingPlan:
    """Pack documents of these `lengths`, each padded to `multiple`, into sequences of at most `capacity` tokens.

    The algorithm is best fit decreasing: documents are placed in order of decreasing length, each into the sequence
    with the least room that still fits it. Bit r of `has_room` is set if a sequence has room for r more tokens, so the
    lowest set bit from a document's length upwards replaces a search. A million documents take about 1 s.
    """
    sizes = -(-np.asarray(lengths, dtype=np.int64) // multiple) * multiple
    sequence_of = np.empty(len(sizes), dtype=np.int64)
    by_room: defaultdict[int, deque[int]] = defaultdict(deque)  # room left -> sequences
    has_room = num_sequences = 0
    order = np.argsort(-sizes, kind="stable")
    for document, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        if fitting := has_room >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            sequence = by_room[room].popleft()
            if not by_room[room]:
                has_room ^= 1 << room
        else:
            room, sequence = capacity, num_sequences
            num_sequences += 1
        sequence_of[document] = sequence
        if room > size:
            by_room[room - size].append(sequence)
            has_room |= 1 << (room - size)

    offsets = np.concatenate([[0], np.cumsum(np.bincount(sequence_of, minlength=num_sequences))])
    return PackingPlan(np.argsort(sequence_of, kind="stable"), offsets)


@dataclass(frozen=True)
class Layout:
    """Callable that collates sequences into a `Batch`. A sequence is one document or, if `packed`, several."""

    batch_size: int
    max_seq_length: int
    pad_token_id: int
    packed: bool
    num_slices: int = 1  # number of ranks that share a batch
    split_batch: Callable[[Batch], Batch] | None = None  # returns this rank's slice
    pin_memory: bool = False  # for asynchronous copies to the GPU; needs CUDA

    @property
    def multiple(self) -> int:
        """The length of each packed document is padded to a multiple of this number of tokens."""
        return 2 * self.num_slices if self.num_slices > 1 else 1

    def plan(self, lengths: IntArray, chosen: IntArray) -> PackingPlan:
        """Assign the documents with the indices `chosen` to sequences. `lengths` are token counts of all documents."""
        if not self.packed:
            return PackingPlan(chosen, np.arange(len(chosen) + 1))
        packed = pack(lengths[chosen], self.max_seq_length, self.multiple)
        return PackingPlan(chosen[packed.samples], packed.offsets)

    def num_positions(self, lengths: IntArray) -> int:
        """Count the positions of all batches, with padding. `lengths` are those of any one document per sequence."""
        longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), self.batch_size))
        return int(self.width(longest).sum()) * self.batch_size

    def width(self, longest: Any) -> Any:
        """Return the length of a batch's padded sequences. `longest` (int or array): length of its longest document."""
        multiple = PADDED_MULTIPLE * self.num_slices
        padded = np.minimum(-(-longest // multiple) * multiple, self.max_seq_length)
        return np.full_like(padded, self.max_seq_length) if self.packed else padded

    def read(self, readers: Sequence[Reader]) -> Batch:
        """Collate the sequences that `readers` return. Return this rank's slice of the batch."""
        batch = self([read() for read in readers])
        if self.split_batch is not None:
            batch = self.split_batch(batch)
        return batch.map(Tensor.pin_memory) if self.pin_memory else batch

    def __call__(self, sequences: Sequence[Sequence[Document]]) -> Batch:
        """Collate sequences. NumPy raises `IndexError` if there are too many, or `ValueError` if one is too long."""
        documents = [document for sequence in sequences for document in sequence]
        shape = (self.batch_size, int(self.width(max((len(document.input_ids) for document in documents), default=1))))
        ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        real = np.zeros(shape, dtype=bool)
        bounds = [0]  # boundaries of the segments
        for line, sequence in enumerate([*sequences, *[()] * (self.batch_size - len(sequences))]):
            start = 0
            for document in sequence:
                end = start + len(document.input_ids)
                ids[line, start:end] = document.input_ids
                labels[line, start : end - 1] = np.where(document.supervised[1:], document.input_ids[1:], IGNORE_INDEX)
                real[line, start:end] = True
                start += -(-len(document.input_ids) // self.multiple) * self.multiple
                if self.packed:
                    bounds.append(line * shape[1] + start)
            if bounds[-1] < (line + 1) * shape[1]:
                bounds.append((line + 1) * shape[1])
        lengths = np.diff(bounds)
        positions = (np.arange(ids.size) - np.repeat(bounds[:-1], lengths)) * (self.packed | real.ravel())
        mask = real.copy()
        if not self.packed and self.num_slices == 1:  # otherwise attention does not read the mask
            mask[len(sequences) :, 0] = True
        view = (1, -1) if self.packed else shape
        return Batch(
            input_ids=torch.from_numpy(ids).view(view),
            labels=torch.from_numpy(labels).view(view),
            position_ids=torch.from_numpy(positions).view(view),
            attention_mask=None if self.packed and self.num_slices == 1 else torch.from_numpy(mask).view(view),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32) if self.packed else None,
            max_seqlen=shape[1],
            num_tokens=ids.size,
            num_real_tokens=int(real.sum()),
            num_supervised_tokens=int((labels != IGNORE_INDEX).sum()),
            sum_squared_lengths=int((lengths**2).sum()),
            row_ids=tuple(document.row_id for document in documents),
        )
