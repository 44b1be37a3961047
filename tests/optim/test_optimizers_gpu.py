"""The Triton kernels of MasterAdamW and EightBitAdamW: results compared with the torch implementation, and memory."""

import pytest
import torch

from llm_fp8.config.options import OptimConfig
from llm_fp8.optim import adamw
from llm_fp8.optim.adamw import update_with_torch_
from llm_fp8.optim.adamw_8bit_codes import CODE_BLOCK, SMALLEST_ENCODED, code_tables, encode, rounding_key
from llm_fp8.optim.adamw_master import split_master
from llm_fp8.optim.optimizers import OPTIMIZERS, clip_and_step, initialize_state

pytestmark = pytest.mark.gpu


def coefficients_of(step):
    return adamw.coefficients_of(dict(step=step, lr=1e-3 / step, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1))


def make_master(shape, dtype, any_magnitude=False):
    """Return weight, gradient and MasterAdamW state on the GPU. If `any_magnitude`, the weight has random bits."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal():
        return torch.randn(shape, generator=generator, device="cuda")

    if any_magnitude:
        words = torch.randint(-(2**31), 2**31, shape, generator=generator, device="cuda")
        numbers = words.to(torch.int32).view(torch.float32)
        master = torch.where(numbers.isnan(), 0.02, numbers)
    else:
        master = 0.02 * normal()
    gradient = (1e-3 * normal()).to(dtype)
    state = {"exp_avg": (1e-3 * normal()).bfloat16(), "exp_avg_sq": 1e-6 * normal().square()}
    if dtype == torch.bfloat16:
        master, state["remainder"] = split_master(master)
    return master, gradient, state


def make_eight_bit(shape, dtype, device="cuda"):
    """Return weight, gradient and EightBitAdamW state with non-zero moments. The numbers are equal on every device."""
    generator = torch.Generator().manual_seed(0)

    def normal():
        return torch.randn(shape, generator=generator)

    weight, gradient = (0.02 * normal()).to(dtype), (1e-3 * normal()).to(dtype)
    state = {"exp_avg": 1e-3 * normal(), "exp_avg_sq": 1e-6 * normal().square()}
    if weight.numel() >= SMALLEST_ENCODED and weight.numel() % CODE_BLOCK == 0:
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            codes, state[f"{name}_scale"] = encode(state[name].view(-1), signed)
            state[name] = codes.view(shape)
    return weight.to(device), gradient.to(device), {name: tensor.to(device) for name, tensor in state.items()}


def update_by_kernel(*arguments):
    from llm_fp8.optim.adamw_triton import update_

    update_(*arguments)


def assert_same_bits(ours, reference):
    """Check that two triples of weight, gradient and state are equal bit for bit."""
    both = [{"weight": weight, "gradient": gradient, **state} for weight, gradient, state in (ours, reference)]
    assert both[0].keys() == both[1].keys()
    for name, tensor in both[0].items():
        torch.testing.assert_close(
            tensor.cpu(),
            both[1][name].cpu(),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("clipped", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (1000,), (4096,), (2**20 + 3,), (257, 1000)], ids=str)
def test_kernel_equals_the_torch_implementation_bit_for_bit(shape, dtype, clipped):
    """Neither implementation fuses products and sums, and both round roots and quotients correctly."""
    scale = torch.tensor(0.37, device="cuda") if clipped else None
    ours, reference = make_master(shape, dtype), make_master(shape, dtype)
    for step in range(1, 6):
        update_by_kernel(*ours, scale, coefficients_of(step), (0, 0))
        update_with_torch_(*reference, scale, coefficients_of(step), (0, 0))
        assert_same_bits(ours, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_handles_all_magnitudes_and_non_finite_gradients(dtype):
    """The numbers include denormals, huge numbers and ties. NaN or infinity must not spread to other weights."""
    ours, reference = make_master((100_003,), dtype, True), make_master((100_003,), dtype, True)
    for _, gradient, _ in (ours, reference):
        gradient[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)
    for step in range(1, 4):
        update_by_kernel(*ours, None, coefficients_of(step), (0, 0))
        update_with_torch_(*reference, None, coefficients_of(step), (0, 0))
        assert_same_bits(ours, reference)
    assert ours[0][:3].isnan().all()


@pytest.mark.parametrize("clipped", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (1000,), (4096,), (4352,), (5003,), (257, 1280), (2**20,)], ids=str)
def test_eight_bit_kernel_equals_the_torch_implementation_bit_for_bit(shape, dtype, clipped):
    """The torch implementation runs on the CPU."""
    ours, reference = make_eight_bit(shape, dtype), make_eight_bit(shape, dtype, "cpu")
    scale = torch.tensor(0.37) if clipped else None
    for step in range(1, 4):
        key = rounding_key(42, step, 7)
        update_by_kernel(*ours, None if scale is None else scale.cuda(), coefficients_of(step), key)
        update_with_torch_(*reference, scale, coefficients_of(step), key)
        assert_same_bits(ours, reference)


def test_eight_bit_kernel_rounds_to_the_right_code_at_every_limit():
    """The new moments are at, and next to, every limit between two codes. With betas of zero the first moment is the
    gradient, and the second moment is the square of the gradient, up to rounding.
    """
    for signed in (True, False):
        limits = code_tables(torch.device("cpu"))[1 if signed else 3][1:]
        centres = limits if signed else limits.sqrt()
        steps = torch.arange(-20, 21, dtype=torch.int32)
        around = (centres.view(torch.int32)[:, None] + steps).view(torch.float32).flatten()
        around = torch.cat([around, around.new_zeros(-around.numel() % (CODE_BLOCK - 1))]).view(-1, CODE_BLOCK - 1)
        gradient = torch.cat([torch.ones(len(around), 1), around], dim=1).flatten()  # so that every scale is 1
        state = {}
        for name in ("exp_avg", "exp_avg_sq"):
            state |= {name: torch.zeros(gradient.shape, dtype=torch.uint8), f"{name}_scale": torch.zeros(len(around))}
        reference = torch.zeros_like(gradient), gradient, state
        ours = torch.zeros_like(gradient).cuda(), gradient.cuda(), {name: each.cuda() for name, each in state.items()}
        coefficients = adamw.coefficients_of(dict(step=1, lr=1e-3, betas=(0.0, 0.0), eps=1e-8, weight_decay=0.0))
        update_by_kernel(*ours, None, coefficients, (1, 2))
        update_with_torch_(*reference, None, coefficients, (1, 2))
        assert_same_bits(ours, reference)
        assert len(state["exp_avg" if signed else "exp_avg_sq"].unique()) == 256


@pytest.mark.parametrize("kind", ["adamw_master", "adamw_8bit"])
def test_allocated_memory_matches_bytes_per_parameter(kind):
    """`OPTIMIZERS` declares the memory between steps. A step with clipping needs less than 16 MiB more."""
    matrices = {
        f"layer_{i}": torch.nn.Parameter(torch.zeros(2**13, 2**12, device="cuda").bfloat16()) for i in range(16)
    }
    count = sum(parameter.numel() for parameter in matrices.values())
    before = torch.cuda.memory_allocated() - 2 * count
    optimizer = OPTIMIZERS[kind].build(matrices.items(), OptimConfig(), False)
    for parameter in matrices.values():
        parameter.grad = torch.ones_like(parameter)
    initialize_state(optimizer)
    at_rest = torch.cuda.memory_allocated() - before
    assert at_rest / count == pytest.approx(OPTIMIZERS[kind].total_bytes, rel=0.001)
    torch.cuda.reset_peak_memory_stats()
    clip_and_step(optimizer, list(matrices.values()), max_norm=1.0)
    extra = torch.cuda.max_memory_allocated() - before - at_rest
    assert extra < 16 * 2**20, f"{extra / 2**20:.1f} MiB"  # partial sums of the norm
