"""Weights and optimizer state of a stopped run, put into another one as a checkpoint does it, bit for bit."""

import json

import torch

from llm_fp8.optim.optimizers import initialize_state, load_optimizer_scalars, optimizer_scalars, optimizer_tensors


def take_over(optimizer, named_parameters, stopped, stopped_parameters):
    """Let `optimizer` and its parameters go on from `stopped` and its own, which have the same names. Its numbers pass
    through JSON.
    """
    saved = optimizer_tensors(stopped, stopped_parameters)
    scalars = json.loads(json.dumps(optimizer_scalars(stopped)))
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
    load_optimizer_scalars(optimizer, scalars)
