"""A few documents of random tokens as a `Batch`, packed and padded."""

from __future__ import annotations

import itertools
import random

import numpy as np

from llm_fp8.data.collate import Batch, PackedCollate, PaddedCollate
from llm_fp8.data.tokenise import Document

S = 128
LENGTHS = [[50, 77], [128], [9, 100, 16]]
"""Document lengths in each of three rows of S tokens; the rest of a row is padding."""


def _rows(lengths: list[list[int]], vocabulary: int, seed: int) -> list[list[Document]]:
    tokens = np.random.default_rng(seed)
    return [
        [Document(tokens.integers(3, vocabulary, n), np.ones(n, dtype=bool), row) for n in of_row]
        for row, of_row in enumerate(lengths)
    ]


def packed_batch(device) -> Batch:
    """Three rows of S tokens as one row of 3 S."""
    rows = _rows(LENGTHS, 1024, seed=1)
    return PackedCollate(len(rows), S, pad_token_id=0)(rows).to(device)


def padded_batch(device) -> Batch:
    """The same documents, one a row."""
    rows = [[document] for row in _rows(LENGTHS, 1024, seed=1) for document in row]
    return PaddedCollate(len(rows), S, pad_token_id=0)(rows).to(device)


def packed_documents(num_documents: int, num_rows: int, length: int, vocabulary: int, seed: int) -> Batch:
    """So many documents of random lengths and tokens, all supervised, which fill `num_rows` rows of `length` tokens."""
    draw, lengths = random.Random(seed), []
    for row in range(num_rows):
        count = num_documents // num_rows + (row < num_documents % num_rows)
        bounds = [0, *sorted(draw.sample(range(1, length), count - 1)), length]
        lengths.append([stop - start for start, stop in itertools.pairwise(bounds)])
    batch = PackedCollate(num_rows, length, pad_token_id=0)(_rows(lengths, vocabulary, seed))
    assert batch.cu_seqlens is not None and len(batch.cu_seqlens) - 1 == num_documents
    return batch


BATCHES = {"packed": packed_batch, "padded": padded_batch}
