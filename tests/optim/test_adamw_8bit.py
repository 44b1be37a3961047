"""Codes and steps of EightBitAdamW against torchao's own functions; stochastic rounding; what a run and its
resumption give.
"""

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from llm_fp8.config.options import OptimConfig
from llm_fp8.optim import adamw_8bit as eight_bit_adamw
from llm_fp8.optim.adamw_8bit import (
    EightBitAdamW,
    round_stochastically,
    rounding_bits,
    rounding_key,
    update_with_torch_,
)
from llm_fp8.optim.adamw_8bit_codes import CODE_BLOCK, code_limits, code_tables, code_values, decode, encode
from llm_fp8.optim.adamw_base import Coefficients
from llm_fp8.optim.optimizers import build_optimizer
from llm_fp8.optim.schedule import build_scheduler
from llm_fp8.optim.state import optimizer_tensors
from tests.support.optimizer_state import take_over

CPU = torch.device("cpu")
SIGNS = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def neighbours(numbers, reach):
    """Each number and the `reach` fp32 numbers on either side of it."""
    return (
        (numbers.view(torch.int32)[:, None] + torch.arange(-reach, reach + 1, dtype=torch.int32))
        .view(torch.float32)
        .flatten()
    )


def dense_numbers(signed):
    """Numbers from -1 or 0 to 1: all around every value and every middle, all magnitudes, and evenly spaced."""
    values = code_values(signed)
    middles = (values[1:] + values[:-1]) / 2
    generator = torch.Generator().manual_seed(0)
    magnitudes = 10 ** (-13 * torch.rand(100_000, generator=generator))
    found = torch.cat(
        [neighbours(values[values != 0], 500), neighbours(middles, 500), magnitudes, torch.linspace(0, 1, 100_001)]
    )
    found = torch.cat([found, -found]) if signed else found
    return found[(found <= 1) & (found >= (-1 if signed else 0))]


# --- codes ------------------------------------------------------------------------------------------------------------


@SIGNS
def test_values_and_codes_are_torchaos(signed):
    torchao = pytest.importorskip("torchao.optim.quant_utils")
    values = torch.tensor(torchao.create_dynamic_map(signed))
    assert torch.equal(code_values(signed), values)
    numbers = dense_numbers(signed)
    codes = torch.bucketize(numbers, code_limits(values)[1:], right=True)
    assert torch.equal(codes.to(torch.uint8), torchao.quantize_8bit_with_qmap(numbers, values))
    assert len(codes.unique()) == 256


@SIGNS
def test_blocks_are_encoded_and_decoded_as_torchao_does(signed):
    torchao = pytest.importorskip("torchao.optim.quant_utils")
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(4000, CODE_BLOCK, generator=generator) * 10 ** torch.empty(4000, 1).uniform_(
        -9, 2, generator=generator
    )
    numbers = (numbers if signed else numbers.square()).view(-1)
    numbers[: 3 * CODE_BLOCK] = 0
    numbers[3 * CODE_BLOCK : 4 * CODE_BLOCK] *= 1e-30
    codes, scale = encode(numbers, signed)
    scaled, its_scale = torchao.scale_tensor(numbers, CODE_BLOCK)
    assert codes.dtype == torch.uint8 and torch.equal(scale, its_scale)
    its_codes = torchao.quantize_8bit_with_qmap(scaled, code_values(signed))
    assert (codes.int() - its_codes.int()).abs().max() <= 1, "1 / scale may round another way than the quotient"
    assert (codes != its_codes).float().mean() < 1e-5
    decoded, theirs = decode(codes, scale, signed), torchao.dequant_with_qmap(codes, code_values(signed), scale)
    not_zero = theirs != 0
    assert torch.equal(decoded[not_zero], theirs[not_zero])
    if not signed:  # not zero, which AdamW would divide by
        largest = code_limits(code_values(False))[1] * scale.repeat_interleave(CODE_BLOCK)[~not_zero]
        assert torch.equal(decoded[~not_zero], largest) and bool((numbers[~not_zero] <= largest * 1.0001).all())


