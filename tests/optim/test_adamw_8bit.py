"""EightBitAdamW: codes and steps compared with torchao's functions, stochastic rounding, and sharded updates."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from llm_fp8.optim.adamw import EightBitAdamW
from llm_fp8.optim.adamw_8bit_codes import (
    CODE_BLOCK,
    code_limits,
    code_values,
    decode,
    encode,
    round_stochastically,
    rounding_bits,
    rounding_key,
)
from llm_fp8.utils.torch_internals import local_of, sharded_like

CPU = torch.device("cpu")
SIGNS = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def neighbours(numbers, reach):
    """Return each of `numbers` and the `reach` nearest fp32 numbers on either side."""
    steps = torch.arange(-reach, reach + 1, dtype=torch.int32)
    return (numbers.view(torch.int32)[:, None] + steps).view(torch.float32).flatten()


def dense_numbers(signed):
    """Return fp32 numbers from -1 (0 if not `signed`) to 1. Some are random, of all magnitudes, and some are evenly
    spaced. The others surround each value that a code stands for, and each midpoint between two such values.
    """
    values = code_values(signed)
    middles = (values[1:] + values[:-1]) / 2
    generator = torch.Generator().manual_seed(0)
    magnitudes = 10 ** (-13 * torch.rand(100_000, generator=generator))
    around = [neighbours(values[values != 0], 500), neighbours(middles, 500)]
    numbers = torch.cat([*around, magnitudes, torch.linspace(0, 1, 100_001)])
    numbers = torch.cat([numbers, -numbers]) if signed else numbers
    return numbers[(numbers <= 1) & (numbers >= (-1 if signed else 0))]


@SIGNS
def test_values_and_codes_equal_those_of_torchao(signed):
    torchao = pytest.importorskip("torchao.optim.quant_utils")
    values = torch.tensor(torchao.create_dynamic_map(signed))
    assert torch.equal(code_values(signed), values)
    numbers = dense_numbers(signed)
    codes = torch.bucketize(numbers, code_limits(values)[1:], right=True)
    assert torch.equal(codes.to(torch.uint8), torchao.quantize_8bit_with_qmap(numbers, values))
    assert len(codes.unique()) == 256


@SIGNS
def test_encoded_and_decoded_blocks_equal_those_of_torchao(signed):
    torchao = pytest.importorskip("torchao.optim.quant_utils")
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(4000, CODE_BLOCK, generator=generator)
    numbers *= 10 ** torch.empty(4000, 1).uniform_(-9, 2, generator=generator)
    numbers = (numbers if signed else numbers.square()).view(-1)
    numbers[: 3 * CODE_BLOCK] = 0
    numbers[3 * CODE_BLOCK : 4 * CODE_BLOCK] *= 1e-30
    codes, scale = encode(numbers, signed)
    scaled, torchao_scale = torchao.scale_tensor(numbers, CODE_BLOCK)
    assert codes.dtype == torch.uint8 and torch.equal(scale, torchao_scale)
    torchao_codes = torchao.quantize_8bit_with_qmap(scaled, code_values(signed))
    assert (codes.int() - torchao_codes.int()).abs().max() <= 1, "1 / scale may round another way than the quotient"
    assert (codes != torchao_codes).float().mean() < 1e-5
    decoded, reference = decode(codes, scale, signed), torchao.dequant_with_qmap(codes, code_values(signed), scale)
    not_zero = reference != 0
    assert torch.equal(decoded[not_zero], reference[not_zero])
    if not signed:  # decoded as a positive number, because AdamW divides by its root
        largest = code_limits(code_values(False))[1] * scale.repeat_interleave(CODE_BLOCK)[~not_zero]
        assert torch.equal(decoded[~not_zero], largest) and bool((numbers[~not_zero] <= largest * 1.0001).all())


def test_random_bits_follow_the_documented_hash():
    """The expected hash is computed in numpy's uint32, which wraps around. One range does not start at 0."""
    first, second = rounding_key(42, 3, 5)
    with np.errstate(over="ignore"):
        x = np.arange(5000, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.array(first, np.int32).astype(np.uint32)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15)) ^ np.array(second, np.int32).astype(np.uint32)) * np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    expected = np.stack([x & np.uint32(0xFFFF), x >> np.uint32(16)], axis=1).reshape(-1)
    assert np.array_equal(rounding_bits((first, second), 0, 10_000, CPU).numpy(), expected)
    assert np.array_equal(rounding_bits((first, second), 4_000, 777, CPU).numpy(), expected[4_000:4_777])


def test_rounding_keeps_bf16_numbers_nan_and_infinity():
    numbers = torch.tensor([0.0, -0.0, 1.0, -0.15625, torch.inf, -torch.inf])
    highest = torch.full((6,), 0xFFFF, dtype=torch.int32)
    assert torch.equal(round_stochastically(numbers, highest).float().view(torch.int32), numbers.view(torch.int32))
    nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    assert round_stochastically(nans, highest[:3]).isnan().all()


OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = {"codes": (64, 128), "odd": (127, 65), "bias": (300,)}


def random_tensor(shape, seed, scale):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(dtype=torch.bfloat16, **options):
    parameters = {name: Parameter(random_tensor(shape, 0, 0.02).to(dtype)) for name, shape in SHAPES.items()}
    return parameters, EightBitAdamW(parameters.values(), **{**OPTIONS, **options})


