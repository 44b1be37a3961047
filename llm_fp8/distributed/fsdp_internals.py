"""Where FSDP2's exchange of gradients has its memory from, and what it leaves free.

PyTorch's allocator keeps memory by CUDA stream: what one stream leaves free, no other can use. FSDP2 asks for a rank's
rows of the gradients, 4 / N bytes for every parameter on N ranks, on the stream of its exchanges, when the backward
pass's own stream has already left free what its whole gradients and activations took. Both then stay reserved. Asked
for on the stream of the backward pass, the rows take the place of these.

They can take the place of whole gradients only if nobody holds on to them. FSDP2 drops a unit's between the two buffers
that it asks for: the one that it copies them to for the exchange, and the rows. The sums that GEMMs added to
(`llm_fp8.distributed.wgrad_fusion`) are let go of here, with the first, when FSDP2 alone still has to have them.

Importing this raises ImportError in a torch that has no such class: its name is private, and was found in torch 2.11
and 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from llm_fp8.distributed.wgrad_fusion import release_main_grad


class MemorySavingReduceScatter(DefaultReduceScatter):
    """FSDP2's own exchange of a unit's gradients, with less memory.

    Args:
        entries: what FSDP2 knows of each parameter of the unit.
        stream: that of the backward pass, from whose memory buffers are taken; None leaves them where FSDP2 has them.

    Memory that `stream` left free may still be used by what it has in its queue. FSDP2 lets the exchange's stream wait
    for the current one before it asks for the rows, which is why they can be written there: `stream` has to be current
    in the backward pass too. Where copies of the model are summed as well (fsdp_hybrid) a third stream reads them, of
    which the allocator would not know.
    """

    def __init__(self, entries: Sequence[Any], stream: torch.cuda.Stream | None) -> None:
        self._entries = entries
        self._stream = stream

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As FSDP2's: a tensor of `size`, contents undefined."""
        for entry in self._entries:
            whole = getattr(entry, "_unsharded_param", None)
            if whole is not None:
                release_main_grad(whole)
        if self._stream is None:
            return super().allocate(size, dtype=dtype, device=device)
        asking = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._stream):
            found = super().allocate(size, dtype=dtype, device=device)
        if asking != self._stream:
            found.record_stream(
                asking
            )  # rows that are added to earlier ones are dropped while that stream still reads them
        return found


def _let_te_keep_casts(model: nn.Module) -> None:
    """Let Transformer Engine's modules treat split parameters as whole ones.

    Those of Transformer Engine 2.20 look for FSDP2 once, and where they find it they keep no fp8 weights: not for
    further micro-batches, and not for the backward pass, which casts again. What they find is kept in this attribute.
    """
    for module in model.modules():
        if hasattr(type(module), "is_fsdp2"):
            module._is_fsdp2 = False  # type: ignore[assignment]


class UnshardedGradients:
    """Where FSDP2 keeps the gradients of a split weight while micro-batches are accumulated: whole, in fp32, on every
    rank.

    torch has no public name for it; this reads the attributes that it has in torch 2.11 and 2.13. In a torch that has
    others nothing is found, and autograd and FSDP2 add gradients up with kernels of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entries = {id(weight): entry for weight, entry in _split_parameters(model)}

    def find(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """A split weight -> the whole one that stands in for it in a layer's forward pass, and the sum so far; see
        `FindMainGrad`.
        """
        entry = self._entries.get(id(weight))
        whole: Tensor | None = getattr(entry, "_unsharded_param", None)  # from the first forward pass on
        if entry is None or whole is None or _would_lose_main_grad(entry._module_info.module):
            return weight, None
        total: Tensor | None = getattr(entry, "unsharded_accumulated_grad", None)
        return whole, whole.grad if total is None else total  # no sum of its own where the compute dtype is fp32 too


def _would_lose_main_grad(module: Any) -> bool:
    """Whether this module would end the step with an error instead of adding to a sum.

    Transformer Engine 2.20's LayerNormLinear looks for the sum only where it has kept the weight that it multiplied
    with; under FSDP2 it drops its fp8 cast.
    """
    drops_cast = (
        getattr(module, "is_fsdp2", False) and getattr(module, "fp8", False) and not module.primary_weights_in_fp8
    )
    return type(module).__name__ == "LayerNormLinear" and drops_cast


def _split_parameters(model: nn.Module) -> Iterator[tuple[Tensor, Any]]:
    """Each split parameter, as its module has it between steps, with what FSDP2 knows of it."""
    for unit in _units_of(model):
        yield from _entries_of(unit)


def _units_of(model: nn.Module) -> Iterator[FSDPModule]:
    """The outermost unit and the decoder layers."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _entries_of(unit: FSDPModule) -> Iterator[tuple[Tensor, Any]]:
    """The split parameters of one unit."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for entry in (entry for group in groups for entry in getattr(group, "fsdp_params", ())):
        owner = getattr(entry, "_module_info", None)
        if owner is not None:
            yield getattr(owner.module, owner.param_name), entry
