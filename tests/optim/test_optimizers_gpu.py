"""The Triton kernels of MasterAdamW and EightBitAdamW against their torch implementations and fp32 AdamW; saved state;
memory; speed.

python -m pytest tests/optim/test_optimizers_gpu.py -s      (-s shows the kernels' speed)
"""

import pytest
import torch

from llm_fp8.config.options import OptimConfig
from llm_fp8.optim import adamw_8bit as eight_bit_adamw
from llm_fp8.optim.adamw_8bit_codes import CODE_BLOCK, code_tables, encode
from llm_fp8.optim.adamw_base import Coefficients
from llm_fp8.optim.adamw_master import join_master, split_master, update_with_torch_
from llm_fp8.optim.optimizers import build_optimizer, bytes_per_parameter, clip_and_step
from llm_fp8.optim.schedule import build_scheduler
from llm_fp8.optim.state import initialize_state, optimizer_tensors
from tests.support.optimizer_state import take_over

pytestmark = pytest.mark.gpu

CONFIG = OptimConfig(learning_rate=1e-5, weight_decay=0.1, adam_beta2=0.95)
SHAPES = {"embedding": (1000, 64), "linear": (128, 257), "bias": (257,), "norm": (64,)}
"""The embedding has 8-bit moments under adamw_8bit, the others have not."""
TRAFFIC_BYTES_PER_ELEMENT = 22
"""Reads: weight, remainder, gradient, m 2 bytes each, v 4. Writes: weight, remainder, m 2 each, v 4."""


