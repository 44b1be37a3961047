"""The optimizer's state as plain tensors and numbers, for checkpoints.

`Optimizer.load_state_dict` would cast fp32 moments of bf16 parameters to bf16; tensors by name are never cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from llm_fp8.optim.optimizers import unwrap


def initialize_state(optimizer: Optimizer) -> None:
    """Create the state of every parameter before the first step, if there is none; after `Accelerator.prepare`."""
    optimizer = unwrap(optimizer)
    if hasattr(optimizer, "initialize_state"):  # this project's
        optimizer.initialize_state()
    elif not optimizer.state:
        # As torch's fused AdamW does it in its first step; there is no public way.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def optimizer_tensors(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]]) -> dict[str, Tensor]:
    """Every state tensor under "parameter_name.state_name": the tensors themselves, without copy or cast.

    Tied parameters appear under their first name. The steps of this project's AdamWs are in `optimizer_scalars`.
    """
    optimizer = unwrap(optimizer)
    if bytes_on_host(optimizer):
        optimizer.pipeline.synchronize()  # type: ignore[attr-defined]  # of `OffloadedMasterAdamW`
    state = optimizer.state
    names: dict[Parameter, str] = {}
    for name, parameter in named_parameters:
        names.setdefault(parameter, name)
    return {f"{names[p]}.{key}": value for p in names if p in state for key, value in state[p].items()}


def bytes_on_host(optimizer: Optimizer) -> int:
    """Bytes of state that --offload_optimizer keeps in host memory."""
    return getattr(unwrap(optimizer), "host_bytes", 0)


def optimizer_scalars(optimizer: Optimizer) -> dict[str, Any]:
    """State that is not a tensor, for JSON: this project's AdamWs count steps per group, torch's per parameter."""
    return {"group_steps": [group.get("step") for group in unwrap(optimizer).param_groups]}


def load_optimizer_scalars(optimizer: Optimizer, scalars: Mapping[str, Any]) -> None:
    """Restore what `optimizer_scalars` gave."""
    for group, step in zip(unwrap(optimizer).param_groups, scalars["group_steps"], strict=True):
        if step is not None:
            group["step"] = step
