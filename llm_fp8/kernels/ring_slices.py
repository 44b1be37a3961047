"""The tokens that each rank of ring attention gets from a packed batch.

Causal attention costs more for later tokens of a document. To balance the cost, a document is padded to 2 C chunks of
equal length, and rank r gets chunks r and 2 C - 1 - r. With C = 2:

    tokens of a document    0 1 | 2 3 | 4 5 | 6 7
    rank                      0 |   1 |   1 |   0        rank 0 has 0 1 6 7, rank 1 has 2 3 4 5

This is the order of Transformer Engine 2.20 (`AttnFuncWithCPAndKVP2P`, `get_thd_partitioned_indices`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def slice_index(cu_seqlens: Tensor, size: int, rank: int) -> Tensor:
    """Return the indices of the tokens that rank `rank` of `size` gets: int64 [cu_seqlens[-1] / size]."""
    bounds = cu_seqlens.long()
    lengths = bounds.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths), device=bounds.device), lengths // size)
    offset = torch.arange(len(document), device=bounds.device) - (bounds[:-1] // size)[document]
    chunk = lengths[document] // (2 * size)
    # A rank gets chunk `rank` of each document, then chunk 2 * size - 1 - rank.
    return bounds[:-1][document] + offset + chunk * torch.where(offset < chunk, rank, 2 * size - 2 - rank)
