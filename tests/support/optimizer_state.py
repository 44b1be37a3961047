"""Weights and optimizer state of a stopped run, put into another one as a checkpoint does it, bit for bit."""

import torch

from llm_fp8.optim.optimizers import initialize_state, optimizer_tensors, set_completed_steps


def take_over(optimizer, named_parameters, stopped, stopped_parameters):
    """Let `optimizer` and its parameters go on from `stopped` and its own, which have the same names."""
    saved = optimizer_tensors(stopped, stopped_parameters)
    weights = dict(stopped_parameters)
    with torch.no_grad():
        for name, parameter in named_parameters:
            parameter.copy_(weights[name])
    initialize_state(optimizer)
    targets = optimizer_tensors(optimizer, named_parameters)
    assert targets.keys() == saved.keys()
    with torch.no_grad():
        for name, target in targets.items():
            assert target.dtype == saved[name].dtype
            target.copy_(saved[name])
    set_completed_steps(optimizer, stopped.param_groups[0].get("step", 0))
