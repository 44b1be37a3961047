"""A few documents of random tokens as a `Batch`, packed and padded."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch

from llm_fp8.data.collate import Batch, PackedCollate
from llm_fp8.data.tokenise import Document

S = 128
LENGTHS = [[50, 77], [128], [9, 100, 16]]
"""Document lengths in each of three rows of S tokens; the rest of a row is padding."""


def packed_batch(device) -> Batch:
    """Three rows of S tokens as one row of 3 S."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 1024, (1, len(LENGTHS) * S), generator=generator)
    labels = torch.full_like(ids, -100)
    positions = torch.zeros_like(ids)
    bounds = [0]
    for row, lengths in enumerate(LENGTHS):
        start = row * S
        for length in [*lengths, S - sum(lengths)]:
            if length == 0:
                continue
            positions[0, start : start + length] = torch.arange(length)
            if length in lengths:
                labels[0, start : start + length - 1] = ids[0, start + 1 : start + length]
            start += length
            bounds.append(start)
    return make_batch(ids, labels, positions, None, torch.tensor(bounds, dtype=torch.int32), device)


def padded_batch(device) -> Batch:
    """The same documents, one a row."""
    packed = packed_batch("cpu")
    spans = [
        (row * S + sum(lengths[:i]), length) for row, lengths in enumerate(LENGTHS) for i, length in enumerate(lengths)
    ]
    ids, labels = torch.zeros(len(spans), S, dtype=torch.int64), torch.full((len(spans), S), -100)
    mask = torch.zeros(len(spans), S, dtype=torch.bool)
    for row, (start, length) in enumerate(spans):
        ids[row, :length] = packed.input_ids[0, start : start + length]
        labels[row, :length] = packed.labels[0, start : start + length]
        mask[row, :length] = True
    positions = torch.arange(S).expand(len(spans), -1).contiguous()
    return make_batch(ids, labels, positions, mask, None, device)


def make_batch(ids, labels, positions, mask, cu_seqlens, device) -> Batch:
    return Batch(
        input_ids=ids,
        labels=labels,
        position_ids=positions,
        attention_mask=mask,
        cu_seqlens=cu_seqlens,
        max_seqlen=S,
        num_tokens=ids.numel(),
        num_real_tokens=sum(map(sum, LENGTHS)),
        num_supervised_tokens=int((labels != -100).sum()),
        sum_squared_lengths=sum(length**2 for lengths in LENGTHS for length in lengths),
        row_ids=(),
    ).to(device)


def packed_documents(num_documents: int, num_rows: int, length: int, vocabulary: int, seed: int) -> Batch:
    """So many documents of random lengths and tokens, all supervised, which fill `num_rows` rows of `length` tokens."""
    draw, tokens = random.Random(seed), np.random.default_rng(seed)
    rows = []
    for row in range(num_rows):
        count = num_documents // num_rows + (row < num_documents % num_rows)
        bounds = [0, *sorted(draw.sample(range(1, length), count - 1)), length]
        lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
        rows.append([Document(tokens.integers(3, vocabulary, n), np.ones(n, dtype=bool), row) for n in lengths])
    batch = PackedCollate(num_rows, length, pad_token_id=0)(rows)
    assert batch.cu_seqlens is not None and len(batch.cu_seqlens) - 1 == num_documents
    return batch


BATCHES = {"packed": packed_batch, "padded": padded_batch}
