"""Where FSDP2's exchange of gradients has its memory from, and what it leaves free.

PyTorch's allocator keeps memory by CUDA stream: what one stream leaves free, no other can use. FSDP2 asks for a rank's rows of the gradients, 4 / N bytes
for every parameter on N ranks, on the stream of its exchanges, when the backward pass's own stream has already left free what its whole gradients and
activations took. Both then stay reserved. Asked for on the stream of the backward pass, the rows take the place of these.

They can take the place of whole gradients only if nobody holds on to them. FSDP2 drops a unit's between the two buffers that it asks for: the one that it
copies them to for the exchange, and the rows. The sums that GEMMs added to (`llm_fp8.wgrad_accumulation`) are let go of here, with the first, when FSDP2
alone still has to have them.

Importing this raises ImportError in a torch that has no such class: its name is private, and was found in torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from llm_fp8.wgrad_accumulation import let_go_of_sum


class GradientExchange(DefaultReduceScatter):
    """FSDP2's own exchange of a unit's gradients, with less memory.

    Args:
        entries: what FSDP2 knows of each parameter of the unit.
        stream: that of the backward pass, from whose memory buffers are taken; None leaves them where FSDP2 has them.

    Memory that `stream` left free may still be used by what it has in its queue. FSDP2 lets the exchange's stream wait for the current one before it asks for
    the rows, which is why they can be written there: `stream` has to be current in the backward pass too. Where copies of the model are summed as well
    (fsdp_hybrid) a third stream reads them, of which the allocator would not know.
    """

    def __init__(self, entries: Sequence[Any], stream: torch.cuda.Stream | None) -> None:
        self._entries = entries
        self._stream = stream

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As FSDP2's: a tensor of `size`, contents undefined."""
        for entry in self._entries:
            whole = getattr(entry, "_unsharded_param", None)
            if whole is not None:
                let_go_of_sum(whole)
        if self._stream is None:
            return super().allocate(size, dtype=dtype, device=device)
        asking = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._stream):
            found = super().allocate(size, dtype=dtype, device=device)
        if asking != self._stream:
            found.record_stream(asking)  # rows that are added to earlier ones are dropped while that stream still reads them
        return found
