"""The private names of torch, read in 2.11 and 2.13, that rooms below `distributed` need, and how `forward` is wrapped;
FSDP2's own names are in `llm_fp8.distributed.fsdp_internals`.

    name                                                  noticed by (else AttributeError)
    DTensor._local_tensor                                 tests/models/test_model.py
    nn.Module._non_persistent_buffers_set                 tests/models/test_model.py
    nn.Module._apply                                      tests/models/test_model.py
    torch._dynamo.config.optimize_ddp                     tests/precision/test_torchao.py
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def wrap_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """From now on `module.forward(*args, **kwargs)` is `wrapper(the forward until now, *args, **kwargs)`: hooks cannot
    enclose a forward pass, and a module around it would change parameters' names.

    Wrappers nest, the last one outermost: first autocast off for modules kept in bf16 (`Precision.attach`), then
    recomputation, which so runs in the precision of the first pass. FSDP2 and torch.compile act on the module around
    both.
    """
    module.forward = functools.partial(wrapper, module.forward)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor itself, or the tensor; `to_local()` of a Parameter is a view in 2.13."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharded_like(local: Tensor, tensor: DTensor) -> DTensor:
    """Make a DTensor placed as `tensor`; `local` is this rank's shard."""
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the buffers of `module` itself that a state dict holds, by name."""
    buffers = module.named_buffers(recurse=False)
    return ((name, buffer) for name, buffer in buffers if name not in module._non_persistent_buffers_set)


def materialize_(
    model: nn.Module, parameter_device: torch.device, buffer_device: torch.device, later: Iterable[nn.Module] = ()
) -> None:
    """Move DTensors to `parameter_device`, other parameters and buffers to `buffer_device`; those on the meta device
    get memory, contents undefined, those of the modules `later` only by `give_memory_`.
    """
    without_memory = {id(parameter) for module in later for parameter in module.parameters(recurse=False)}

    def move(tensor: Tensor) -> Tensor:
        device = parameter_device if isinstance(tensor, DTensor) else buffer_device
        moved = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)
        if id(tensor) in without_memory:
            free_memory_(moved)
        return moved

    model._apply(move)


def free_memory_(tensor: Tensor) -> None:
    """Free the memory of `tensor`, or of this rank's shard; `give_memory_` makes it usable again."""
    local_of(tensor).untyped_storage().resize_(0)


def give_memory_(tensor: Tensor) -> None:
    """Give `tensor`, or this rank's shard of it, memory where it has none; contents undefined."""
    local = local_of(tensor)
    if local.untyped_storage().size() == 0:
        local.untyped_storage().resize_(local.numel() * local.element_size())


def compile_without_ddp_cuts() -> None:
    """Keep torch.compile from cutting graphs at DDP's buckets: with recomputation it cannot."""
    importlib.import_module("torch._dynamo").config.optimize_ddp = False
