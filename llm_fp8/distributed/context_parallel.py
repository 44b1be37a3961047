"""Context parallelism: the tokens of every sequence are split over C consecutive ranks (a context group).

Each rank of a group computes embedding, linear layers and loss for 1 / C of every document of the same micro-batch.
Only attention needs tokens of other ranks. Transformer Engine sends keys and values around a ring of the ranks
(`cp_comm_type="p2p"`).

Causal attention costs more for later tokens of a document. To balance the cost, a document is padded to 2 C chunks of
equal length (llm_fp8.data.collate), and rank r gets chunks r and 2 C - 1 - r. With C = 2:

    tokens of a document    0 1 | 2 3 | 4 5 | 6 7
    rank                      0 |   1 |   1 |   0        rank 0 has 0 1 6 7, rank 1 has 2 3 4 5

A sliced batch is always packed ("thd"), since Transformer Engine does not support padding masks here. The order of the
chunks and the limits of the ring (no sliding windows, no fp32) are those of Transformer Engine 2.20,
attention/dot_product_attention/context_parallel.py (`AttnFuncWithCPAndKVP2P`, `get_thd_partitioned_indices`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from llm_fp8.data.collate import Batch
from llm_fp8.kernels.cross_entropy import IGNORE_INDEX


@dataclass(frozen=True)
class ContextGroup:
    """Group of `size` ranks that process the same sequences as this rank."""

    size: int
    rank: int  # this rank's index in the group

    def attach(self, layers: Iterable[Any]) -> None:
        """Make the attention of TE decoder layers run over the group. Then batches must be split. Collective."""
        shape = (dist.get_world_size() // self.size, self.size)
        group = init_device_mesh("cuda", shape, mesh_dim_names=("data", "context")).get_group("context")
        stream = torch.cuda.Stream()  # for every second step of the ring, in all layers
        for layer in layers:
            layer.set_context_parallel_group(group, dist.get_process_group_ranks(group), stream)

    def split(self, batch: Batch) -> Batch:
        """Return this rank's slice of a batch, packed [1, num_tokens / size]. Its token counts are those of the slice.
        `cu_seqlens` and `max_seqlen` are those of the unsliced documents, as attention expects.
        """
        cu_seqlens = batch.cu_seqlens
        if cu_seqlens is None:
            num_sequences, width = batch.input_ids.shape
            cu_seqlens = torch.arange(num_sequences + 1, dtype=torch.int32, device=batch.input_ids.device) * width
        index = slice_index(cu_seqlens, self.size, self.rank)

        def take(tensor: Tensor) -> Tensor:
            return tensor.reshape(1, -1)[:, index]

        labels = take(batch.labels)
        num_tokens = index.numel()
        return dataclasses.replace(
            batch,
            input_ids=take(batch.input_ids),
            labels=labels,
            position_ids=take(batch.position_ids),
            attention_mask=None,
            cu_seqlens=cu_seqlens,
            num_tokens=num_tokens,
            num_real_tokens=num_tokens if batch.attention_mask is None else int(take(batch.attention_mask).sum()),
            num_supervised_tokens=int((labels != IGNORE_INDEX).sum()),
            # The division is exact, since every length is a multiple of 2 * size.
            sum_squared_lengths=batch.sum_squared_lengths // self.size,
        )


def slice_index(cu_seqlens: Tensor, size: int, rank: int) -> Tensor:
    """Return the indices of the tokens for `rank` of `size` in a packed batch: int64 [cu_seqlens[-1] / size]."""
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths), device=bounds.device), lengths // size)
    offset = torch.arange(len(document), device=bounds.device) - (bounds[:-1] // size)[document]
    chunk = lengths[document] // (2 * size)
    # A rank gets chunk `rank` of each document, then chunk 2 * size - 1 - rank.
    chunks_before = torch.where(offset < chunk, rank, 2 * size - 2 - rank)
    return bounds[:-1][document] + offset + chunk * chunks_before
