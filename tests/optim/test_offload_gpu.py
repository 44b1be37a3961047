"""Optimizer state in pinned host memory: training on a GPU is bit-identical, and needs less GPU memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from llm_fp8.optim import offload
from llm_fp8.optim.adamw_master import give_remainder_, remainder_of, split_master
from llm_fp8.optim.optimizers import clip_and_step
from tests.support.optimizer_state import assert_same_training, master_adamw

pytestmark = pytest.mark.gpu

SHAPES = {"embedding": (3001, 1024), "up": (2048, 1023), "down": (1024, 2048), "norm": (1024,), "bias": (7,)}
MIB = 2**20


def make_parameters(shapes=SHAPES):
    generator = torch.Generator("cuda").manual_seed(0)
    parameters = {}
    for name, shape in shapes.items():
        # Weight and remainder come from one number: a weight of zero with a negative remainder would be NaN.
        weight, remainder = split_master(0.02 * torch.randn(shape, generator=generator, device="cuda"))
        parameters[name] = Parameter(weight)
        give_remainder_(parameters[name])
        remainder_of(parameters[name]).copy_(remainder)
    return parameters


def set_gradients(parameters, step):
    generator = torch.Generator("cuda").manual_seed(100 + step)
    for parameter in parameters.values():
        gradient = torch.randn(parameter.shape, generator=generator, device="cuda")
        parameter.grad = (1e-3 * (gradient + 0.3)).bfloat16()


def train(parameters, optimizer, steps):
    for step in steps:
        set_gradients(parameters, step)
        clip_and_step(optimizer, list(parameters.values()), max_norm=0.1)
        optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_offloaded_training_is_bit_identical(share, monkeypatch):
    monkeypatch.setattr(offload, "PIECE_ELEMENTS", 2**20 - 48)  # the last piece of a matrix is shorter
    plain, offloaded = make_parameters(), make_parameters()
    optimizers = master_adamw(plain, 0.0), master_adamw(offloaded, share)
    for steps in (range(1), range(1, 5), range(5, 30)):  # steps of one loop are not synchronised
        train(plain, optimizers[0], steps)
        train(offloaded, optimizers[1], steps)
        assert_same_training(plain, optimizers[0], offloaded, optimizers[1])
    state = optimizers[1].state
    assert all(tensor.is_pinned() for tensor in state[offloaded["embedding"]].values())
    assert all(tensor.is_cuda for tensor in state[offloaded["bias"]].values()) == (share < 1)


def test_offloaded_state_needs_no_gpu_memory():
    """Memory is measured between steps and at the peak of a step. State moves in pieces as large as in real runs."""
    shapes = {f"layer_{i}": (2**13, 2**12) for i in range(8)}
    count = sum(rows * columns for rows, columns in shapes.values())
    at_rest, peaks = {}, {}
    for share in (0.0, 0.5, 1.0):
        parameters = make_parameters(shapes)
        optimizer = master_adamw(parameters, share)
        for step in range(3):
            set_gradients(parameters, step)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            torch.cuda.synchronize()
        at_rest[share], peaks[share] = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        assert getattr(optimizer, "host_bytes", 0) == 8 * share * count
        del parameters, optimizer
        torch.cuda.empty_cache()
    buffers = 8 * offload.PIECE_ELEMENTS * offload.NUM_BUFFERS
    for figures in (at_rest, peaks):
        for share in (0.5, 1.0):
            saved = figures[0.0] - figures[share]
            assert saved == pytest.approx(8 * share * count - buffers, abs=2 * MIB), share
