"""The fused linear + cross entropy compared with torch's: value, gradient, stability, and the largest tensor."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from llm_fp8.kernels.cross_entropy import IGNORE_INDEX, default_chunk_tokens, linear_cross_entropy_sum

TOKENS, HIDDEN, VOCAB = 37, 24, 101


def make_inputs(dtype=torch.float64, tokens=TOKENS, ignored=(0, 5, 6, 36), scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (tokens,), generator=generator)
    labels[list(ignored)] = IGNORE_INDEX
    return hidden, weight, labels


def reference(hidden, weight, labels, softcap=None):
    """Return the loss of torch's cross entropy in fp64, and the gradients of `hidden` and `weight`."""
    hidden, weight = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 36, 37, 1000, None])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
)
def test_matches_torch_for_every_chunking(dtype, tolerance, chunk_tokens):
    hidden, weight, labels = make_inputs(dtype)
    loss = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    (loss * 0.37).backward()
    expected_loss, expected_hidden, expected_weight = reference(hidden, weight, labels)
    pairs = {
        "loss": (loss, expected_loss),
        "hidden": (hidden.grad, 0.37 * expected_hidden),
        "weight": (weight.grad, 0.37 * expected_weight),
    }
    for name, (actual, expected) in pairs.items():
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < tolerance, f"{name}: relative error {error:.1e}"
    assert hidden.grad.dtype == weight.grad.dtype == dtype
    assert not hidden.grad[labels == IGNORE_INDEX].any()


@pytest.mark.parametrize("chunk_tokens", [7, None])
def test_softcapped_logits_match_torch(chunk_tokens):
    hidden, weight, labels = make_inputs(scale=3.0)
    loss = linear_cross_entropy_sum(hidden, weight, labels, softcap=5.0, chunk_tokens=chunk_tokens)
    loss.backward()
    for actual, expected in zip((loss, hidden.grad, weight.grad), reference(hidden, weight, labels, 5.0), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_ignored_labels_have_no_loss_and_no_gradient(chunk_tokens):
    hidden, weight, labels = make_inputs(ignored=range(4, 8))  # the second chunk of four is ignored as a whole
    loss = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(loss, reference(hidden, weight, labels)[0])
    ignored = torch.full_like(labels, IGNORE_INDEX)
    loss = linear_cross_entropy_sum(hidden, weight, ignored, chunk_tokens=chunk_tokens)
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_large_logits_are_stable(chunk_tokens):
    hidden, weight, labels = make_inputs(torch.float32, scale=1e4)
    loss = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens)
    loss.backward()
    expected_loss, expected_hidden, expected_weight = reference(hidden, weight, labels)
    assert expected_loss > 1e5
    assert (loss.double() - expected_loss).abs() / expected_loss < 1e-5
    # With logits this large the softmax is a step function. In some rows, fp32 rounding selects another logit.
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()
    assert F.cosine_similarity(hidden.grad.double().flatten(), expected_hidden.flatten(), dim=0) > 0.99


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_nan_in_the_inputs_gives_a_nan_loss(chunk_tokens):
    hidden, weight, labels = make_inputs(torch.float32)
    with torch.no_grad():
        hidden[10, 3] = float("nan")
    assert torch.isnan(linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens))
    with torch.no_grad():
        assert torch.isnan(linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens))


@pytest.mark.parametrize("chunk_tokens", [4, 100])
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_inputs_that_require_grad_get_gradients(frozen, chunk_tokens):
    hidden, weight, labels = make_inputs()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens).backward()
    _, expected_hidden, expected_weight = reference(hidden, weight, labels)
    if frozen == "hidden":
        assert hidden.grad is None
        torch.testing.assert_close(weight.grad, expected_weight)
    else:
        assert weight.grad is None
        torch.testing.assert_close(hidden.grad, expected_hidden)


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_bf16_compute_with_fp32_parameters(chunk_tokens):
    """Loss and gradients are in fp32, and equal those for inputs that were cast to bf16 beforehand."""
    hidden, weight, labels = make_inputs(torch.float32)
    bf16_hidden, bf16_weight = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
    expected = linear_cross_entropy_sum(bf16_hidden, bf16_weight, labels, chunk_tokens=chunk_tokens)
    expected.backward()
    loss = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens, compute_dtype=torch.bfloat16)
    loss.backward()
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert loss.item() == expected.item()
    assert loss.item() != linear_cross_entropy_sum(hidden.detach(), weight.detach(), labels).item()
    torch.testing.assert_close(hidden.grad.bfloat16(), bf16_hidden.grad)
    torch.testing.assert_close(weight.grad.bfloat16(), bf16_weight.grad)


def test_second_backward_raises_an_error():
    hidden, weight, labels = make_inputs()
    loss = linear_cross_entropy_sum(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_tensor_is_larger_than_the_logits_of_a_chunk():
    tokens, chunk_tokens = 400, 20
    hidden, weight, labels = make_inputs(torch.float32, tokens=tokens)
    with LargestTensor() as chunked:
        linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens).backward()
    assert chunked.numel == max(tokens * HIDDEN, chunk_tokens * VOCAB)
    with LargestTensor() as whole:
        linear_cross_entropy_sum(hidden, weight, labels).backward()
    assert whole.numel == tokens * VOCAB


def test_default_chunks_are_equal_and_multiples_of_128_tokens():
    assert default_chunk_tokens(16_384, 128_256, torch.bfloat16) >= 16_384  # one chunk
    assert default_chunk_tokens(16_384, 128_256, torch.float32) == 8_192  # two equal chunks
    assert default_chunk_tokens(40_000, 151_936, torch.bfloat16) == 13_440  # three chunks, of a multiple of 128 tokens
    assert default_chunk_tokens(1, 10, torch.float32) == 128
