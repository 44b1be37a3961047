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

from llm_fp8.optim.adamw_base import GroupedAdamW
from llm_fp8.optim.optimizers import unwrap
from llm_fp8.utils.errors import UserError


def initialize_state(optimizer: Optimizer) -> None:
    """Create the state of every parameter before the first step, so that it can be saved, loaded and counted.

    Call it after `Accelerator.prepare`. It does nothing where there is state already.
    """
    optimizer = unwrap(optimizer)
    if optimizer.state:
        return
    if isinstance(optimizer, GroupedAdamW):
        optimizer.initialize_state()
    else:
        _initialize_by_an_idle_step(optimizer)


def _initialize_by_an_idle_step(optimizer: Optimizer) -> None:
    """Let torch's AdamW create its state: a step with zero gradients at a learning rate of zero moves nothing.

    There is no public way to create it; torch.distributed.checkpoint does this too.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
        optimizer.state[parameter]["step"].zero_()
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate


def optimizer_tensors(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]]) -> dict[str, Tensor]:
    """Every state tensor under "parameter_name.state_name": the tensors themselves, without copy or cast.

    adamw_fp32 has step, exp_avg and exp_avg_sq. adamw_master has exp_avg, exp_avg_sq and, for bf16 parameters,
    remainder; adamw_8bit has exp_avg and exp_avg_sq and, where these are codes, exp_avg_scale and exp_avg_sq_scale; the
    steps of both are in `optimizer_scalars`. Tied parameters appear under their first name.
    """
    optimizer = unwrap(optimizer)
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if id(parameter) in seen or parameter not in optimizer.state:
            continue
        seen.add(id(parameter))
        for state_name, value in optimizer.state[parameter].items():
            tensors[f"{name}.{state_name}"] = value
    return tensors


def load_optimizer_tensors(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]], tensors: Mapping[str, Tensor]
) -> None:
    """Copy saved state into the optimizer, bit for bit, creating the state first where there is none.

    Raises:
        UserError: names, shapes or dtypes are not those of this optimizer; the sentence names the first few.
    """
    initialize_state(optimizer)
    targets = optimizer_tensors(optimizer, named_parameters)
    problems = [f"{name} is missing" for name in targets if name not in tensors]
    problems += [f"{name} is unexpected" for name in tensors if name not in targets]
    for name in targets.keys() & tensors.keys():
        have, want = tensors[name], targets[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            problems.append(f"{name} is {have.dtype} {tuple(have.shape)}, not {want.dtype} {tuple(want.shape)}")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"The saved optimizer state does not fit this optimizer: {'; '.join(problems[:3])}{more}; "
            "resume with the --optimizer and model that the checkpoint was written with."
        )
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])


def optimizer_scalars(optimizer: Optimizer) -> dict[str, Any]:
    """State that is not a tensor, fit for JSON: this project's AdamWs count steps per parameter group, torch's per
    parameter.
    """
    return {"group_steps": [group.get("step") for group in unwrap(optimizer).param_groups]}


def load_optimizer_scalars(optimizer: Optimizer, scalars: Mapping[str, Any]) -> None:
    """Restore what `optimizer_scalars` gave.

    Raises:
        UserError: the number of parameter groups differs.
    """
    groups, steps = unwrap(optimizer).param_groups, scalars["group_steps"]
    if len(groups) != len(steps):
        raise UserError(
            f"The saved optimizer has {len(steps)} parameter groups and this one {len(groups)}; "
            "resume with the --optimizer and model that the checkpoint was written with."
        )
    for group, step in zip(groups, steps, strict=True):
        if step is not None:
            group["step"] = step
