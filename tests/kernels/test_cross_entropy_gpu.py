"""Transformer Engine's cross-entropy kernels compared with torch in fp32, for a vocabulary of realistic size."""

import pytest
import torch
import torch.nn.functional as F

from llm_fp8.kernels import cross_entropy
from llm_fp8.kernels.cross_entropy import IGNORE_INDEX, linear_cross_entropy_sum

pytestmark = pytest.mark.gpu

TOKENS, VOCAB, HIDDEN = 2048, 128_256, 512


def make_labels():
    generator = torch.Generator("cuda").manual_seed(1)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator, device="cuda")
    labels[torch.rand(TOKENS, generator=generator, device="cuda") < 0.3] = IGNORE_INDEX
    labels[:2] = torch.tensor([0, VOCAB - 1])
    return labels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_match_fp32_reference(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (4 * torch.randn(TOKENS, VOCAB, generator=generator, device="cuda")).to(dtype)
    labels = make_labels()
    assert cross_entropy.use_triton(logits)
    reference_logits = logits.float().requires_grad_()
    expected_loss = F.cross_entropy(reference_logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    factor = torch.tensor(0.25, device="cuda")
    (expected_loss.sum() * factor).backward()

    original = logits.clone()
    losses, statistics = cross_entropy.losses_and_statistics(logits, labels)
    assert torch.equal(logits, original), "the forward kernel must not change the logits"
    torch.testing.assert_close(losses, expected_loss.detach(), rtol=1e-5, atol=1e-5)
    cross_entropy.to_gradient_(logits, statistics, labels, factor, None)
    gradient = logits.float()
    # The gradients may differ only by the rounding to the logits' dtype.
    unit_roundoff = torch.finfo(dtype).eps / 2
    assert ((gradient - reference_logits.grad).norm() / reference_logits.grad.norm()).item() < max(unit_roundoff, 1e-5)
    assert not gradient[labels == IGNORE_INDEX].any()


@pytest.mark.parametrize("chunk_tokens", [600, None])
def test_linear_cross_entropy_matches_fp32_reference(chunk_tokens):
    generator = torch.Generator("cuda").manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = (0.05 * torch.randn(VOCAB, HIDDEN, generator=generator, device="cuda")).bfloat16().requires_grad_()
    labels = make_labels()
    count = (labels != IGNORE_INDEX).sum()
    loss = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens) / count
    loss.backward()

    reference_hidden, reference_weight = (t.detach().float().requires_grad_() for t in (hidden, weight))
    expected_loss = F.cross_entropy(reference_hidden @ reference_weight.t(), labels, ignore_index=IGNORE_INDEX)
    expected_loss.backward()
    assert (loss - expected_loss).abs() / expected_loss < 1e-3
    for name, actual, expected in [
        ("hidden", hidden.grad, reference_hidden.grad),
        ("weight", weight.grad, reference_weight.grad),
    ]:
        error = ((actual.float() - expected).norm() / expected.norm()).item()
        assert error < 1e-2, f"{name}: relative error {error:.1e}"


def test_second_backward_raises_an_error():
    hidden = torch.randn(32, HIDDEN, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(1024, HIDDEN, device="cuda").bfloat16()
    loss = linear_cross_entropy_sum(hidden, weight, torch.randint(0, 1024, (32,), device="cuda"))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_are_not_copied_to_fp32():
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, device="cuda").bfloat16().requires_grad_()
    labels = make_labels()
    linear_cross_entropy_sum(hidden, weight, labels).backward()  # compiles the kernels
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy_sum(hidden, weight, labels).backward()
    extra_bytes = torch.cuda.max_memory_allocated() - before
    logits_bytes, weight_bytes = 2 * TOKENS * VOCAB, 2 * VOCAB * HIDDEN
    assert extra_bytes < 1.1 * (logits_bytes + weight_bytes)
