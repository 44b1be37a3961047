"""Use private names of torch and torchao, checked in torch 2.11 and 2.13. No other file uses them.
A plain model needs only `_apply`, which classes may override. `wrap_forward` is here too.

    name                                                  test that notices a change (else AttributeError)
    DTensor._local_tensor                                 tests/models/test_model.py
    nn.Module._apply                                      tests/models/test_model.py
    names in torch._dynamo.config and torch._dynamo.utils tests/step/test_compiled.py
    module._ddp_params_and_buffers_to_ignore              tests/distributed/test_modes_multi_gpu.py
    WeightWithDynamicFloat8CastTensor._tensor             tests/precision/test_torchao.py
    FSDPModule._get_fsdp_state, its _fsdp_param_groups    tests/distributed/test_wgrad_fusion_sharded.py; without them
      (2.13) or _fsdp_param_group (2.11), .fsdp_params    autograd and FSDP2 accumulate by themselves
    entry._module_info, ._unsharded_param, .unsharded_accumulated_grad
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def wrap_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Replace `module.forward(*args, **kwargs)` by `wrapper(old_forward, *args, **kwargs)`. Unlike hooks, a wrapper
    can enter a context; unlike a module around `module`, it renames no parameters. Later wrappers enclose earlier ones,
    so recomputation repeats a pass together with its precision. FSDP2 and torch.compile enclose all wrappers.
    """
    module.forward = functools.partial(wrapper, module.forward)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor (itself, not a view like `to_local`), or another tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharded_like(local: Tensor, tensor: DTensor) -> DTensor:
    """Return a DTensor placed and shaped like `tensor`, with `local` as this rank's shard."""
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def materialize_(
    model: nn.Module, parameter_device: torch.device, buffer_device: torch.device, later: Iterable[nn.Module] = ()
) -> None:
    """Move DTensors to `parameter_device`, and other parameters and buffers to `buffer_device`. Meta tensors get memory
    with undefined contents, except parameters of the modules in `later`, which get memory only from `give_memory_`.
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
    """Free the memory of `tensor`, or of this rank's shard. `give_memory_` makes it usable again."""
    local_of(tensor).untyped_storage().resize_(0)


def give_memory_(tensor: Tensor) -> None:
    """Allocate memory for `tensor`, or for this rank's shard, if it has none. The contents are undefined."""
    local = local_of(tensor)
    if local.untyped_storage().size() == 0:
        local.untyped_storage().resize_(local.numel() * local.element_size())


def compile_all_kinds(without_ddp_cuts: bool) -> None:
    """Let torch.compile compile code often, for all kinds of layers; beyond its limit it would run the code eagerly.
    If `without_ddp_cuts`, prevent it from splitting graphs at DDP's buckets, which fails with recomputation.
    """
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.optimize_ddp = not without_ddp_cuts


def recompilation_reasons() -> list[str]:
    """Return, and forget, why torch.compile compiled code again, for those of its last 64 compilations that did."""
    reasons = [each.recompile_reason for each in torch._dynamo.utils.get_compilation_metrics()]
    torch._dynamo.utils.clear_compilation_metrics()
    return [reason for reason in reasons if reason]


def ignore_in_ddp(module: nn.Module, names: list[str]) -> None:
    """Make DDP neither broadcast the parameters `names` of `module` nor reduce their gradients."""
    module._ddp_params_and_buffers_to_ignore = names  # type: ignore[assignment]


def unwrapped_by_torchao(local: Any) -> Tensor:
    """Return the fp32 shard in `local`, torchao's wrapper that casts the shard to fp8 before FSDP gathers it."""
    return local._tensor


def fsdp_entries(unit: Any) -> Iterator[tuple[Tensor, Any]]:
    """Yield each parameter of `unit` that FSDP2 shards, and FSDP2's object for it. Call this only between steps."""
    state = unit._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
        for entry in getattr(group, "fsdp_params", ()):
            if owner := getattr(entry, "_module_info", None):
                yield getattr(owner.module, owner.param_name), entry


def gathered_parameter(entry: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the gathered weight (None before a forward pass) and its fp32 gradient (or None) from FSDP2's `entry`."""
    return getattr(entry, "_unsharded_param", None), getattr(entry, "unsharded_accumulated_grad", None)
