"""Rows of documents become a `Batch`: packed into one line of tokens, or padded side by side.

THE LABELS ARE ALREADY SHIFTED. `labels[..., t]` is the token that position t has to predict, the next token of the same
document, or -100. The last token of a document predicts nothing. The loss is therefore the cross entropy of `logits`
and `labels` position by position; shifting once more, as the loss inside Hugging Face models does, would train on the
wrong token. (Shifting here, before documents meet in a row, is what keeps the last token of one from predicting the
first of the next.)

Packed, for attention that takes `cu_seqlens` (or sees the restarts of `position_ids`), T = batch_size * max_seq_length
always:

    input_ids, labels, position_ids   int64 [1, T]
    cu_seqlens                        int32 [n + 1], 0 = first < ... < last = T: where each segment begins
    attention_mask                    None; with context parallelism bool [1, T], true on documents' tokens

Every row begins at a multiple of max_seq_length. A segment is a document, or the unused rest of a row; in that rest
`position_ids` begin at 0 again and every label is -100, so it attends to itself alone and teaches nothing. Reshaping
[1, T] to [batch_size, max_seq_length] gives one row to a line.

With context parallelism over C processes a batch is still made whole and then split (`SplitCollate`,
llm_fp8.distributed.context_parallel). Every document is cut into 2 C pieces of equal length, so it is padded on the
right to a multiple of that, and the padding counts as part of its segment. That is harmless: attention is causal, so no
token of the document sees its padding, and the padding's labels are -100, so nothing comes back from it either.

Padded, on the right:

    input_ids, labels, position_ids   int64 [B, S]
    attention_mask                    bool [B, S], true on a document's tokens
    cu_seqlens                        None

S is the longest document rounded up to a multiple of 128 (per process of context parallelism), at most max_seq_length;
or max_seq_length with `pad_to_full`.
Padding is told by position, never by token id: where PAD and EOS are the same token, the EOS that ends a document is
still learnt.

A batch may hold fewer rows than batch_size, even none (the last ones of an epoch). Its shape does not change: a missing
row is all padding. In a padded batch its first position is open to attention, since a row that may attend to nothing
turns into NaN in some attention kernels; its labels are -100 and it is not counted as a real token. (Not so with
context parallelism, whose attention takes the whole row for a document.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llm_fp8.data.tokenise import Document
from llm_fp8.observability.metrics import StepTokens

IGNORED = -100
"""Label of a position that predicts nothing."""

PADDED_MULTIPLE = 128
"""Padded rows are a multiple of this long: few different shapes, and what fp8 kernels need."""


def document_multiple(context_size: int) -> int:
    """What the lengths of packed documents are rounded up to where `context_size` processes share every row, in
    tokens.
    """
    return 2 * context_size if context_size > 1 else 1


@dataclass(frozen=True)
class Batch:
    """One micro-batch. Shapes and dtypes are described above; `labels` are already shifted."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int
    """Upper bound of a segment's length, the same for every packed batch: max_seq_length; S for padded ones."""
    num_tokens: int
    """All positions, padding included."""
    num_real_tokens: int
    """Positions that hold a document's token."""
    num_supervised_tokens: int
    """Positions with a label."""
    sum_squared_lengths: int
    """Sum over segments (packed) or rows (padded) of their length squared: what attention costs. Of a split batch
    the share of a process.
    """
    row_ids: tuple[int, ...]
    """Rows of the dataset that the documents came from."""

    @property
    def is_packed(self) -> bool:
        """Whether documents lie behind each other in one line, told apart by `cu_seqlens`."""
        return self.cu_seqlens is not None

    def to(self, device: str | torch.device, non_blocking: bool = False) -> Batch:
        """The batch with its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch with its tensors in page-locked memory, from which copies to the GPU can run on their own. Needs
        CUDA.
        """
        return self._map(Tensor.pin_memory)

    def _map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        return dataclasses.replace(
            self,
            input_ids=move(self.input_ids),
            labels=move(self.labels),
            position_ids=move(self.position_ids),
            attention_mask=None if self.attention_mask is None else move(self.attention_mask),
            cu_seqlens=None if self.cu_seqlens is None else move(self.cu_seqlens),
        )


class Collate(Protocol):
    """Makes a batch of at most `batch_size` rows of documents."""

    def __call__(self, rows: Sequence[Sequence[Document]]) -> Batch: ...


def count_tokens(batches: Sequence[Batch]) -> StepTokens:
    """The tokens of micro-batches together."""
    return StepTokens(
        *(sum(getattr(batch, field.name) for batch in batches) for field in dataclasses.fields(StepTokens))
    )


@dataclass(frozen=True)
class SplitCollate:
    """Makes a whole batch with `collate` and keeps what `split` takes of it."""

    collate: Collate
    split: Callable[[Batch], Batch]

    def __call__(self, rows: Sequence[Sequence[Document]]) -> Batch:
        return self.split(self.collate(rows))


