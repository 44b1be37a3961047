"""Context parallelism: the tokens of every sequence are split over C consecutive ranks (a context group).

Each rank of a group computes embedding, linear layers and loss for 1 / C of every document of the same micro-batch.
Only attention needs tokens of other ranks. Transformer Engine sends keys and values around a ring ("p2p").

A sliced batch is always packed ("thd"), since Transformer Engine does not support padding masks here. Its ring supports
neither sliding windows nor fp32 (TE 2.20, attention/dot_product_attention/context_parallel.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from llm_fp8.data.collate import Batch
from llm_fp8.kernels.cross_entropy import IGNORE_INDEX
from llm_fp8.kernels.ring_slices import slice_index


@dataclasses.dataclass(frozen=True)
class ContextGroup:
    """Group of `size` ranks, this one included. Each processes a slice of the same sequences."""

    size: int
    rank: int  # this rank's index in the group

    def attach(self, layers: Iterable[Any]) -> None:
        """Make TE's decoder `layers` exchange keys and values in the group, for batches from `split`. Collective."""
        shape = (dist.get_world_size() // self.size, self.size)
        group = init_device_mesh("cuda", shape, mesh_dim_names=("data", "context")).get_group("context")
        stream = torch.cuda.Stream()  # for every second step of the ring, in all layers
        for layer in layers:
            layer.set_context_parallel_group(group, dist.get_process_group_ranks(group), stream)

    def split(self, batch: Batch) -> Batch:
        """Return this rank's slice of `batch`, packed [1, num_tokens / size]. The token counts are those of the slice,
        but `cu_seqlens` and `max_seqlen` describe the unsliced documents, as attention expects.
        """
        cu_seqlens = batch.cu_seqlens
        if cu_seqlens is None:
            num_sequences, width = batch.input_ids.shape
            cu_seqlens = torch.arange(num_sequences + 1, dtype=torch.int32, device=batch.input_ids.device) * width
        index = slice_index(cu_seqlens, self.size, self.rank)

        def take(tensor: Tensor) -> Tensor:
            return tensor.reshape(1, -1)[:, index]

        labels, num_tokens = take(batch.labels), index.numel()
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
