"""Batches of a few random documents, packed or padded, and helpers that read steps from a loader."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import torch

from llm_fp8.data.collate import Batch, Layout
from llm_fp8.data.loader import TrainLoader
from llm_fp8.data.tokenise import Document

S = 128
LENGTHS = [[50, 77], [128], [9, 100, 16]]
"""Lengths of the documents in each of three rows. A row has S tokens; those after its documents are padding."""


def random_rows(lengths: list[list[int]], vocabulary: int, seed: int) -> list[list[Document]]:
    generator = np.random.default_rng(seed)
    return [
        [Document(generator.integers(3, vocabulary, n), np.ones(n, dtype=bool), row) for n in row_lengths]
        for row, row_lengths in enumerate(lengths)
    ]


def packed_batch(device) -> Batch:
    """Return the documents of `LENGTHS` packed into one row of 3 * S tokens."""
    rows = random_rows(LENGTHS, 1024, seed=1)
    return Layout(len(rows), S, pad_token_id=0, packed=True)(rows).to(device)


def padded_batch(device) -> Batch:
    """Return the documents of `LENGTHS`, each in its own padded row."""
    rows = [[document] for row in random_rows(LENGTHS, 1024, seed=1) for document in row]
    return Layout(len(rows), S, pad_token_id=0, packed=False)(rows).to(device)


BATCHES = {"packed": packed_batch, "padded": padded_batch}


def next_steps(loader: TrainLoader, number: int | None = None) -> list[list[Batch]]:
    """Return the micro-batches of each of the loader's next `number` steps. By default, return those of one epoch."""
    steps: Any = iter(loader)
    with closing(steps):
        return list(islice(steps, loader.steps_per_epoch if number is None else number))


def assert_same_steps(first: list[list[Batch]], second: list[list[Batch]]) -> None:
    assert [[batch.row_ids for batch in step] for step in first] == [[b.row_ids for b in step] for step in second]
    for left, right in zip(sum(first, []), sum(second, []), strict=True):
        assert torch.equal(left.input_ids, right.input_ids) and torch.equal(left.labels, right.labels)