def make_parameters(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    return {
        name: torch.nn.Parameter((0.02 * torch.randn(shape, generator=generator, device="cuda")).bfloat16().to(dtype))
        for name, shape in SHAPES.items()
    }


def set_gradients(parameters, step):
    generator = torch.Generator("cuda").manual_seed(100 + step)
    for parameter in parameters.values():
        gradient = 1e-3 * (torch.randn(parameter.shape, generator=generator, device="cuda") + 0.3)
        parameter.grad = gradient.bfloat16().to(parameter.dtype)


def coefficients_of(step):
    return Coefficients.of_step(step, lr=1e-3 / step, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def make_tensors(shape, dtype, any_magnitude=False):
    """weight, remainder, gradient, exp_avg, exp_avg_sq in the middle of a run, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal():
        return torch.randn(shape, generator=generator, device="cuda")

    if any_magnitude:
        drawn = (
            torch.randint(-(2**31), 2**31, shape, generator=generator, device="cuda")
            .to(torch.int32)
            .view(torch.float32)
        )
        master = torch.where(drawn.isnan(), 0.02, drawn)
    else:
        master = 0.02 * normal()
    weight, remainder = split_master(master) if dtype == torch.bfloat16 else (master, None)
    return [weight, remainder, (1e-3 * normal()).to(dtype), (1e-3 * normal()).bfloat16(), 1e-6 * normal().square()]


def update_by_torch(weight, remainder, gradient, exp_avg, exp_avg_sq, scale, coefficients, update_=update_with_torch_):
    state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if remainder is not None:
        state["remainder"] = remainder
    update_(weight, gradient, state, scale, coefficients)


def update_by_kernel(*tensors_and_coefficients):
    from llm_fp8.optim.adamw_triton import update_master_

    update_by_torch(*tensors_and_coefficients, update_=update_master_)


def assert_same_bits(tensors, others):
    for name, one, other in zip(["weight", "remainder", "gradient", "m", "v"], tensors, others, strict=True):
        if one is not None:
            torch.testing.assert_close(
                one, other, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("clipped", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (1000,), (4096,), (2**20 + 3,), (257, 1000)], ids=str)
def test_the_kernel_is_the_torch_implementation_bit_for_bit(shape, dtype, clipped):
    """Neither fuses a product and a sum, and roots and quotients are the correctly rounded ones: nothing is left to
    differ.
    """
    scale = torch.tensor(0.37, device="cuda") if clipped else None
    ours, reference = make_tensors(shape, dtype), make_tensors(shape, dtype)
    for step in range(1, 6):
        update_by_kernel(*ours, scale, coefficients_of(step))
        update_by_torch(*reference, scale, coefficients_of(step))
        assert_same_bits(ours, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_magnitude_and_gradients_that_are_not_finite(dtype):
    """Denormals, huge numbers, ties; NaN and infinity reach their own weight and no other."""
    ours, reference = make_tensors((100_003,), dtype, True), make_tensors((100_003,), dtype, True)
    for tensors in (ours, reference):
        tensors[2][:3] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
    for step in range(1, 4):
        update_by_kernel(*ours, None, coefficients_of(step))
        update_by_torch(*reference, None, coefficients_of(step))
        assert_same_bits(ours, reference)
    assert ours[0][:3].isnan().all()


def test_tensors_at_odd_addresses_and_their_neighbours():
    """Loads of 16 bytes are not possible there, and nothing outside the tensor is written."""
    whole, reference = make_tensors((5003,), torch.bfloat16), make_tensors((5003,), torch.bfloat16)
    for tensors, update in ((whole, update_by_kernel), (reference, update_by_torch)):
        update(*(tensor[1:-1] for tensor in tensors), None, coefficients_of(1))
    assert_same_bits(whole, reference)


def test_more_than_two_to_the_31_elements():
    count = 2**31 + 1027
    if torch.cuda.mem_get_info()[0] < 14 * count:
        pytest.skip("needs 28 GiB of free GPU memory")
    dtypes = [torch.bfloat16, torch.int16, torch.bfloat16, torch.bfloat16, torch.float32]
    whole = [torch.zeros(count, dtype=dtype, device="cuda") for dtype in dtypes]
    start = make_tensors((5000,), torch.bfloat16)
    for large, small in zip(whole, start, strict=True):
        large[-5000:] = small
    update_by_kernel(*whole, None, coefficients_of(1))
    update_by_torch(*start, None, coefficients_of(1))
    assert_same_bits([large[-5000:] for large in whole], start)
    assert not whole[0][:-5000].any(), "zero gradients and weights of zero move nothing"


def test_a_new_learning_rate_compiles_nothing(monkeypatch):
    triton = pytest.importorskip("triton")
    tensors = make_tensors((4096,), torch.bfloat16)
    scale = torch.tensor(0.5, device="cuda")
    update_by_kernel(*tensors, scale, coefficients_of(1))
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **kwargs: compiled.append(kwargs["repr"]))
    for step in range(2, 20):
        update_by_kernel(*tensors, scale, coefficients_of(step))
    update_by_kernel(*tensors, scale, Coefficients.of_step(20, lr=0.0, betas=(0.5, 0.0), eps=1.0, weight_decay=0.0))
    assert compiled == []
    tensors[3] = tensors[3].float()
    update_by_kernel(*tensors, scale, coefficients_of(21))
    assert compiled, "the hook sees what is compiled"


def test_remainders_follow_fp32_adamw():
    steps = 50
    low, full = make_parameters(torch.bfloat16), make_parameters(torch.float32)
    split = build_optimizer(CONFIG, "adamw_master", low.items())
    reference = build_optimizer(CONFIG, "adamw_fp32", full.items())
    start = {name: parameter.detach().clone() for name, parameter in full.items()}
    for step in range(steps):
        set_gradients(low, step)
        set_gradients(full, step)
        split.step()
        reference.step()
    state = optimizer_tensors(split, low.items())
    for name, parameter in low.items():
        master = join_master(parameter.detach(), state[f"{name}.remainder"])
        moved, wanted = master - start[name], full[name].detach() - start[name]
        # m in bf16 errs by 2^-9 a step, and these errors average out over steps.
        assert ((moved - wanted).norm() / wanted.norm()).item() < 5e-3, name
        assert torch.equal(parameter.detach(), split_master(master)[0]), name
    # What the same run loses without remainders is of another order: the updates themselves.
    naive = make_parameters(torch.bfloat16)
    plain = torch.optim.AdamW(naive.values(), lr=1e-5, weight_decay=0.0)
    for step in range(steps):
        set_gradients(naive, step)
        plain.step()
    moved, wanted = naive["linear"].float() - start["linear"], full["linear"].detach() - start["linear"]
    assert ((moved - wanted).norm() / wanted.norm()).item() > 0.3


def test_the_gpu_is_the_cpu():
    """Whole clipped steps on both devices: the same masters but for the last bits of the clip factor, whose sum has
    another order.
    """
    ends = []
    for device in ("cuda", "cpu"):
        parameters = make_parameters(torch.bfloat16)
        start = {name: parameter.detach().float().cpu() for name, parameter in parameters.items()}
        parameters = {name: torch.nn.Parameter(parameter.detach().to(device)) for name, parameter in parameters.items()}
        optimizer = build_optimizer(CONFIG, "adamw_master", parameters.items())
        for step in range(10):
            gradients = make_parameters(torch.bfloat16)
            set_gradients(gradients, step)
            for name, parameter in parameters.items():
                parameter.grad = gradients[name].grad.to(device)
            clip_and_step(optimizer, list(parameters.values()), max_norm=0.1)
        state = optimizer_tensors(optimizer, parameters.items())
        ends.append({name: join_master(p.detach(), state[f"{name}.remainder"]).cpu() for name, p in parameters.items()})
    for name in SHAPES:
        on_gpu, on_cpu = ends[0][name] - start[name], ends[1][name] - start[name]
        assert ((on_gpu - on_cpu).norm() / on_cpu.norm()).item() < 1e-4, name


@pytest.mark.parametrize("kind", ["adamw_master", "adamw_8bit"])
def test_save_and_restore_is_exact(kind):
    parameters = make_parameters(torch.bfloat16)
    optimizer = build_optimizer(CONFIG, kind, parameters.items())
    scheduler = build_scheduler(optimizer, CONFIG, total_steps=40)

    def train(its_parameters, its_optimizer, its_scheduler, steps):
        for step in steps:
            set_gradients(its_parameters, step)
            its_optimizer.step()
            its_scheduler.step()

    train(parameters, optimizer, scheduler, range(10))
    resumed = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    other = build_optimizer(CONFIG, kind, resumed.items())
    take_over(other, resumed.items(), optimizer, parameters.items())
    other_scheduler = build_scheduler(other, CONFIG, total_steps=40, completed_steps=10)
    train(parameters, optimizer, scheduler, range(10, 20))
    train(resumed, other, other_scheduler, range(10, 20))
    for name in SHAPES:
        assert torch.equal(parameters[name], resumed[name]), name
    final, resumed_final = optimizer_tensors(optimizer, parameters.items()), optimizer_tensors(other, resumed.items())
    assert final.keys() == resumed_final.keys()
    assert all(torch.equal(final[name], resumed_final[name]) for name in final)


# --- EightBitAdamW ----------------------------------------------------------------------------------------------------

EIGHT_BIT_TRAFFIC = 10 + 16 / CODE_BLOCK
"""Reads: weight and gradient 2 bytes each, m and v 1 each. Writes: weight 2, m and v 1 each. Both scales are read
and written once per block.
"""


def make_eight_bit(shape, dtype, device="cuda"):
    """weight, gradient, m, its scale, v, its scale in the middle of a run: the same on every device."""
    generator = torch.Generator().manual_seed(0)

    def normal():
        return torch.randn(shape, generator=generator)

    weight, gradient, m, v = (
        (0.02 * normal()).to(dtype),
        (1e-3 * normal()).to(dtype),
        1e-3 * normal(),
        1e-6 * normal().square(),
    )
    scale = scale_sq = None
    if weight.numel() >= eight_bit_adamw.SMALLEST_ENCODED and weight.numel() % CODE_BLOCK == 0:
        (m, scale), (v, scale_sq) = encode(m.view(-1), True), encode(v.view(-1), False)
    tensors = [weight, gradient, m.view(shape), scale, v.view(shape), scale_sq]
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def update_eight_bit(weight, gradient, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, scale, key, coefficients):
    """By the kernel on a GPU, by torch on the CPU."""
    state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if exp_avg_scale is not None:
        state |= {"exp_avg_scale": exp_avg_scale, "exp_avg_sq_scale": exp_avg_sq_scale}
    if weight.is_cuda:
        from llm_fp8.optim.adamw_triton import update_8bit_ as update_
    else:
        update_ = eight_bit_adamw.update_with_torch_
    update_(weight, gradient, state, scale, coefficients, key)


def assert_same_eight_bits(tensors, others):
    for name, one, other in zip(
        ["weight", "gradient", "m", "scale of m", "v", "scale of v"], tensors, others, strict=True
    ):
        if one is not None:
            torch.testing.assert_close(
                one.cpu(), other.cpu(), rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("clipped", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (1000,), (4096,), (4352,), (5003,), (257, 1280), (2**20,)], ids=str)
def test_the_eight_bit_kernel_is_the_torch_implementation_bit_for_bit(shape, dtype, clipped):
    """With the reference on the CPU."""
    ours, reference = make_eight_bit(shape, dtype), make_eight_bit(shape, dtype, "cpu")
    scale = torch.tensor(0.37) if clipped else None
    for step in range(1, 4):
        key = eight_bit_adamw.rounding_key(42, step, 7)
        update_eight_bit(*ours, None if scale is None else scale.cuda(), key, coefficients_of(step))
        update_eight_bit(*reference, scale, key, coefficients_of(step))
        assert_same_eight_bits(ours, reference)


def test_the_eight_bit_kernel_finds_every_code():
    """New moments at, and next to, every limit between codes: with betas of zero m is the gradient, v its square
    less what rounding takes.
    """
    for signed in (True, False):
        limits = code_tables(torch.device("cpu"))[1 if signed else 3][1:]
        wanted = limits if signed else limits.sqrt()
        around = (
            (wanted.view(torch.int32)[:, None] + torch.arange(-20, 21, dtype=torch.int32)).view(torch.float32).flatten()
        )
        around = torch.cat([around, around.new_zeros(-around.numel() % (CODE_BLOCK - 1))]).view(-1, CODE_BLOCK - 1)
        gradient = torch.cat([torch.ones(len(around), 1), around], dim=1).flatten()  # so that every scale is 1
        tensors = [
            torch.zeros_like(gradient),
            gradient,
            *(torch.zeros(gradient.shape, dtype=torch.uint8) for _ in range(2)),
        ]
        scales = [torch.zeros(len(around)) for _ in range(2)]
        reference = [*tensors[:3], scales[0], tensors[3], scales[1]]
        ours = [tensor.cuda() for tensor in reference]
        coefficients = Coefficients.of_step(1, lr=1e-3, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0)
        for tensors in (ours, reference):
            update_eight_bit(*tensors, None, (1, 2), coefficients)
        assert_same_eight_bits(ours, reference)
        assert len(reference[2 if signed else 4].unique()) == 256


def test_eight_bit_gradients_that_are_not_finite():
    ours, reference = make_eight_bit((64, 1024), torch.bfloat16), make_eight_bit((64, 1024), torch.bfloat16, "cpu")
    for tensors in (ours, reference):
        tensors[1][[0, 20, 40], 5] = torch.tensor(
            [torch.nan, torch.inf, -torch.inf], dtype=torch.bfloat16, device=tensors[1].device
        )
    for step in range(1, 3):
        for tensors in (ours, reference):
            update_eight_bit(*tensors, None, (step, 2), coefficients_of(step))
        assert torch.equal(ours[0].isnan().cpu(), reference[0].isnan())
        numbers = ~reference[0].isnan()
        assert torch.equal(ours[0].cpu()[numbers], reference[0][numbers])
    assert ours[0].isnan().sum() == 3 * CODE_BLOCK, "the whole blocks, and no other"


def test_eight_bit_tensors_of_more_than_two_to_the_31_elements():
    count = 2**31 + 5 * 2**10
    if torch.cuda.mem_get_info()[0] < 7 * count:
        pytest.skip("needs 14 GiB of free memory")
    weight, gradient = (torch.zeros(count, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    codes, codes_sq = (torch.zeros(count, dtype=torch.uint8, device="cuda") for _ in range(2))
    scale, scale_sq = (torch.zeros(count // CODE_BLOCK, device="cuda") for _ in range(2))
    start = make_eight_bit((5120,), torch.bfloat16)
    whole = [weight, gradient, codes, scale, codes_sq, scale_sq]
    for large, small in zip(whole, start, strict=True):
        large[-small.numel() :] = small
    update_eight_bit(*whole, None, (1, 2), coefficients_of(1))
    update_eight_bit(*start, None, (1, 2), coefficients_of(1))
    assert not weight[:-5120].any(), "zero gradients and weights of zero move nothing"
    # The random bits are those of the element's place, so only what is not rounded can be compared.
    assert all(torch.equal(large[-small.numel() :], small) for large, small in zip(whole[2:], start[2:], strict=True))
    assert ((weight[-5120:].float() - start[0].float()).abs() <= 2**-7 * start[0].float().abs() + 1e-6).all()


def test_a_new_step_compiles_no_eight_bit_kernel(monkeypatch):
    triton = pytest.importorskip("triton")
    tensors, scale = make_eight_bit((8192,), torch.bfloat16), torch.tensor(0.5, device="cuda")
    update_eight_bit(*tensors, scale, (3, 5), coefficients_of(1))
    compiled = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **kwargs: compiled.append(kwargs["repr"]))
    for step, key in enumerate([(1, 1), (16, 32), (-16, 0), (2**31 - 1, -(2**31)), (7, -5)], start=2):
        update_eight_bit(*tensors, scale, key, coefficients_of(step))
    assert compiled == []
    tensors[1] = tensors[1].float()
    update_eight_bit(*tensors, scale, (3, 5), coefficients_of(9))
    assert compiled, "the hook sees what is compiled"


def test_speed_of_the_eight_bit_kernel(record_property):
    """Prints and records what the kernel moves per second; the GPU's memory bandwidth is the bound."""
    generator = torch.Generator("cuda").manual_seed(0)
    count, repeats = 2**30, 20
    weight, gradient = (
        torch.randn(count, generator=generator, device="cuda", dtype=torch.bfloat16) * 1e-2 for _ in range(2)
    )
    codes, codes_sq = (torch.zeros(count, dtype=torch.uint8, device="cuda") for _ in range(2))
    scale, scale_sq = (torch.zeros(count // CODE_BLOCK, device="cuda") for _ in range(2))
    tensors, clip = [weight, gradient, codes, scale, codes_sq, scale_sq], torch.ones((), device="cuda")
    for step in (1, 2, 3):
        update_eight_bit(*tensors, clip, (step, 1), coefficients_of(step))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for step in range(4, 4 + repeats):
        update_eight_bit(*tensors, clip, (step, 1), coefficients_of(step))
    end.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(end) / 1e3 / repeats
    gb_per_s = EIGHT_BIT_TRAFFIC * count / seconds / 1e9
    record_property("gb_per_s", gb_per_s)
    print(
        f"\nEightBitAdamW: 2^30 elements in {seconds * 1e3:.2f} ms, {gb_per_s:.0f} GB/s on "
        f"{torch.cuda.get_device_name()}"
    )


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw_master", "adamw_8bit"])
def test_memory_is_what_the_table_says(kind):
    """12 or 6 bytes per parameter at rest, and a clipped step needs next to nothing beyond them."""
    matrices = {
        f"layer_{i}": torch.nn.Parameter(torch.zeros(2**13, 2**12, device="cuda").bfloat16()) for i in range(16)
    }
    count = sum(parameter.numel() for parameter in matrices.values())
    before = torch.cuda.memory_allocated() - 2 * count
    optimizer = build_optimizer(OptimConfig(), kind, matrices.items())
    for parameter in matrices.values():
        parameter.grad = torch.ones_like(parameter)
    initialize_state(optimizer)
    at_rest = torch.cuda.memory_allocated() - before
    assert at_rest / count == pytest.approx(bytes_per_parameter(kind).total, rel=0.001)
    torch.cuda.reset_peak_memory_stats()
    clip_and_step(optimizer, list(matrices.values()), max_norm=1.0)
    extra = torch.cuda.max_memory_allocated() - before - at_rest
    assert extra < 16 * 2**20, f"{extra / 2**20:.1f} MiB"  # partial sums of the norm


def test_speed_of_the_kernel(record_property):
    """Prints and records what the kernel moves per second; the GPU's memory bandwidth is the bound."""
    count, repeats = 2**28, 20
    tensors = make_tensors((count,), torch.bfloat16)
    scale = torch.ones((), device="cuda")
    for step in (1, 2, 3):
        update_by_kernel(*tensors, scale, coefficients_of(step))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for step in range(4, 4 + repeats):
        update_by_kernel(*tensors, scale, coefficients_of(step))
    end.record()
    torch.cuda.synchronize()
    seconds = start.elapsed_time(end) / 1e3 / repeats
    gb_per_s = TRAFFIC_BYTES_PER_ELEMENT * count / seconds / 1e9
    record_property("gb_per_s", gb_per_s)
    print(
        f"\nMasterAdamW: 2^28 elements in {seconds * 1e3:.2f} ms, {gb_per_s:.0f} GB/s on {torch.cuda.get_device_name()}"
    )
