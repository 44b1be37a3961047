"""Context parallelism without a GPU: how batches are split, that nothing is lost, and what is refused.

Attention is emulated here: every rank of a group, all in this process, lets its own queries attend to the keys of all
ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_fp8.data.collate import Batch, Layout
from llm_fp8.data.pack import pack
from llm_fp8.data.tokenise import Document
from llm_fp8.distributed.context_parallel import ContextGroup, slice_index
from llm_fp8.kernels.cross_entropy import linear_cross_entropy_sum
from llm_fp8.kernels.softmax import IGNORE_INDEX

PAD = 3
VOCABULARY = 64
SIZES = (2, 3, 4)
LENGTHS = [30, 64, 7, 12, 51, 2, 33, 20, 1]
COUNTS = ("num_tokens", "num_real_tokens", "num_supervised_tokens", "sum_squared_lengths")


def _document(length: int, row_id: int) -> Document:
    """Random tokens, PAD's id among them, a third of them prompt."""
    ids = np.random.default_rng(row_id).integers(0, VOCABULARY, size=length)
    return Document(ids, np.arange(length) >= length // 3, row_id)


DOCUMENTS = [_document(length, row_id) for row_id, length in enumerate(LENGTHS)]


def _packed(size: int, capacity: int = 96) -> Batch:
    """The documents in rows of `capacity` tokens, and one row more than they need."""
    layout = Layout(6, capacity, PAD, packed=True, context_size=size)
    plan = pack(LENGTHS, capacity, layout.multiple)
    return layout([[DOCUMENTS[i] for i in plan[row]] for row in range(len(plan))])


def _padded(size: int) -> Batch:
    return Layout(10, 96, PAD, packed=False, context_size=size)([[document] for document in DOCUMENTS])


BATCHES = {"packed": _packed, "padded": _padded}
layouts = pytest.mark.parametrize("layout", BATCHES)
sizes = pytest.mark.parametrize("size", SIZES)


def _slices(batch: Batch, size: int) -> list[Batch]:
    return [ContextGroup(size, rank).split(batch) for rank in range(size)]


def _bounds(batch: Batch) -> list[int]:
    """Where the documents of a batch, packed or padded, begin and end in its tokens read line by line."""
    if batch.cu_seqlens is not None:
        return batch.cu_seqlens.tolist()
    rows, width = batch.input_ids.shape
    return [row * width for row in range(rows + 1)]


# --- the split --------------------------------------------------------------------------------------------------------


@sizes
def test_slice_index_lists_a_ranks_chunks_document_by_document(size: int) -> None:
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
def test_every_token_goes_to_one_rank_with_its_label_and_position(layout: str, size: int) -> None:
    batch = BATCHES[layout](size)
    bounds = torch.tensor(_bounds(batch))
    whole = torch.stack([t.flatten() for t in (batch.input_ids, batch.labels, batch.position_ids)])
    seen = []
    for rank, part in enumerate(_slices(batch, size)):
        index = slice_index(bounds, size, rank)
        assert part.input_ids.shape == part.labels.shape == part.position_ids.shape == (1, batch.num_tokens // size)
        assert part.attention_mask is None and part.cu_seqlens is not None and part.cu_seqlens.dtype == torch.int32
        assert part.cu_seqlens.tolist() == bounds.tolist() and part.max_seqlen == batch.max_seqlen
        taken = torch.cat([part.input_ids, part.labels, part.position_ids])
        assert torch.equal(taken, whole[:, index])
        seen += index.tolist()
    assert sorted(seen) == list(range(batch.num_tokens))


@sizes
@layouts
def test_counts_of_the_slices_add_up(layout: str, size: int) -> None:
    batch = BATCHES[layout](size)
    parts = _slices(batch, size)
    for name in COUNTS:
        assert sum(getattr(part, name) for part in parts) == getattr(batch, name), name
    assert batch.num_real_tokens == sum(LENGTHS)
    assert batch.num_supervised_tokens == sum(int(document.supervised[1:].sum()) for document in DOCUMENTS)
    assert {part.num_tokens for part in parts} == {batch.num_tokens // size}
    assert all(part.num_supervised_tokens == int((part.labels != IGNORE_INDEX).sum()) for part in parts)
    assert len({part.num_real_tokens for part in parts}) > 1  # a share of its own, not an equal one


# --- loss and gradients -----------------------------------------------------------------------------------------------


class TinyDecoder(nn.Module):
    """Two layers of rotary attention and MLP that compute the slices of all ranks of a group, in fp64.

    Tokens of different slices meet in attention alone, where every rank's queries see the keys of all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16, dtype=torch.float64)
        self.qkv = nn.ModuleList(nn.Linear(16, 48, dtype=torch.float64) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Linear(16, 16, dtype=torch.float64) for _ in range(2))

    def forward(self, parts: Sequence[Batch]) -> Tensor:
        """The sum over the slices of their summed cross entropy."""
        documents = [_document_numbers(part, len(parts)) for part in parts]
        positions = [part.position_ids[0] for part in parts]
        all_documents, all_positions = torch.cat(documents), torch.cat(positions)
        hidden = [self.embedding(part.input_ids[0]) for part in parts]
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            projected = [qkv(x).chunk(3, dim=-1) for x in hidden]
            keys = torch.cat([_rotate(k, p) for (_q, k, _v), p in zip(projected, positions, strict=True)])
            values = torch.cat([v for _q, _k, v in projected])
            for rank, (q, _k, _v) in enumerate(projected):
                visible = (documents[rank][:, None] == all_documents) & (positions[rank][:, None] >= all_positions)
                attended = F.scaled_dot_product_attention(
                    _rotate(q, positions[rank])[None], keys[None], values[None], visible
                )
                hidden[rank] = hidden[rank] + attended[0]
                hidden[rank] = hidden[rank] + torch.tanh(mlp(hidden[rank]))
        losses = [
            linear_cross_entropy_sum(x[None], self.embedding.weight, part.labels)
            for x, part in zip(hidden, parts, strict=True)
        ]
        return torch.stack(losses).sum()


def _document_numbers(part: Batch, size: int) -> Tensor:
    """The number of the document that each token of a slice belongs to."""
    bounds = torch.tensor(_bounds(part)) // size
    return torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, None].double() * torch.logspace(0, -2, x.shape[-1] // 2, dtype=torch.float64)
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), dim=-1
    )


def _loss_and_gradients(parts: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    model = TinyDecoder()
    loss = model(parts)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@sizes
@layouts
def test_slices_give_the_loss_and_gradients_of_the_whole(layout: str, size: int) -> None:
    split_loss, split_gradients = _loss_and_gradients(_slices(BATCHES[layout](size), size))
    # The reference has neither slices nor, where documents are packed, their padding.
    whole = BATCHES[layout](1)
    if whole.cu_seqlens is None:
        whole = dataclasses.replace(
            whole,
            input_ids=whole.input_ids.view(1, -1),
            labels=whole.labels.view(1, -1),
            position_ids=whole.position_ids.view(1, -1),
            cu_seqlens=torch.tensor(_bounds(whole), dtype=torch.int32),
        )
    loss, gradients = _loss_and_gradients([whole])
    torch.testing.assert_close(split_loss, loss, rtol=1e-12, atol=0)
    assert split_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(split_gradients[name], gradient, rtol=1e-9, atol=1e-10, msg=name)