@SIGNS
@pytest.mark.parametrize("shift", [0.3, 0.5, 0.7])
def test_seven_lines_foresee_every_code(shift, signed):
    """What the GPU's kernel looks up: the second of two codes that are possible. In fp64; the kernel's shift is 0.5,
    and fp32 errs by far less than 0.2.
    """
    numbers = dense_numbers(signed).double()
    finest = 1 if signed else 2
    lines = [finest * 2**i * (numbers.abs() * 10 ** (6 - i) / 0.9 + 8 / 9) - (finest - 1) for i in range(7)]
    before = torch.stack(lines).amin(0).sub(shift).floor().long()
    looked_up = torch.where(numbers < 0, 127 - before, 128 + before) if signed else 1 + before
    codes = torch.bucketize(numbers.float(), code_tables(CPU)[1 if signed else 3][1:], right=True)
    assert ((codes == looked_up) | (codes == looked_up - 1)).all()
    assert looked_up.min() >= 0 and looked_up.max() <= 255


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_spoils_its_block_alone(value):
    numbers = torch.linspace(-1, 1, 3 * CODE_BLOCK)
    numbers[CODE_BLOCK + 5] = value
    decoded = decode(*encode(numbers, True), True).view(3, -1)
    assert not decoded[1].isfinite().any() and decoded[[0, 2]].isfinite().all()


# --- stochastic rounding ----------------------------------------------------------------------------------------------


def test_random_bits_are_those_of_the_documented_hash():
    """In numpy, whose uint32 wraps; counted on from any even element."""
    first, second = rounding_key(42, 3, 5)
    with np.errstate(over="ignore"):
        x = np.arange(5000, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.array(first, np.int32).astype(np.uint32)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15)) ^ np.array(second, np.int32).astype(np.uint32)) * np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    want = np.stack([x & np.uint32(0xFFFF), x >> np.uint32(16)], axis=1).reshape(-1)
    assert np.array_equal(rounding_bits((first, second), 0, 10_000, CPU).numpy(), want)
    assert np.array_equal(rounding_bits((first, second), 4_000, 777, CPU).numpy(), want[4_000:4_777])


def test_random_bits_are_even_and_of_every_seed_step_and_parameter():
    count = 2**20
    drawn = {
        place: rounding_bits(rounding_key(*place), 0, count, CPU)
        for place in [(0, 1, 0), (1, 1, 0), (0, 2, 0), (0, 1, 1)]
    }
    for bits in drawn.values():
        assert 0 <= bits.min() and bits.max() < 2**16
        counts = torch.bincount(bits >> 8, minlength=256).double()
        chi_square = ((counts - count / 256).square() / (count / 256)).sum()
        assert 150 < chi_square < 380, "255 give or take 5.5 standard deviations of 22.6"
        uniform = bits.double() / 2**16 - 0.5
        for apart in (1, 2, 256, 4096):
            assert abs((uniform[apart:] * uniform[:-apart]).mean() * 12) < 5 / count**0.5
    uniforms = torch.stack(list(drawn.values())).double() / 2**16 - 0.5
    correlations = uniforms @ uniforms.T / count * 12
    assert (correlations - torch.eye(4)).abs().max() < 5e-3


