"""Documents become a `Batch`: packed into one line of tokens, or padded side by side.

THE LABELS ARE ALREADY SHIFTED: `labels[..., t]` is the token after position t of the same document, or -100. The loss
is the cross entropy of `logits` and `labels` position by position; Hugging Face models would shift them again.

    field                             packed, T = batch_size * max_seq_length        padded on the right
    input_ids, labels, position_ids   int64 [1, T]                                   int64 [B, S]
    cu_seqlens                        int32 [n + 1], 0 = first < ... < last = T      None
    attention_mask                    None; context parallelism: bool [1, T]         bool [B, S]

The mask is true on documents' tokens. `cu_seqlens` says where each segment begins: a document, or the unused rest of a
sequence of max_seq_length positions; in each `position_ids` start at 0. Context parallelism over C ranks pads every
document, inside its segment, to a multiple of 2 C: attention is causal, so no token of it sees the padding.

S is the longest document rounded up to a multiple of 128 (per rank of context parallelism), at most max_seq_length.
Where fewer than batch_size sequences are left, the missing ones are padding. In a padded batch their first position is
open to attention: some kernels give NaN for a sequence that attends to nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llm_fp8.data.tokenise import Document
from llm_fp8.kernels.softmax import IGNORE_INDEX
from llm_fp8.observability.metrics import StepTokens

PADDED_MULTIPLE = 128
"""Padded lengths are multiples of this: few different shapes, and what fp8 kernels need."""


def document_multiple(context_size: int) -> int:
    """The multiple to which packed documents are padded where `context_size` ranks share every sequence, in tokens."""
    return 2 * context_size if context_size > 1 else 1


@dataclass(frozen=True)
class Batch:
    """One micro-batch; shapes and dtypes are in the module's docstring."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int
    """Upper bound of a segment's length."""
    num_tokens: int
    num_real_tokens: int
    """Without padding."""
    num_supervised_tokens: int
    sum_squared_lengths: int
    """Sum of squared lengths of segments (packed) or sequences (padded): attention's cost; a slice has its share."""
    row_ids: tuple[int, ...]
    """Dataset rows that the documents came from."""

    def to(self, device: str | torch.device, non_blocking: bool = False) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory, for asynchronous copies to the GPU. Needs CUDA."""
        return self._map(Tensor.pin_memory)

    def _map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        moved: dict[str, Any] = {name: move(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return dataclasses.replace(self, **moved)


Collate = Callable[[Sequence[Sequence[Document]]], Batch]
"""Makes a batch of at most `batch_size` sequences."""


def count_tokens(batches: Sequence[Batch]) -> StepTokens:
    return StepTokens(*(sum(getattr(batch, f.name) for batch in batches) for f in dataclasses.fields(StepTokens)))


Arrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""Ids, labels and whether a position is a document's."""


@dataclass(frozen=True)
class _Collate:
    """What both layouts share. `context_size` ranks take a slice of every sequence."""

    batch_size: int
    max_seq_length: int
    pad_token_id: int
    context_size: int = 1

    def _unused(self, *shape: int) -> Arrays:
        """What unused positions hold."""
        ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        return ids, np.full(shape, IGNORE_INDEX, dtype=np.int64), np.zeros(shape, dtype=bool)

    def _batch(
        self, documents: Sequence[Document], starts: Sequence[tuple[int, int]], arrays: Arrays, **others: Any
    ) -> Batch:
        """`documents` written into the arrays of `_unused`, each from its line and column on."""
        ids, labels, real = arrays
        for document, (line, start) in zip(documents, starts, strict=True):
            end = start + len(document.input_ids)
            ids[line, start:end] = document.input_ids
            labels[line, start : end - 1] = np.where(document.supervised[1:], document.input_ids[1:], IGNORE_INDEX)
            real[line, start:end] = True
        return Batch(
            input_ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            num_tokens=ids.size,
            num_real_tokens=sum(len(document.input_ids) for document in documents),
            num_supervised_tokens=int((labels != IGNORE_INDEX).sum()),
            row_ids=tuple(document.row_id for document in documents),
            **others,
        )


class PackedCollate(_Collate):
    """Sequences of documents -> packed `Batch` [1, batch_size * max_seq_length]."""

    def width(self, longest: Any) -> Any:
        """Positions of a sequence, whatever the longest document of a batch."""
        return np.full_like(longest, self.max_seq_length)

    def __call__(self, sequences: Sequence[Sequence[Document]]) -> Batch:
        total, multiple = self.batch_size * self.max_seq_length, document_multiple(self.context_size)
        bounds, starts = [0], []
        for index, documents in enumerate([*sequences, *[()] * (self.batch_size - len(sequences))]):
            for document in documents:
                starts.append((0, bounds[-1]))
                bounds.append(bounds[-1] + -(-len(document.input_ids) // multiple) * multiple)
            if bounds[-1] < (end_of_sequence := (index + 1) * self.max_seq_length):
                bounds.append(end_of_sequence)
        lengths, arrays = np.diff(bounds), self._unused(1, total)
        position_ids = np.arange(total) - np.repeat(bounds[:-1], lengths)
        return self._batch(
            [document for sequence in sequences for document in sequence],
            starts,
            arrays,
            position_ids=torch.from_numpy(position_ids).view(1, total),
            attention_mask=torch.from_numpy(arrays[2]) if self.context_size > 1 else None,
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
            max_seqlen=self.max_seq_length,
            sum_squared_lengths=int((lengths**2).sum()),
        )


class PaddedCollate(_Collate):
    """Sequences of one document each -> padded `Batch` [batch_size, S]."""

    def width(self, longest: Any) -> Any:
        """S, for the longest document of a batch or of each of several."""
        multiple = PADDED_MULTIPLE * self.context_size  # every rank gets as many of them of every sequence
        return np.minimum(-(-longest // multiple) * multiple, self.max_seq_length)

    def __call__(self, sequences: Sequence[Sequence[Document]]) -> Batch:
        documents = [document for (document,) in sequences]
        longest = max((len(document.input_ids) for document in documents), default=1)
        width = int(self.width(longest))
        arrays = self._unused(self.batch_size, width)
        if self.context_size == 1:  # else attention ignores the mask, which tells real tokens
            arrays[2][len(documents) :, 0] = True
        return self._batch(
            documents,
            [(line, 0) for line in range(len(documents))],
            arrays,
            position_ids=torch.arange(width).repeat(self.batch_size, 1),
            attention_mask=torch.from_numpy(arrays[2]),
            cu_seqlens=None,
            max_seqlen=width,
            sum_squared_lengths=self.batch_size * width**2,
        )


Layout = PackedCollate | PaddedCollate
