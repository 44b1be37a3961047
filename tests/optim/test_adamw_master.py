"""The exact split of fp32 master weights, and MasterAdamW compared with AdamW in numpy and in torch."""

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from llm_fp8.optim import adamw
from llm_fp8.optim.adamw import MasterAdamW, coefficients_of, update_with_torch_
from llm_fp8.optim.adamw_master import (
    draw_lower_bits_,
    draw_remainder,
    give_remainder_,
    join_master,
    remainder_of,
    split_master,
)

LOWER_HALVES = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]


def bits(tensor):
    return tensor.detach().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def edge_masters():
    """Return fp32 numbers that combine all 2**16 values of the upper 16 bits with each of `LOWER_HALVES`, which include
    the rounding tie and its neighbours. So both signs, denormals, powers of two, infinities and NaNs occur.
    """
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32).repeat_interleave(len(LOWER_HALVES))
    return ((upper << 16) | torch.tensor(LOWER_HALVES, dtype=torch.int32).repeat(2**16)).view(torch.float32)


def random_masters(count, seed=0):
    """Return `count` fp32 numbers with random bits, so that all exponents are equally likely. NaNs become 0.02."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)
    return torch.where(drawn.isnan(), 0.02, drawn)


@pytest.mark.parametrize("masters", [edge_masters, lambda: random_masters(200_000)], ids=["edges", "random"])
def test_split_keeps_every_bit_and_rounds_to_nearest(masters):
    master = masters()
    weight, remainder = split_master(master)
    assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    numbers = ~master.isnan()
    assert torch.equal(bits(join_master(weight, remainder))[numbers], bits(master)[numbers])
    for joined in (weight, join_master(weight, remainder)):
        assert torch.equal(joined.isnan(), master.isnan())
    tie = (bits(master) & 0xFFFF) == 0x8000
    ordinary = numbers & ~tie
    assert torch.equal(bits(weight)[ordinary], bits(master.bfloat16())[ordinary])
    away = numbers & tie
    assert torch.equal(bits(weight)[away].int(), (bits(master)[away] >> 16) + 1)


class NumpyAdamW:
    """AdamW in numpy, with master weights and moments in fp32. The result of each operation is rounded."""

    def __init__(self, master):
        self.master, self.m, self.v = master.copy(), np.zeros_like(master), np.zeros_like(master)

    def step(self, gradient, number, lr, betas, eps, weight_decay):
        beta1, beta2 = betas
        f = np.float32
        self.m = self.m + (gradient - self.m) * f(1 - beta1)
        self.v = self.v * f(beta2) + gradient * f(1 - beta2) * gradient
        denominator = np.sqrt(self.v) * f(1 / np.sqrt(1 - beta2**number)) + f(eps)
        self.master = self.master * f(1 - lr * weight_decay) - self.m * f(lr / (1 - beta1**number)) / denominator


@pytest.mark.parametrize("spread", ["weights of 0.02", "all magnitudes"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_update_with_fp32_moments_equals_fp32_adamw_bit_for_bit(dtype, spread, monkeypatch):
    monkeypatch.setattr(adamw, "CHUNK_ELEMENTS", 999)
    count = 5000
    generator = torch.Generator().manual_seed(1)
    start = random_masters(count) if spread == "all magnitudes" else 0.02 * torch.randn(count, generator=generator)
    if spread == "all magnitudes":
        special = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 1.0, 0.25 - 2**-10, -(2.0**-126), 1.0 + 2**-8, 1.0 - 2**-9, 3.39e38]
        start[: len(special)] = torch.tensor(special)
    weight, remainder = split_master(start) if dtype == torch.bfloat16 else (start.clone(), None)
    state = {"exp_avg": torch.zeros(count), "exp_avg_sq": torch.zeros(count)}
    if remainder is not None:
        state["remainder"] = remainder
    reference = NumpyAdamW(start.numpy())
    for number in range(1, 31):
        options = {"lr": 1e-3 / number, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        gradient = (1e-3 * torch.randn(count, generator=generator) * 10.0 ** (number % 5 - 2)).to(dtype)
        reference.step(gradient.float().numpy(), number, **options)
        update_with_torch_(weight, gradient, state, None, coefficients_of({"step": number, **options}), (0, 0))
        master = weight if remainder is None else join_master(weight, remainder)
        assert np.array_equal(bits(master).numpy(), reference.master.view(np.int32)), number
    assert np.array_equal(state["exp_avg"].numpy(), reference.m)
    assert np.array_equal(state["exp_avg_sq"].numpy(), reference.v)


def matrix(dtype, seed=0, shape=(64, 96)):
    generator = torch.Generator().manual_seed(seed)
    return Parameter((0.02 * torch.randn(shape, generator=generator)).bfloat16().to(dtype))


def set_gradient(parameter, step):
    generator = torch.Generator().manual_seed(100 + step)
    parameter.grad = (1e-3 * (torch.randn(parameter.shape, generator=generator) + 0.3)).bfloat16().to(parameter.dtype)


def master_of(optimizer, parameter):
    remainder = optimizer.state[parameter].get("remainder")
    return parameter.detach().clone() if remainder is None else join_master(parameter.detach(), remainder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_master_adamw_follows_torchs_adamw(dtype):
    ours, reference = matrix(dtype), matrix(torch.float32)
    start = reference.detach().clone()
    options = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = [MasterAdamW([ours], **options), torch.optim.AdamW([reference], **options)]
    for step in range(50):
        for parameter, optimizer in zip([ours, reference], optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 1e-5 * (1 - step / 50)
            set_gradient(parameter, step)
            optimizer.step()
    master = master_of(optimizers[0], ours)
    change, expected_change = master - start, reference.detach() - start
    # The first moment in bf16 has an error of up to 2^-9 a step. These errors average out over steps.
    assert (change - expected_change).norm() / expected_change.norm() < 2e-3
    if dtype == torch.bfloat16:
        assert torch.equal(ours.detach(), split_master(master)[0])
    state, reference_state = optimizers[0].state[ours], optimizers[1].state[reference]
    torch.testing.assert_close(state["exp_avg_sq"], reference_state["exp_avg_sq"], rtol=1e-5, atol=0)
    torch.testing.assert_close(state["exp_avg"].float(), reference_state["exp_avg"], rtol=2**-6, atol=1e-5)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 0.37), (torch.bfloat16, 0.25)])
def test_gradient_scale_equals_scaling_gradients_and_applies_to_one_step(dtype, factor):
    folded, scaled = matrix(dtype), matrix(dtype)
    optimizers = [MasterAdamW([folded], lr=1e-3), MasterAdamW([scaled], lr=1e-3)]
    for step in range(5):
        for parameter in (folded, scaled):
            set_gradient(parameter, step)
        if step % 2 == 0:
            optimizers[0].gradient_scale = torch.tensor(factor)
            scaled.grad *= torch.tensor(factor)
        before = folded.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(folded.grad, before) and optimizers[0].gradient_scale is None
        assert torch.equal(master_of(optimizers[0], folded), master_of(optimizers[1], scaled))
        assert torch.equal(optimizers[0].state[folded]["exp_avg_sq"], optimizers[1].state[scaled]["exp_avg_sq"])


@pytest.mark.parametrize("shape", [(), (1000, 300)])
def test_drawn_lower_bits_do_not_change_bf16_weights_and_keep_updates_on_average(shape, monkeypatch):
    monkeypatch.setattr("llm_fp8.optim.adamw_master.PART_ELEMENTS", 2**16)
    generator = torch.Generator().manual_seed(0)
    weight = (0.2 * torch.randn(shape, generator=generator)).to(torch.bfloat16)
    weight.view(-1)[:300] = weight.view(-1)[:300] * torch.tensor([0.0, -0.0, 1.0]).repeat(100)[: weight.numel()]
    master = Parameter(weight.float())
    draw_lower_bits_([master], seed=0)
    remainder = draw_remainder(weight, torch.Generator().manual_seed(0))
    for drawn in (master, join_master(weight, remainder)):
        assert torch.equal(split_master(drawn.detach())[0], weight)
    assert not remainder[weight == 0].any()
    if shape:
        update = 1e-4 * torch.randn(shape, generator=generator)
        visible_update = split_master(master.detach() + update)[0].float() - weight.float()
        assert float((update * visible_update).sum() / (update * update).sum()) == pytest.approx(1, abs=0.1)
        visible_update = split_master(weight.float() + update)[0].float() - weight.float()
        assert float((update * visible_update).sum() / (update * update).sum()) < 0.5, "without drawn bits"


def test_remainders_are_drawn_if_none_were_loaded():
    stored = torch.tensor([5, 0, -7], dtype=torch.int16)
    loaded, first, second = (Parameter(torch.tensor([0.1, 0.5, -3.3], dtype=torch.bfloat16)) for _ in range(3))
    give_remainder_(loaded)
    remainder_of(loaded).copy_(stored)
    optimizer = MasterAdamW([loaded, first, second], lr=0.0, seed=1)
    for parameter in (loaded, first, second):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    drawn = [optimizer.state[parameter]["remainder"] for parameter in (loaded, first, second)]
    assert torch.equal(drawn[0], stored)
    assert drawn[1].ne(0).all() and not torch.equal(drawn[1], drawn[2])


def test_drawing_keeps_lower_bits_that_were_loaded():
    loaded = Parameter(torch.tensor([0.1, 0.5, -3.3]))
    draw_lower_bits_([loaded], seed=0)
    assert torch.equal(loaded[[0, 2]], torch.tensor([0.1, -3.3])) and loaded[1] != 0.5
    assert split_master(loaded.detach())[0][1] == 0.5