def set_gradients(parameters, step):
    for number, parameter in enumerate(parameters.values()):
        parameter.grad = (random_tensor(parameter.shape, 100 * step + number, 1e-3) + 3e-4).to(parameter.dtype)


def train(parameters, optimizer, steps):
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()


@pytest.mark.slow
def test_step_equals_that_of_torchao():
    """The expected moments, scales and unrounded weight of the fourth step are computed with torchao's functions."""
    adam = pytest.importorskip("torchao.optim.adam")
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    parameters, optimizer = make()
    train(parameters, optimizer, range(3))
    weight, state = parameters["codes"], optimizer.state[parameters["codes"]]
    moments = []
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        codes, scale = state[name].clone(), state[f"{name}_scale"].clone()
        moments.append(subclass.OptimState8bit(codes, scale, code_values(signed), signed))
    exact = weight.detach().float()
    set_gradients(parameters, 3)
    adam.single_param_adam(
        exact, weight.grad, torch.tensor(4.0), *moments, None, torch.tensor(OPTIONS["lr"]), *OPTIONS["betas"],
        OPTIONS["weight_decay"], OPTIONS["eps"], True, False
    )  # fmt: skip
    optimizer.step()

    for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        torch.testing.assert_close(state[f"{name}_scale"], moment.scale, rtol=1e-6, atol=0)
        difference = (state[name].int() - moment.codes.int()).abs()
        assert difference.max() <= 1 and (difference != 0).float().mean() < 1e-3, name
    # The weight is one of the two bf16 neighbours of torchao's fp32 number, which may differ by fp32's rounding.
    below = (exact.view(torch.int32) & ~0xFFFF).view(torch.float32)
    ulps = (weight.detach().float() - below).abs() / (2.0 ** (exact.abs().log2().floor() - 7))
    assert ((ulps == 0) | (ulps == 1)).float().mean() > 0.999 and ulps.max() <= 2
    random = rounding_bits(rounding_key(0, 4, 0), 0, weight.numel(), CPU).view(weight.shape)
    away = random + (exact.view(torch.int32) & 0xFFFF)
    assert ((away >= 0x10000) == (ulps > 0.5)).float().mean() > 0.999


def test_rarely_updated_rows_move_about_as_far_as_under_fp32_adamw():
    """Some rows are rarely updated, as in an embedding. Values that share a scale have tiny or large gradients."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** torch.empty(64, 128).uniform_(-6, 0, generator=generator)
    frequency = torch.rand(64, 1, generator=generator) ** 3
    weights = [Parameter(torch.zeros(64, 128)) for _ in range(2)]
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    optimizers = [EightBitAdamW(weights[:1], **options), torch.optim.AdamW(weights[1:], **options)]
    largest_steps = [0.0, 0.0]
    for _ in range(300):
        is_updated = torch.rand(64, 1, generator=generator) < frequency
        gradient = is_updated * size * torch.randn(64, 128, generator=generator)
        for number, (weight, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
            before = weight.detach().clone()
            weight.grad = gradient.clone()
            optimizer.step()
            largest_steps[number] = max(largest_steps[number], float((weight.detach() - before).abs().max()) / 1e-3)
    assert largest_steps[0] < 1.5 * largest_steps[1] < 15


@pytest.mark.slow
def test_rounding_is_the_same_on_all_ranks_and_depends_on_the_seed():
    """Rounding neither uses nor advances torch's generator, so replicas stay equal."""
    results = []
    for generator_seed, seed in ((1, 0), (2, 0), (2, 9)):
        torch.manual_seed(generator_seed)
        before = torch.get_rng_state()
        parameters, optimizer = make(seed=seed)
        train(parameters, optimizer, range(4))
        assert torch.equal(torch.get_rng_state(), before)
        results.append(parameters)
    assert all(torch.equal(results[0][name], results[1][name]) for name in SHAPES)
    assert not torch.equal(results[0]["codes"], results[2]["codes"])


@pytest.mark.parametrize("shape", [(6, 3, 256), (9, 512), (128, 96)])
def test_shard_is_updated_as_the_rows_of_the_whole(shape):
    """The shard belongs to the second of two ranks. Moments have 8 bits only if each row consists of whole blocks."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        first = -(-shape[0] // 2)
        whole = Parameter(random_tensor(shape, 0, 0.02))
        local = whole.detach()[first:].clone()
        shard = Parameter(
            DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        )
        optimizers = [EightBitAdamW([parameter], **OPTIONS) for parameter in (whole, shard)]
        for step in range(3):
            whole.grad = random_tensor(shape, step + 1, 1e-2)
            shard.grad = sharded_like(whole.grad[first:].clone(), shard.data)
            for optimizer in optimizers:
                optimizer.step()
        encoded = shape[-1] % 256 == 0
        state = {name: local_of(tensor) for name, tensor in optimizers[1].state[shard].items()}
        assert ("exp_avg_scale" in state) == encoded and all(tensor.is_contiguous() for tensor in state.values())
        torch.testing.assert_close(local_of(shard), whole.detach()[first:], rtol=0, atol=0 if encoded else 2e-4)
    finally:
        dist.destroy_process_group()
