"""A few documents of random tokens as a `Batch`, packed and padded."""

from __future__ import annotations

import numpy as np

from llm_fp8.data.collate import Batch, Layout
from llm_fp8.data.tokenise import Document

S = 128
LENGTHS = [[50, 77], [128], [9, 100, 16]]
"""Document lengths in each of three rows of S tokens; the rest of a row is padding."""


def random_rows(lengths: list[list[int]], vocabulary: int, seed: int) -> list[list[Document]]:
    tokens = np.random.default_rng(seed)
    return [
        [Document(tokens.integers(3, vocabulary, n), np.ones(n, dtype=bool), row) for n in of_row]
        for row, of_row in enumerate(lengths)
    ]


def packed_batch(device) -> Batch:
    """Three rows of S tokens as one row of 3 S."""
    rows = random_rows(LENGTHS, 1024, seed=1)
    return Layout(len(rows), S, pad_token_id=0, packed=True)(rows).to(device)


def padded_batch(device) -> Batch:
    """The same documents, one a row."""
    rows = [[document] for row in random_rows(LENGTHS, 1024, seed=1) for document in row]
    return Layout(len(rows), S, pad_token_id=0, packed=False)(rows).to(device)


BATCHES = {"packed": packed_batch, "padded": padded_batch}
