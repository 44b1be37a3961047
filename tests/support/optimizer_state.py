"""Build an optimizer with part of its state in host memory, and compare two trainings bitwise."""

import torch

from llm_fp8.config.options import OptimConfig
from llm_fp8.optim.optimizers import OPTIMIZERS, optimizer_tensors


def master_adamw(parameters, share):
    """Return a MasterAdamW for {name: parameter} that keeps the fraction `share` of its state in host memory."""
    config = OptimConfig(learning_rate=1e-3, weight_decay=0.1, offload_optimizer=share)
    return OPTIMIZERS["adamw_master"].build(parameters.items(), config, False)


def assert_same_training(parameters, optimizer, others, other_optimizer):
    """Check that optimizers and parameters are bitwise equal. One optimizer may lack the state of parameter `idle`."""
    assert all(torch.equal(parameter, others[name]) for name, parameter in parameters.items())
    state, other = (optimizer_tensors(o, p.items()) for o, p in ((optimizer, parameters), (other_optimizer, others)))
    assert {name for name in state.keys() ^ other.keys() if not name.startswith("idle.")} == set()
    for name in state.keys() & other.keys():
        assert state[name].dtype == other[name].dtype and torch.equal(state[name].cpu(), other[name].cpu()), name
    steps, other_steps = ([group["step"] for group in each.param_groups] for each in (optimizer, other_optimizer))
    assert steps == other_steps