def shifted_labels(document: Document) -> npt.NDArray[np.int64]:
    """For each position the next token if that is supervised, else -100. int64 [n], the last is always -100."""
    labels = np.full(len(document.input_ids), IGNORED, dtype=np.int64)
    labels[:-1] = np.where(document.supervised[1:], document.input_ids[1:], IGNORED)
    return labels


@dataclass(frozen=True)
class PackedCollate:
    """Rows of documents to a packed `Batch` [1, batch_size * max_seq_length], ready to be split over `context_size`
    processes.
    """

    batch_size: int
    max_seq_length: int
    pad_token_id: int
    context_size: int = 1

    def __call__(self, rows: Sequence[Sequence[Document]]) -> Batch:
        """Raises `ValueError` when a row holds more than max_seq_length tokens, or there are more than batch_size
        rows.
        """
        if len(rows) > self.batch_size:
            raise ValueError(f"{len(rows)} rows do not fit a batch of {self.batch_size}")
        total = self.batch_size * self.max_seq_length
        multiple = document_multiple(self.context_size)
        if self.max_seq_length % multiple:
            raise ValueError(
                f"rows of {self.max_seq_length} tokens cannot be split into documents of a multiple of {multiple}"
            )
        input_ids = np.full(total, self.pad_token_id, dtype=np.int64)
        labels = np.full(total, IGNORED, dtype=np.int64)
        position_ids = np.empty(total, dtype=np.int64)
        real = np.zeros(total, dtype=bool)
        bounds = [0]
        for index in range(self.batch_size):
            row_end = (index + 1) * self.max_seq_length
            for document in rows[index] if index < len(rows) else ():
                start, length = bounds[-1], len(document.input_ids)
                end, padded_end = start + length, start + -(-length // multiple) * multiple
                if padded_end > row_end:
                    raise ValueError(
                        f"a row of more than {self.max_seq_length} tokens: rows {[d.row_id for d in rows[index]]}"
                    )
                input_ids[start:end] = document.input_ids
                labels[start:end] = shifted_labels(document)
                real[start:end] = True
                position_ids[start:padded_end] = np.arange(padded_end - start)
                bounds.append(padded_end)
            if bounds[-1] < row_end:
                position_ids[bounds[-1] : row_end] = np.arange(row_end - bounds[-1])
                bounds.append(row_end)
        return Batch(
            input_ids=torch.from_numpy(input_ids).view(1, total),
            labels=torch.from_numpy(labels).view(1, total),
            position_ids=torch.from_numpy(position_ids).view(1, total),
            attention_mask=torch.from_numpy(real).view(1, total) if self.context_size > 1 else None,
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
            max_seqlen=self.max_seq_length,
            num_tokens=total,
            num_real_tokens=int(real.sum()),
            num_supervised_tokens=int((labels != IGNORED).sum()),
            sum_squared_lengths=int((np.diff(bounds) ** 2).sum()),
            row_ids=tuple(document.row_id for row in rows for document in row),
        )


@dataclass(frozen=True)
class PaddedCollate:
    """Rows of one document each to a padded `Batch` [batch_size, S]."""

    batch_size: int
    max_seq_length: int
    pad_token_id: int
    pad_to_full: bool = False
    context_size: int = 1

    def __call__(self, rows: Sequence[Sequence[Document]]) -> Batch:
        """Raises `ValueError` for a row of several documents, a document that is too long, or more than batch_size
        rows.
        """
        if len(rows) > self.batch_size or any(len(row) != 1 for row in rows):
            raise ValueError(f"a padded batch takes at most {self.batch_size} rows of one document each")
        documents = [row[0] for row in rows]
        longest = max((len(document.input_ids) for document in documents), default=1)
        if longest > self.max_seq_length:
            raise ValueError(f"a document of {longest} tokens does not fit {self.max_seq_length}")
        multiple = (
            PADDED_MULTIPLE * self.context_size
        )  # a process gets as many whole multiples of every row as the others
        rounded = -(-longest // multiple) * multiple
        width = self.max_seq_length if self.pad_to_full else min(rounded, self.max_seq_length)

        input_ids = np.full((self.batch_size, width), self.pad_token_id, dtype=np.int64)
        labels = np.full((self.batch_size, width), IGNORED, dtype=np.int64)
        attention_mask = np.zeros((self.batch_size, width), dtype=bool)
        if self.context_size == 1:  # else no attention reads the mask, which then tells real tokens
            attention_mask[len(documents) :, 0] = True
        for index, document in enumerate(documents):
            length = len(document.input_ids)
            input_ids[index, :length] = document.input_ids
            labels[index, :length] = shifted_labels(document)
            attention_mask[index, :length] = True
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            position_ids=torch.arange(width).repeat(self.batch_size, 1),
            attention_mask=torch.from_numpy(attention_mask),
            cu_seqlens=None,
            max_seqlen=width,
            num_tokens=self.batch_size * width,
            num_real_tokens=sum(len(document.input_ids) for document in documents),
            num_supervised_tokens=int((labels != IGNORED).sum()),
            sum_squared_lengths=self.batch_size * width**2,
            row_ids=tuple(document.row_id for document in documents),
        )
