"""Where FSDP2's exchange of gradients has its memory from.

PyTorch's allocator keeps memory by CUDA stream: what one stream leaves free, no other can use. FSDP2 asks for a rank's rows of the gradients, 4 / N bytes
for every parameter on N ranks, on the stream of its exchanges, when the backward pass's own stream has already left free what its whole gradients and
activations took. Both then stay reserved. Asked for on the stream of the backward pass, the rows take the place of these.

Importing this raises ImportError in a torch that has no such class: its name is private, and was found in torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter


class ReduceScatterInOnePool(DefaultReduceScatter):
    """FSDP2's own exchange, with buffers from the memory of one stream, that of the backward pass.

    Memory that this stream left free may still be used by what it has in its queue. FSDP2 lets the exchange's stream wait for the current one before it asks for
    the rows, which is why they can be written there: `stream` has to be current in the backward pass too. Where copies of the model are summed as well
    (fsdp_hybrid) a third stream reads them, of which the allocator would not know.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As FSDP2's: a tensor of `size`, contents undefined."""
        asking = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._stream):
            found = super().allocate(size, dtype=dtype, device=device)
        if asking != self._stream:
            found.record_stream(asking)  # rows that are added to earlier ones are dropped while that stream still reads them
        return found
