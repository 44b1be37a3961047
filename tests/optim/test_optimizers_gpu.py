"""The Triton kernel of MasterAdamW and EightBitAdamW against the torch implementation, and memory."""

import pytest
import torch

from llm_fp8.config.options import OptimConfig
from llm_fp8.optim.adamw import Coefficients, update_with_torch_
from llm_fp8.optim.adamw_8bit_codes import CODE_BLOCK, SMALLEST_ENCODED, code_tables, encode, rounding_key
from llm_fp8.optim.adamw_master import split_master
from llm_fp8.optim.optimizers import BYTES_PER_PARAMETER, build_optimizer, clip_and_step, initialize_state

pytestmark = pytest.mark.gpu

SHAPES = {"embedding": (1000, 64), "linear": (128, 257), "bias": (257,), "norm": (64,)}
"""The embedding has 8-bit moments under adamw_8bit, the others have not."""


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
    update_(weight, gradient, state, scale, coefficients, (0, 0))


def update_by_kernel(*tensors_and_coefficients):
    from llm_fp8.optim.adamw_triton import update_

    update_by_torch(*tensors_and_coefficients, update_=update_)


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


# --- EightBitAdamW ----------------------------------------------------------------------------------------------------


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
    if weight.numel() >= SMALLEST_ENCODED and weight.numel() % CODE_BLOCK == 0:
        (m, scale), (v, scale_sq) = encode(m.view(-1), True), encode(v.view(-1), False)
    tensors = [weight, gradient, m.view(shape), scale, v.view(shape), scale_sq]
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def update_eight_bit(weight, gradient, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, scale, key, coefficients):
    """By the kernel on a GPU, by torch on the CPU."""
    state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if exp_avg_scale is not None:
        state |= {"exp_avg_scale": exp_avg_scale, "exp_avg_sq_scale": exp_avg_sq_scale}
    if weight.is_cuda:
        from llm_fp8.optim.adamw_triton import update_
    else:
        update_ = update_with_torch_
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
        key = rounding_key(42, step, 7)
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


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw_master", "adamw_8bit"])
def test_allocated_memory_matches_bytes_per_parameter(kind):
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
    assert at_rest / count == pytest.approx(BYTES_PER_PARAMETER[kind].total, rel=0.001)
    torch.cuda.reset_peak_memory_stats()
    clip_and_step(optimizer, list(matrices.values()), max_norm=1.0)
    extra = torch.cuda.max_memory_allocated() - before - at_rest
    assert extra < 16 * 2**20, f"{extra / 2**20:.1f} MiB"  # partial sums of the norm
