"""Context parallelism without a GPU: the layout of batches, and their split into one slice per rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llm_fp8.data.collate import Batch, Layout, pack
from llm_fp8.data.tokenise import Document
from llm_fp8.distributed.context_parallel import ContextGroup
from llm_fp8.kernels.cross_entropy import IGNORE_INDEX
from llm_fp8.kernels.ring_slices import slice_index

PAD = 3
VOCABULARY = 64
SIZES = (2, 3, 4)
LENGTHS = [30, 64, 7, 12, 51, 2, 33, 20, 1]
COUNTS = ("num_tokens", "num_real_tokens", "num_supervised_tokens", "sum_squared_lengths")


def _document(length: int, row_id: int) -> Document:
    """Return a document of `length` random tokens, which may equal PAD. The first third of the tokens is the prompt."""
    ids = np.random.default_rng(row_id).integers(0, VOCABULARY, size=length)
    return Document(ids, np.arange(length) >= length // 3, row_id)


DOCUMENTS = [_document(length, row_id) for row_id, length in enumerate(LENGTHS)]


def _packed(size: int, capacity: int = 96) -> Batch:
    """Pack `DOCUMENTS` for `size` ranks into rows of `capacity` tokens. The last row of the batch stays empty."""
    layout = Layout(6, capacity, PAD, packed=True, num_slices=size)
    plan = pack(LENGTHS, capacity, layout.multiple)
    return layout([[DOCUMENTS[i] for i in plan[row]] for row in range(len(plan))])


def _padded(size: int) -> Batch:
    return Layout(10, 96, PAD, packed=False, num_slices=size)([[document] for document in DOCUMENTS])


BATCHES = {"packed": _packed, "padded": _padded}
layouts = pytest.mark.parametrize("layout", BATCHES)
sizes = pytest.mark.parametrize("size", SIZES)


def _slices(batch: Batch, size: int) -> list[Batch]:
    return [ContextGroup(size, rank).split(batch) for rank in range(size)]


def _bounds(batch: Batch) -> list[int]:
    """Return the start of each document in the flattened tokens of a packed or padded batch, then the total length."""
    if batch.cu_seqlens is not None:
        return batch.cu_seqlens.tolist()
    rows, width = batch.input_ids.shape
    return [row * width for row in range(rows + 1)]


# --- The split --------------------------------------------------------------------------------------------------------


@sizes
def test_slice_index_lists_two_chunks_of_each_document(size: int) -> None:
    lengths = [2 * size * n for n in (3, 1, 0, 7, 2)]
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    for rank in range(size):
        expected: list[int] = []
        for start, length in zip(bounds[:-1].tolist(), lengths, strict=True):
            chunks = np.arange(start, start + length).reshape(2 * size, -1)
            expected += [*chunks[rank].tolist(), *chunks[2 * size - 1 - rank].tolist()]
        assert slice_index(torch.from_numpy(bounds), size, rank).tolist() == expected


@sizes
@layouts
def test_each_token_goes_to_one_rank_with_its_label_and_position(layout: str, size: int) -> None:
    batch = BATCHES[layout](size)
    bounds = torch.tensor(_bounds(batch))
    whole = torch.stack([t.flatten() for t in (batch.input_ids, batch.labels, batch.position_ids)])
    all_indices = []
    for rank, part in enumerate(_slices(batch, size)):
        index = slice_index(bounds, size, rank)
        assert part.input_ids.shape == part.labels.shape == part.position_ids.shape == (1, batch.num_tokens // size)
        assert part.attention_mask is None and part.cu_seqlens is not None and part.cu_seqlens.dtype == torch.int32
        assert part.cu_seqlens.tolist() == bounds.tolist() and part.max_seqlen == batch.max_seqlen
        rank_tokens = torch.cat([part.input_ids, part.labels, part.position_ids])
        assert torch.equal(rank_tokens, whole[:, index])
        all_indices += index.tolist()
    assert sorted(all_indices) == list(range(batch.num_tokens))


@sizes
@layouts
def test_batch_has_each_documents_tokens_positions_and_labels(layout: str, size: int) -> None:
    """Each document is padded to a multiple of 2 * `size` tokens for `size` ranks, and padding has no labels."""
    batch = BATCHES[layout](size)
    assert batch.attention_mask is not None
    real, labels = batch.attention_mask.flatten(), batch.labels.flatten()
    documents = [DOCUMENTS[row_id] for row_id in batch.row_ids]
    assert batch.input_ids.flatten()[real].tolist() == [i for each in documents for i in each.input_ids.tolist()]
    assert batch.position_ids.flatten()[real].tolist() == [i for each in documents for i in range(len(each.input_ids))]
    next_tokens = [np.where(each.supervised, each.input_ids, IGNORE_INDEX)[1:].tolist() for each in documents]
    assert labels[real].tolist() == [label for ids in next_tokens for label in (*ids, IGNORE_INDEX)]
    assert (labels[~real] == IGNORE_INDEX).all() and all(bound % (2 * size) == 0 for bound in _bounds(batch))


@sizes
@layouts
def test_counts_of_the_slices_sum_to_those_of_the_batch(layout: str, size: int) -> None:
    batch = BATCHES[layout](size)
    parts = _slices(batch, size)
    for name in COUNTS:
        assert sum(getattr(part, name) for part in parts) == getattr(batch, name), name
    assert batch.num_real_tokens == sum(LENGTHS)
    assert batch.num_supervised_tokens == sum(int(document.supervised[1:].sum()) for document in DOCUMENTS)
    assert {part.num_tokens for part in parts} == {batch.num_tokens // size}
    assert all(part.num_supervised_tokens == int((part.labels != IGNORE_INDEX).sum()) for part in parts)
    assert len({part.num_real_tokens for part in parts}) > 1, "real tokens are not counted as equal shares"