@pytest.mark.slow
def test_rounding_takes_a_neighbour_and_is_right_on_average():
    generator = torch.Generator().manual_seed(2)
    numbers = 0.02 * torch.randn(64, generator=generator)
    below = (numbers.view(torch.int32) & ~0xFFFF).view(torch.float32)  # towards zero
    above = ((numbers.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    draws = 20_000
    rounded = torch.stack(
        [
            round_stochastically(numbers, rounding_bits(rounding_key(0, step, 0), 0, 64, CPU)).float()
            for step in range(draws)
        ]
    )
    assert ((rounded == below) | (rounded == above)).all()
    spacing = (above - below).abs()
    assert ((rounded.mean(0) - numbers).abs() / spacing).max() < 5 * 0.5 / draws**0.5


def test_what_bf16_holds_is_not_rounded_and_nan_and_infinity_stay():
    numbers = torch.tensor([0.0, -0.0, 1.0, -0.15625, torch.inf, -torch.inf])
    highest = torch.full((6,), 0xFFFF, dtype=torch.int32)
    assert torch.equal(round_stochastically(numbers, highest).float().view(torch.int32), numbers.view(torch.int32))
    of_gpu_and_cpu = torch.tensor([0x7FFFFFFF, 0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    assert round_stochastically(of_gpu_and_cpu, highest[:3]).isnan().all()


# --- steps ------------------------------------------------------------------------------------------------------------

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = {"codes": (64, 128), "odd": (127, 65), "bias": (300,)}


def drawn(shape, seed, scale):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(dtype=torch.bfloat16, **options):
    parameters = {name: Parameter(drawn(shape, 0, 0.02).to(dtype)) for name, shape in SHAPES.items()}
    return parameters, EightBitAdamW(parameters.values(), **{**OPTIONS, **options})


def set_gradients(parameters, step):
    for number, parameter in enumerate(parameters.values()):
        parameter.grad = (drawn(parameter.shape, 100 * step + number, 1e-3) + 3e-4).to(parameter.dtype)


def train(parameters, optimizer, steps):
    for step in steps:
        set_gradients(parameters, step)
        optimizer.step()


@pytest.mark.slow
def test_a_step_is_torchaos():
    """Moments, scales and the number that is rounded, by torchao's functions, in the middle of a run."""
    adam = pytest.importorskip("torchao.optim.adam")
    quant_utils = pytest.importorskip("torchao.optim.quant_utils")
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    parameters, optimizer = make()
    train(parameters, optimizer, range(3))
    weight, state = parameters["codes"], optimizer.state[parameters["codes"]]
    theirs = []
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        codes, scale = state[name].clone(), state[f"{name}_scale"].clone()
        theirs.append(subclass.OptimState8bit(codes, scale, code_values(signed), signed))
    exact = weight.detach().float()
    set_gradients(parameters, 3)
    adam.single_param_adam(
        exact, weight.grad, torch.tensor(4.0), *theirs, None, torch.tensor(OPTIONS["lr"]), *OPTIONS["betas"],
        OPTIONS["weight_decay"], OPTIONS["eps"], True, False
    )  # fmt: skip
    optimizer.step()

    for name, their in zip(("exp_avg", "exp_avg_sq"), theirs, strict=True):
        torch.testing.assert_close(state[f"{name}_scale"], their.scale, rtol=1e-6, atol=0)
        apart = (state[name].int() - their.codes.int()).abs()
        assert apart.max() <= 1 and (apart != 0).float().mean() < 1e-3, name
    # One of both neighbours in bf16 of a number that differs from torchao's by fp32's rounding.
    below = (exact.view(torch.int32) & ~0xFFFF).view(torch.float32)
    ulps = (weight.detach().float() - below).abs() / (2.0 ** (exact.abs().log2().floor() - 7))
    assert ((ulps == 0) | (ulps == 1)).float().mean() > 0.999 and ulps.max() <= 2
    away = rounding_bits(rounding_key(0, 4, 0), 0, weight.numel(), CPU).view(weight.shape) + (
        exact.view(torch.int32) & 0xFFFF
    )
    assert ((away >= 0x10000) == (ulps > 0.5)).float().mean() > 0.999
    # torchao's own rounding goes away from zero as often, of the same number.
    torch.manual_seed(0)
    their_share = (quant_utils._fp32_to_bf16_sr(exact).float() != below).float().mean().item()
    assert (ulps > 0.5).float().mean().item() == pytest.approx(their_share, abs=0.04)


def test_small_tensors_and_those_that_are_no_whole_blocks_keep_fp32_moments():
    parameters, optimizer = make()
    optimizer.initialize_state()
    dtypes = {
        name: {part: tensor.dtype for part, tensor in optimizer.state[p].items()} for name, p in parameters.items()
    }
    plain = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    assert dtypes["odd"] == dtypes["bias"] == plain
    codes = {"exp_avg": torch.uint8, "exp_avg_sq": torch.uint8}
    assert dtypes["codes"] == {**codes, "exp_avg_scale": torch.float32, "exp_avg_sq_scale": torch.float32}
    state = optimizer.state[parameters["codes"]]
    assert state["exp_avg"].shape == (64, 128) and state["exp_avg_scale"].shape == (32,)


@pytest.mark.slow
def test_fp32_parameters_are_not_rounded_to_bf16():
    """With plain moments that is fp32 AdamW."""
    parameters, optimizer = make(torch.float32)
    others = {name: Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    reference = torch.optim.AdamW(others.values(), **OPTIONS)
    train(parameters, optimizer, range(5))
    train(others, reference, range(5))
    for name in ("odd", "bias"):
        torch.testing.assert_close(parameters[name], others[name], rtol=1e-5, atol=1e-7)
    assert (parameters["codes"] - others["codes"]).abs().max() < 5e-3 and parameters["codes"].dtype == torch.float32


@pytest.mark.slow
def test_chunks_do_not_show(monkeypatch):
    whole, optimizer = make()
    train(whole, optimizer, range(3))
    monkeypatch.setattr(eight_bit_adamw, "CHUNK_ELEMENTS", 2 * CODE_BLOCK)
    in_parts, other = make()
    train(in_parts, other, range(3))
    assert all(torch.equal(whole[name], in_parts[name]) for name in whole)
    pairs = zip(
        optimizer_tensors(optimizer, whole.items()).items(),
        optimizer_tensors(other, in_parts.items()).values(),
        strict=True,
    )
    assert all(torch.equal(tensor, its) for (_, tensor), its in pairs)


@pytest.mark.slow
def test_it_learns_as_fp32_adamw_does():
    """A regression with noise from weights that start at zero: losses end near each other, far below the start."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(64, 128, generator=generator)
    inputs = [torch.randn(256, 128, generator=generator) for _ in range(200)]
    noise = [0.1 * torch.randn(256, 64, generator=generator) for _ in range(200)]
    losses = {}
    for name, dtype in (("ours", torch.bfloat16), ("fp32", torch.float32)):
        weight = Parameter(torch.zeros(64, 128, dtype=dtype))
        options = {"lr": 2e-2, "betas": (0.9, 0.95)}
        optimizer = (
            EightBitAdamW([weight], **options)
            if name == "ours"
            else torch.optim.AdamW([weight], weight_decay=0, **options)
        )
        for x, error in zip(inputs, noise, strict=True):
            loss = (x @ weight.float().T - x @ target.T - error).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[name] = loss.item()
    assert losses["ours"] < 0.1 and losses["ours"] == pytest.approx(losses["fp32"], abs=0.05), losses


def test_rows_that_are_seldom_seen_move_as_under_fp32_adamw():
    """An embedding's rows in one block, some of them with small gradients now and then beside large ones."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** torch.empty(64, 128).uniform_(-6, 0, generator=generator)
    seen = torch.rand(64, 1, generator=generator) ** 3
    weights = [Parameter(torch.zeros(64, 128)) for _ in range(2)]
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    optimizers = [EightBitAdamW(weights[:1], **options), torch.optim.AdamW(weights[1:], **options)]
    farthest = [0.0, 0.0]
    for _ in range(300):
        drawn_now = (torch.rand(64, 1, generator=generator) < seen) * size
        gradient = drawn_now * torch.randn(64, 128, generator=generator)
        for number, (weight, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
            before = weight.detach().clone()
            weight.grad = gradient.clone()
            optimizer.step()
            farthest[number] = max(farthest[number], float((weight.detach() - before).abs().max()) / 1e-3)
    assert farthest[0] < 1.5 * farthest[1] < 15


def test_updates_below_half_a_spacing_are_not_lost():
    weight = Parameter(torch.full((64, 128), 0.02).bfloat16())
    optimizer = build_optimizer(OptimConfig(learning_rate=1e-5, weight_decay=0.0), "adamw_8bit", [("weight", weight)])
    start = weight.detach().float().mean()
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (start - weight.detach().float().mean()).item() == pytest.approx(1e-3, rel=0.02)


@pytest.mark.slow
def test_all_ranks_round_alike_and_other_seeds_otherwise():
    """No generator is asked, so replicas stay equal, and none is moved on."""
    ends = []
    for generator_seed, seed in ((1, 0), (2, 0), (2, 9)):
        torch.manual_seed(generator_seed)
        before = torch.get_rng_state()
        parameters, optimizer = make(seed=seed)
        train(parameters, optimizer, range(4))
        assert torch.equal(torch.get_rng_state(), before)
        ends.append(parameters)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in SHAPES)
    assert not torch.equal(ends[0]["codes"], ends[2]["codes"])


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit():
    config = OptimConfig(learning_rate=1e-3, lr_scheduler="linear", seed=3)

    def start():
        parameters, _ = make()
        return parameters, build_optimizer(config, "adamw_8bit", parameters.items())

    def run(parameters, optimizer, steps):
        scheduler = build_scheduler(optimizer, config, total_steps=40, completed_steps=steps.start)
        for step in steps:
            train(parameters, optimizer, [step])
            scheduler.step()

    whole, whole_optimizer = start()
    run(whole, whole_optimizer, range(5))
    resumed, resumed_optimizer = start()
    take_over(resumed_optimizer, resumed.items(), whole_optimizer, whole.items())
    run(whole, whole_optimizer, range(5, 10))
    run(resumed, resumed_optimizer, range(5, 10))
    assert all(torch.equal(whole[name], resumed[name]) for name in SHAPES)
    ends = [optimizer_tensors(o, p.items()) for o, p in ((whole_optimizer, whole), (resumed_optimizer, resumed))]
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 0.37), (torch.bfloat16, 0.25)])
def test_gradient_scale_is_scaling_beforehand_and_serves_one_step(dtype, factor):
    (folded, optimizer), (scaled, other) = make(dtype), make(dtype)
    for step in range(4):
        set_gradients(folded, step)
        set_gradients(scaled, step)
        if step % 2 == 0:
            optimizer.gradient_scale = torch.tensor(factor)
            for parameter in scaled.values():
                parameter.grad *= torch.tensor(factor)
        before = folded["codes"].grad.clone()
        optimizer.step()
        other.step()
        assert torch.equal(folded["codes"].grad, before) and optimizer.gradient_scale is None
        assert all(torch.equal(folded[name], scaled[name]) for name in SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_shows_in_its_weight_and_then_in_its_block(value):
    (parameters, optimizer), (clean, other) = make(), make()
    set_gradients(parameters, 0)
    set_gradients(clean, 0)
    parameters["codes"].grad[2, 4] = value  # a block is two rows
    optimizer.step()
    other.step()
    others = torch.ones(64, 128, dtype=torch.bool)
    others[2, 4] = False
    assert parameters["codes"][2, 4].isnan() and torch.equal(parameters["codes"][others], clean["codes"][others])
    train(parameters, optimizer, [1])
    train(clean, other, [1])
    others[2:4] = False
    assert parameters["codes"][2:4].isnan().all() and torch.equal(parameters["codes"][others], clean["codes"][others])


def test_an_update_counts_its_steps_as_documented():
    """`update_with_torch_` alone, with the key of the step, is what the optimizer does."""
    parameters, optimizer = make(seed=5)
    weight = parameters["odd"].detach().clone()
    state = {"exp_avg": torch.zeros(weight.shape), "exp_avg_sq": torch.zeros(weight.shape)}
    for step in range(3):
        set_gradients(parameters, step)
        coefficients = Coefficients.of_step(step + 1, **OPTIONS)
        update_with_torch_(weight, parameters["odd"].grad, state, None, coefficients, rounding_key(5, step + 1, 1))
        optimizer.step()
    assert torch.equal(weight, parameters["odd"])


def test_sharded_parameters_are_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        parameter = Parameter(torch.distributed.tensor.distribute_tensor(torch.zeros(64, 128), mesh))
        with pytest.raises(ValueError, match="takes unsharded parameters, and one of shape"):
            EightBitAdamW([parameter]).initialize_state()
    finally:
        torch.distributed.destroy_process_group()
