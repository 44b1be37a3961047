"""The layout of packed and padded batches, and the packing of documents into sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llm_fp8.data.collate import Layout, pack
from llm_fp8.data.tokenise import Document
from llm_fp8.kernels.cross_entropy import IGNORE_INDEX

PAD = 3


def _document(length: int, row_id: int, prompt: int = 0) -> Document:
    """Return a document of `length` random tokens, which may equal PAD. The first `prompt` are not supervised."""
    ids = np.random.default_rng([0, row_id]).integers(0, 64, size=length)
    return Document(ids, np.arange(length) >= prompt, row_id)


def test_packed_layout() -> None:
    rows = [[_document(5, 7), _document(3, 8)], [_document(4, 9, prompt=2)]]
    batch = Layout(batch_size=3, max_seq_length=8, pad_token_id=PAD, packed=True)(rows)
    assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape == (1, 24)
    assert {t.dtype for t in (batch.input_ids, batch.labels, batch.position_ids)} == {torch.int64}
    assert batch.attention_mask is None
    assert batch.cu_seqlens is not None and batch.cu_seqlens.dtype == torch.int32
    # Row 0 is full. The padding of row 1 is a segment, and so is the missing row 2.
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 12, 16, 24]
    assert batch.position_ids[0].tolist() == [*range(5), *range(3), *range(4), *range(4), *range(8)]
    assert batch.input_ids[0, :5].tolist() == rows[0][0].input_ids.tolist()
    assert batch.labels[0, :5].tolist() == [*rows[0][0].input_ids[1:], IGNORE_INDEX]
    assert batch.labels[0, 8:12].tolist() == [IGNORE_INDEX, *rows[1][0].input_ids[2:], IGNORE_INDEX]
    assert (batch.input_ids[0, 12:] == PAD).all() and (batch.labels[0, 12:] == IGNORE_INDEX).all()
    assert (batch.max_seqlen, batch.num_tokens, batch.num_real_tokens) == (8, 24, 12)
    assert batch.num_supervised_tokens == 4 + 2 + 2 == int((batch.labels != IGNORE_INDEX).sum())
    assert batch.row_ids == (7, 8, 9)


def test_padded_layout() -> None:
    rows = [[_document(130, 1)], [_document(4, 2, prompt=2)]]
    batch = Layout(batch_size=3, max_seq_length=1024, pad_token_id=PAD, packed=False)(rows)
    assert batch.input_ids.shape == batch.labels.shape == batch.position_ids.shape == (3, 256)
    assert batch.cu_seqlens is None
    assert batch.attention_mask is not None and batch.attention_mask.dtype == torch.bool
    assert batch.attention_mask.sum(dim=1).tolist() == [130, 4, 1]
    assert batch.attention_mask[0, :130].all() and batch.attention_mask[1, :4].all() and batch.attention_mask[2, 0]
    assert batch.position_ids.tolist() == [[*range(n), *[0] * (256 - n)] for n in (130, 4, 0)]
    assert batch.labels[1, :5].tolist() == [IGNORE_INDEX, *rows[1][0].input_ids[2:], IGNORE_INDEX, IGNORE_INDEX]
    assert (batch.labels[2] == IGNORE_INDEX).all()
    assert (batch.max_seqlen, batch.num_tokens, batch.num_real_tokens) == (256, 768, 134)
    assert batch.num_supervised_tokens == 129 + 2
    assert batch.row_ids == (1, 2)


@pytest.mark.parametrize("collate", [Layout(2, 128, PAD, packed=True), Layout(2, 128, PAD, packed=False)])
def test_batch_without_sequences_has_no_labels(collate: Layout) -> None:
    batch = collate([])
    assert batch.num_tokens == 256 and batch.num_real_tokens == 0 and batch.num_supervised_tokens == 0
    assert (batch.labels == IGNORE_INDEX).all() and batch.row_ids == ()
    if batch.attention_mask is not None:
        assert batch.attention_mask.any(dim=1).all()


@pytest.mark.parametrize("seed", range(5))
def test_each_document_is_packed_once_and_fits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(50, 200))
    lengths = rng.integers(1, capacity // 3, size=400)
    plan = pack(lengths, capacity)
    np.testing.assert_array_equal(np.sort(plan.samples), np.arange(len(lengths)))
    sums = np.add.reduceat(lengths[plan.samples], plan.offsets[:-1])
    assert sums.max() <= capacity and (np.diff(plan.offsets) > 0).all()
    assert len(plan) == -(-lengths.sum() // capacity), "best fit fills every sequence but the last"


def test_packing_is_deterministic_and_handles_edge_cases() -> None:
    lengths = np.random.default_rng(1).integers(1, 64, size=5000)
    first, second = pack(lengths, 64), pack(list(lengths), 64)
    np.testing.assert_array_equal(first.samples, second.samples)
    np.testing.assert_array_equal(first.offsets, second.offsets)
    assert len(pack([], 8)) == 0
    assert [pack([8, 8], 8)[i].tolist() for i in range(2)] == [[0], [1]]
