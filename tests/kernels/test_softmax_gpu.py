"""The kernel from logits to their gradient in fp8, against fp64 and torch's rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from llm_fp8.kernels import softmax
from llm_fp8.kernels.softmax import IGNORE_INDEX
from llm_fp8.observability.kernel_trace import kernel_class, kernel_times, record_kernels
from tests.support.fp8_head_reference import SOFTMAX_GRADIENT_KERNEL

pytestmark = pytest.mark.gpu

E5M2 = torch.float8_e5m2
LARGEST = torch.finfo(E5M2).max
SHAPES = {
    "whole blocks": (64, 8192),
    "parts of blocks": (37, 4112),
    "one block": (16, 16),
    "one token": (1, 1008),
    "Llama 3's vocabulary": (48, 128_256),
    "Qwen 2.5's vocabulary": (33, 152_064),
}


@pytest.fixture
def softmax_gradient_cast():
    from llm_fp8.kernels.fp8_gradients_triton import softmax_gradient_cast

    return softmax_gradient_cast


def inputs(
    shape: tuple[int, int], dtype: torch.dtype, device: Any, spread: float = 4.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, their statistics and labels, among them the first column, the last one and, of three tokens or more,
    an ignored one.
    """
    tokens, vocabulary = shape
    generator = torch.Generator(device=device).manual_seed(0)
    logits = (spread * torch.randn(shape, generator=generator, device=device)).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator, device=device)
    for row, label in enumerate((0, vocabulary - 1, IGNORE_INDEX)[:tokens]):
        labels[row] = label
    return logits, softmax.torch_losses(logits, labels)[1], labels


def factors(grad_output: float, device: Any) -> tuple[Tensor, Tensor]:
    """`grad_output`, and the scale for which it is the largest value."""
    value = torch.tensor(grad_output, device=device)
    return value, (LARGEST / value.abs()).reshape(1)


def exact(logits: Tensor, labels: Tensor, grad_output: Tensor, scale: Tensor, num_rows: int) -> Tensor:
    """The scaled gradient in fp64."""
    counts = labels != IGNORE_INDEX
    gradient = torch.zeros(num_rows, logits.shape[1], dtype=torch.float64, device=logits.device)
    gradient[: len(labels)][counts] = torch.softmax(logits[counts].double(), dim=-1)
    rows = counts.nonzero()[:, 0]
    gradient[rows, labels[rows]] -= 1
    return gradient * (grad_output.double() * scale.double())


