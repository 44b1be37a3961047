"""Optimizer state in host memory: training is bit-identical, and the largest parameters are offloaded first."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from llm_fp8.optim import offload
from llm_fp8.optim.adamw import MasterAdamW
from llm_fp8.optim.adamw_master import give_remainder_, remainder_of
from llm_fp8.optim.offload import OffloadedMasterAdamW, largest_first
from llm_fp8.optim.optimizers import bytes_on_host, clip_and_step
from tests.support.optimizer_state import assert_same_training, master_adamw

pytestmark = pytest.mark.slow

SHAPES = {"embedding": (64, 16), "head": (64, 16), "up": (48, 16), "down": (16, 47), "norm": (16,), "idle": (30, 16)}
"""No matrix is a whole number of pieces of 100 elements. `idle` never has a gradient. `head` is the embedding."""
NUM_ELEMENTS = 64 * 16 + 48 * 16 + 16 * 47 + 16 + 30 * 16


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(offload, "PIECE_ELEMENTS", 100)


def make_parameters(dtype=torch.bfloat16, remainders=False):
    generator = torch.Generator().manual_seed(0)
    numbers = {name: 0.02 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    parameters = {name: Parameter(tensor.to(dtype)) for name, tensor in numbers.items()}
    parameters["head"] = parameters["embedding"]
    for name in ("embedding", "norm") if remainders else ():
        give_remainder_(parameters[name])
        remainder_of(parameters[name]).copy_(torch.randint(-(2**15), 2**15, SHAPES[name], generator=generator))
    return parameters


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(100 + step)
    for name, parameter in parameters.items():
        if name != "idle":
            gradient = (1e-3 * (torch.randn(SHAPES[name], generator=generator) + 0.3)).to(parameter.dtype)
            # The gradient of `up` is transposed in memory. `down` has none in step 2.
            parameter.grad = gradient.t().contiguous().t() if name == "up" else gradient
    if step == 2:
        parameters["down"].grad = None


def train(parameters, optimizer, steps):
    for step in steps:
        set_gradients(parameters, step)
        optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
        clip_and_step(optimizer, list(parameters.values()), max_norm=0.01)


@pytest.mark.parametrize(
    ("dtype", "remainders"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)],
    ids=["bf16", "remainders", "fp32"],
)
@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_offloaded_training_is_bit_identical(share, remainders, dtype):
    plain, offloaded = make_parameters(dtype, remainders), make_parameters(dtype, remainders)
    optimizers = master_adamw(plain, 0.0), master_adamw(offloaded, share)
    assert [type(optimizer) for optimizer in optimizers] == [MasterAdamW, OffloadedMasterAdamW]
    for steps in ((0,), (1, 2, 3), (4, 5)):
        train(plain, optimizers[0], steps)
        train(offloaded, optimizers[1], steps)
        assert_same_training(plain, optimizers[0], offloaded, optimizers[1])
    assert not torch.equal(plain["up"], make_parameters(dtype)["up"]), "the weights must change"


def test_largest_parameters_are_offloaded_whole():
    parameters = make_parameters()
    in_order = list(dict.fromkeys(parameters.values()))
    by_size = [parameters[name] for name in ("embedding", "up", "down", "idle", "norm")]
    for share, count in ((1e-9, 1), (1024 / NUM_ELEMENTS, 1), (0.34, 2), (0.99, 4), (1.0, 5)):
        assert [id(p) for p in largest_first(in_order, share)] == [id(p) for p in by_size[:count]], share
        optimizer = master_adamw(parameters, share)
        num_offloaded = sum(parameter.numel() for parameter in by_size[:count])
        assert optimizer.host_bytes == bytes_on_host(optimizer) == 8 * num_offloaded >= 8 * share * NUM_ELEMENTS
    assert bytes_on_host(master_adamw(parameters, 0.0)) == 0
