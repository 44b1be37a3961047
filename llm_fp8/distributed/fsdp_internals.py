"""FSDP2's private names that this project reads; other private names of torch: `utils/torch_internals`.

    name (read in torch 2.11 and 2.13)         what for
    FSDPModule._get_fsdp_state and its         the parameters of a unit
      _fsdp_param_groups (2.13) or
      _fsdp_param_group (2.11), .fsdp_params,
      entry._module_info
    entry._unsharded_param                     the gathered weight and its .grad
    entry.unsharded_accumulated_grad           the fp32 gradient of the micro-batches before the last

Without them (noticed by tests/distributed/test_wgrad_fusion_sharded.py) autograd and FSDP2 accumulate by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from llm_fp8.distributed.strategy import FindMainGrad
from llm_fp8.utils.te_internals import release_main_grad


def units_of(model: nn.Module) -> Iterator[FSDPModule]:
    """The outermost unit and the decoder layers."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _entries_of(unit: FSDPModule) -> Iterator[tuple[Tensor, Any]]:
    """The sharded parameters of one unit, as their modules have them between steps, each with FSDP2's record of it."""
    state = unit._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
        for entry in getattr(group, "fsdp_params", ()):
            if owner := getattr(entry, "_module_info", None):
                yield getattr(owner.module, owner.param_name), entry


def unsharded_gradients(model: nn.Module) -> FindMainGrad:
    """Find FSDP2's gradients of sharded weights between micro-batches, which are unsharded and fp32 on every rank; in
    forward passes the gathered weight stands in for the sharded one.
    """
    entries = {id(weight): entry for unit in units_of(model) for weight, entry in _entries_of(unit)}

    def find(weight: Tensor) -> tuple[Tensor, Tensor | None]:
        entry = entries.get(id(weight))
        gathered: Tensor | None = getattr(entry, "_unsharded_param", None)  # from the first forward pass on
        if gathered is None:
            return weight, None
        accumulated: Tensor | None = getattr(entry, "unsharded_accumulated_grad", None)
        # FSDP2 has no fp32 gradient of its own where the compute dtype is fp32 too.
        return gathered, gathered.grad if accumulated is None else accumulated

    return find


class MemorySavingReduceScatter:
    """FSDP2's reduce-scatter of a unit's gradients, with buffers from the backward pass's memory.

    PyTorch's allocator keeps memory by CUDA stream. FSDP2 allocates a rank's gradient shards (4 / N bytes per parameter
    on N ranks) on the reduce-scatter's stream. On `stream()`, that of the backward pass, they take the place of
    activations and unsharded gradients: FSDP2 drops its references to these between its two allocations, and main
    gradients are released at the first. None allocates where FSDP2 does: on CPUs, and under fsdp_hybrid, where a third
    stream, unknown to the allocator, reads the shards.

    FSDP2 casts reduced shards to the parameters' dtype, on the reduce-scatter's stream too. So where that is bf16
    (`adamw_master`, `adamw_8bit`) the output is allocated in it, and the cast is made here.
    """

    def __init__(self, unit: FSDPModule, stream: Callable[[], torch.cuda.Stream | None]) -> None:
        self._entries = [entry for _, entry in _entries_of(unit)]
        self._stream = stream

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        for entry in self._entries:
            if (gathered := getattr(entry, "_unsharded_param", None)) is not None:
                release_main_grad(gathered)
        if (stream := self._stream()) is None:
            return torch.empty(*size, dtype=dtype, device=device)
        current = torch.cuda.current_stream(device)
        is_output = current != stream
        if is_output:
            dtype = next(entry.orig_dtype for entry in self._entries if entry.sharded_param.requires_grad)
        with torch.cuda.stream(stream):
            buffer = torch.empty(*size, dtype=dtype, device=device)
        if is_output:
            buffer.record_stream(current)  # shards may be freed while that stream still uses them
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        casts = output_tensor.dtype != input_tensor.dtype
        # As FSDP2's default does it; torch 2.13 renamed reduce_scatter_tensor.
        reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        output = torch.empty_like(output_tensor, dtype=input_tensor.dtype) if casts else output_tensor
        work = reduce_scatter(output=output, input=input_tensor, group=group, op=op, async_op=async_op)
        if casts:
            output_tensor.copy_(output)
        return work