@pytest.mark.parametrize("grad_output", [1.0, -3.0, 1 / 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_are_the_exact_ones_rounded_once(shape, dtype, grad_output, softmax_gradient_cast, device):
    logits, statistics, labels = inputs(shape, dtype, device)
    value, scale = factors(grad_output, device)
    num_rows = -(-shape[0] // 16) * 16
    before = logits.clone()
    found = softmax_gradient_cast(logits, statistics, labels, value, scale, num_rows, E5M2)
    assert torch.equal(logits, before)
    assert found.dtype == E5M2 and found.shape == (num_rows, shape[1])
    scaled = exact(logits, labels, value, scale, num_rows).clamp(-LARGEST, LARGEST)
    # Half a unit in the last place, of subnormal numbers half their spacing, and what fp32 rounds where the probability
    # of the label is near one.
    allowed = scaled.abs() * 2.0**-3 * (1 + 1e-3) + 2.0**-17 * (1 + 1e-3) + LARGEST * 2.0**-22
    assert bool(((found.double() - scaled).abs() <= allowed).all())
    differing = (found.view(torch.uint8) != scaled.float().to(E5M2).view(torch.uint8)) & (scaled != 0)
    assert differing.float().mean().item() < 1e-3, "torch rounds to the same bytes but where fp32 decides between two"
    ignored = torch.ones(num_rows, dtype=torch.bool, device=device)
    ignored[: shape[0]] = labels == IGNORE_INDEX
    assert not found[ignored].float().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nan_stays_in_its_row_and_out_of_ignored_ones(dtype, softmax_gradient_cast, device):
    logits, _, labels = inputs((21, 5008), dtype, device)
    logits[2, 7] = logits[5, 5007] = math.nan  # the label of row 2 is ignored
    statistics = softmax.losses(logits, labels)[1]
    found = softmax_gradient_cast(logits, statistics, labels, *factors(0.5, device), 32, E5M2).float()
    assert found.isnan().all(dim=1).nonzero()[:, 0].tolist() == found.isnan().any(dim=1).nonzero()[:, 0].tolist() == [5]
    of_nan = softmax_gradient_cast(logits, statistics, labels, *factors(math.nan, device), 32, E5M2).float()
    assert of_nan.isnan().all(dim=1).tolist() == [row < 21 and row != 2 for row in range(32)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gradient_of_zero_is_zero(dtype, softmax_gradient_cast, device):
    values = inputs((16, 1008), dtype, device)
    zero, one = torch.tensor(0.0, device=device), torch.ones(1, device=device)
    assert not softmax_gradient_cast(*values, zero, one, 16, E5M2).float().any()


def test_large_logits(softmax_gradient_cast, device):
    """Half of the tokens are certain of their label, and the others of another one."""
    logits = torch.zeros(16, 4096, dtype=torch.bfloat16, device=device)
    labels = torch.arange(16, device=device)
    logits[labels, labels + 100 * (labels % 2)] = 1e4
    statistics = softmax.torch_losses(logits, labels)[1]
    found = softmax_gradient_cast(logits, statistics, labels, *factors(1.0, device), 16, E5M2).float()
    want = torch.zeros_like(found)
    odd = labels[1::2]
    want[odd, odd], want[odd, odd + 100] = -LARGEST, LARGEST
    assert torch.equal(found, want)


def test_places_beyond_32_bits(softmax_gradient_cast, device):
    tokens, vocabulary = 16_784, 128_256
    assert (tokens - 16) * vocabulary > 2**31
    last, statistics_of_last, labels_of_last = inputs((16, vocabulary), torch.bfloat16, device)
    logits = torch.empty(tokens, vocabulary, dtype=torch.bfloat16, device=device)
    labels = torch.full((tokens,), IGNORE_INDEX, device=device)
    statistics = torch.zeros(tokens, 2, device=device)
    logits[-16:], labels[-16:], statistics[-16:] = last, labels_of_last, statistics_of_last
    found = softmax_gradient_cast(logits, statistics, labels, *factors(1.0, device), tokens, E5M2)
    alone = softmax_gradient_cast(last, statistics_of_last, labels_of_last, *factors(1.0, device), 16, E5M2)
    assert torch.equal(found[-16:].view(torch.uint8), alone.view(torch.uint8))
    assert not found[:-16].view(torch.uint8).any()


def test_labels_of_every_second_token_and_no_token(softmax_gradient_cast, device):
    logits, statistics, labels = inputs((16, 256), torch.bfloat16, device)
    apart = torch.stack((labels, labels.flip(0)), dim=1)[:, 0]
    assert not apart.is_contiguous()
    rest = (*factors(1.0, device), 16, E5M2)
    found, want = (
        softmax_gradient_cast(logits, statistics, which, *rest).view(torch.uint8) for which in (apart, labels)
    )
    assert torch.equal(found, want)
    assert not softmax_gradient_cast(logits[:0], statistics[:0], labels[:0], *rest).view(torch.uint8).any()


def test_wrong_shapes(softmax_gradient_cast, device):
    logits, statistics, labels = inputs((16, 64), torch.bfloat16, device)
    rest = (*factors(1.0, device), 16, E5M2)
    for values in (
        (logits[:, ::2], statistics, labels),
        (logits, statistics[:8], labels),
        (logits, statistics, labels[:8]),
    ):
        with pytest.raises(ValueError, match="need contiguous statistics"):
            softmax_gradient_cast(*values, *rest)
    with pytest.raises(ValueError, match="at least 16 rows"):
        softmax_gradient_cast(logits, statistics, labels, *factors(1.0, device), 15, E5M2)


def test_the_kernels_name_is_known(softmax_gradient_cast, device):
    values = (*inputs((16, 64), torch.bfloat16, device), *factors(1.0, device), 16, E5M2)
    softmax_gradient_cast(*values)
    with record_kernels() as recorded:
        softmax_gradient_cast(*values)
    assert list(kernel_times(recorded)) == [SOFTMAX_GRADIENT_KERNEL]
    assert kernel_class(SOFTMAX_GRADIENT_KERNEL) == "loss"
