"""Exact cross entropy from hidden states, without a [tokens, vocabulary] tensor in fp32.

For hidden states `x [T, h]`, the lm_head's weight `W [V, h]` and labels `y [T]`

    loss = sum over t with y_t != -100 of  -log softmax(x_t W^T)[y_t]

and its gradients. The training loop divides the sum by the supervised tokens of the whole optimizer step.

For V = 128,256 (Llama 3) and T = 8,192 `F.cross_entropy(model(x).float(), y)` holds 2.0 GiB of logits and three fp32
tensors of 3.9 GiB at once. Here the gradient overwrites the bf16 logits:

    one chunk     The logits stay until the backward pass, which begins with the loss, so the peak does not rise.
    many chunks   At most `chunk_tokens` rows of logits exist at a time, so both gradients are formed in the forward
                  pass. grad_W is summed over chunks in fp32 (4 V h bytes), so chunks pay only for T well above 2 h.

The GEMMs run in `compute_dtype`. Softmax, loss and sums are computed in fp32 (fp64 for fp64 inputs). The gradient with
respect to the logits is rounded to `compute_dtype`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llm_fp8.kernels import softmax

LOGITS_BUDGET_GIB = 4.0  # 16,384 tokens of a 128k vocabulary in bf16 are 3.9 GiB


def default_chunk_tokens(num_tokens: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Tokens per chunk: its logits fit `LOGITS_BUDGET_GIB`, and all chunks are nearly equally long."""
    num_chunks = max(1, -(-num_tokens * vocab_size * dtype.itemsize // int(LOGITS_BUDGET_GIB * 2**30)))
    # A multiple of 128, since a chunk's tokens are the inner dimension of grad_W's GEMM.
    return max(1, -(-num_tokens // (num_chunks * 128))) * 128


def linear_cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """The sum over supervised tokens of the cross entropy of `hidden @ weight.T`, differentiable once in hidden and
    weight: 0-dim, fp32 (fp64 if `compute_dtype` is fp64).

    Args:
        hidden: `[..., h]`, floating point, the output of the last norm.
        weight: `[V, h]`, the lm_head's weight, which may be the embedding's (tied).
        labels: `[...]`, int64 on the device of `hidden`, already shifted (labels[t] is the token after t).
        softcap: c, where the logits are c tanh(z / c) of the GEMM's output z (Gemma).
        chunk_tokens: the number of rows of logits that exist at a time. Default: `default_chunk_tokens`.
        compute_dtype: the dtype of GEMMs and logits, also under autocast. Default: the dtype of `hidden`.
    """
    hidden = hidden.reshape(-1, hidden.shape[-1])
    labels = labels.reshape(-1)
    compute_dtype = compute_dtype or hidden.dtype
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(hidden.shape[0], weight.shape[0], compute_dtype)
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()  # so that no gradient is formed
    with torch.autocast(hidden.device.type, enabled=False):
        if hidden.shape[0] <= chunk_tokens and (hidden.requires_grad or weight.requires_grad):
            return _OneChunk.apply(hidden, weight, labels, softcap, compute_dtype)
        return _ManyChunks.apply(hidden, weight, labels, softcap, chunk_tokens, compute_dtype)


class _OneChunk(torch.autograd.Function):
    """Keeps all logits; the backward pass overwrites them by their gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None, compute_dtype: torch.dtype
    ) -> Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.softcap = softcap
        hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
        logits = softmax.cap_(hidden @ weight.t(), softcap)
        losses, statistics = softmax.losses(logits, labels)
        ctx.save_for_backward(hidden, weight, labels, logits, statistics)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, logits, statistics = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            slope = softmax.slope_of_cap(logits, ctx.softcap)
            softmax.to_gradient_(logits, statistics, labels, grad_output)
            logits = logits if slope is None else logits.mul_(slope)
            needs_hidden, needs_weight = ctx.needs_input_grad[:2]
            grad_hidden = (logits @ weight).to(ctx.dtypes[0]) if needs_hidden else None
            grad_weight = (logits.t() @ hidden).to(ctx.dtypes[1]) if needs_weight else None
        return grad_hidden, grad_weight, None, None, None


class _ManyChunks(torch.autograd.Function):
    """Keeps the logits of one chunk at a time; the forward pass forms the gradients for a grad_output of 1."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        softcap: float | None,
        chunk_tokens: int,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.weight_dtype = weight.dtype
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        sum_dtype = softmax.accumulation_dtype(dtype)
        compute_weight = weight.to(dtype)
        one = torch.ones((), dtype=sum_dtype, device=hidden.device)
        loss = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=sum_dtype, device=weight.device) if needs_weight else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            rows = hidden[chunk].to(dtype)
            logits = softmax.cap_(rows @ compute_weight.t(), softcap)
            losses, statistics = softmax.losses(logits, labels[chunk])
            loss += losses.sum()
            if needs_hidden or needs_weight:
                slope = softmax.slope_of_cap(logits, softcap)
                softmax.to_gradient_(logits, statistics, labels[chunk], one)
                logits = logits if slope is None else logits.mul_(slope)
            if grad_hidden is not None:
                grad_hidden[chunk] = logits @ compute_weight
            if grad_weight is not None:
                grad_weight += logits.t() @ rows
            del logits  # before the next chunk's exist
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_output  # 0-dim: keeps the dtype
        if grad_weight is not None:
            grad_weight = torch.mul(grad_weight, grad_output, out=torch.empty_like(grad_weight, dtype=ctx.weight_dtype))
        return grad_hidden, grad_weight, None, None, None, None
