"""Saved optimizer state put back into another optimizer, bit for bit."""

import torch

from llm_fp8.optim.state import initialize_state, load_optimizer_scalars, optimizer_tensors


def restore(optimizer, named_parameters, tensors, scalars):
    """What `optimizer_tensors` and `optimizer_scalars` gave, into `optimizer`."""
    initialize_state(optimizer)
    targets = optimizer_tensors(optimizer, named_parameters)
    assert targets.keys() == tensors.keys()
    with torch.no_grad():
        for name, target in targets.items():
            assert target.dtype == tensors[name].dtype
            target.copy_(tensors[name])
    load_optimizer_scalars(optimizer, scalars)
