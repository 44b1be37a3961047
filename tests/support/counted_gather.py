"""What FSDP2 gathers, counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class CountedAllGather:
    """FSDP2's own way to gather, which notes how much each rank puts in.

    Attributes:
        sent_bytes: of every gather, what this rank put in.
    """

    def __init__(self, model: nn.Module) -> None:
        """Take the place of the gathers of all units of `model`."""
        self.sent_bytes: list[int] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(self)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the result."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather."""
        self.sent_bytes.append(input_tensor.nbytes)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
