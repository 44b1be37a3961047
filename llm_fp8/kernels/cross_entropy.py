"""Exact cross entropy from hidden states, without a [tokens, vocabulary] tensor in fp32.

For hidden states `x [T, h]`, the lm_head's weight `W [V, h]` and labels `y [T]`, this module computes

    loss = sum over t with y_t != -100 of  -log softmax(x_t W^T)[y_t]

and its gradients. For V = 128,256 (Llama 3) and T = 8,192, `F.cross_entropy(model(x).float(), y)` needs 2.0 GiB for
logits and 3.9 GiB for each of three fp32 tensors. Here the gradient overwrites the bf16 logits. There are two methods:

    one chunk     The logits are stored until the backward pass, which follows at once, so peak memory does not rise.
    many chunks   At most `chunk_tokens` rows of logits exist at a time. The gradients of x and W are computed in the
                  forward pass. That of W is summed in fp32 (4 V h bytes), so this saves memory only if T >> 2 h.

The GEMMs run in `compute_dtype`. Softmax, loss and sums are computed in fp32 (fp64 for fp64 inputs), by Transformer
Engine's Triton kernels if installed, else by torch in blocks of rows. The logits' gradient is in `compute_dtype`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100  # label of a position that is excluded from the loss
_ROWS_PER_BLOCK = 1024  # rows that the torch implementation casts to fp32 at a time (0.5 GiB for V = 128,256)
LOGITS_BUDGET_GIB = 4.1  # in bf16, 16,384 tokens of 128k (Llama 3) are 3.9 GiB, 8,192 tokens of 262k (Gemma 3) 4.001


def default_chunk_tokens(num_tokens: int, vocab_size: int, dtype: torch.dtype) -> int:
    """Return the number of tokens per chunk. Chunks are nearly equal, and their logits fit in `LOGITS_BUDGET_GIB`."""
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
    """Return the cross entropy of `hidden @ weight.T`, summed over supervised tokens. The result is 0-dim, fp32 (fp64
    if `compute_dtype` is fp64), and differentiable once with respect to hidden and weight.

    Args:
        hidden: `[..., h]`, floating point, the output of the last norm.
        weight: `[V, h]`, the weight of the lm_head; it may be tied to the embedding.
        labels: `[...]`, int64 on the device of `hidden`, already shifted (labels[t] is the token after t).
        softcap: c in Gemma's logits c tanh(z / c), where z is the GEMM's output. Default: no cap.
        chunk_tokens: the number of rows of logits that exist at a time. Default: `default_chunk_tokens`.
        compute_dtype: the dtype of GEMMs and logits, also under autocast. Default: the dtype of `hidden`.
    """
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    compute_dtype = compute_dtype or hidden.dtype
    chunk_tokens = chunk_tokens or default_chunk_tokens(hidden.shape[0], weight.shape[0], compute_dtype)
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()  # so that no gradient is computed
    with torch.autocast(hidden.device.type, enabled=False):
        if hidden.shape[0] <= chunk_tokens and (hidden.requires_grad or weight.requires_grad):
            return _OneChunk.apply(hidden, weight, labels, softcap, compute_dtype)
        return _ManyChunks.apply(hidden, weight, labels, softcap, chunk_tokens, compute_dtype)


class _OneChunk(torch.autograd.Function):
    """Cross entropy that stores all logits. The backward pass overwrites them with their gradient."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float | None, compute_dtype: torch.dtype
    ) -> Tensor:
        ctx.dtypes, ctx.softcap = (hidden.dtype, weight.dtype), softcap
        hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
        logits = cap_(hidden @ weight.t(), softcap)
        losses, statistics = losses_and_statistics(logits, labels)
        ctx.save_for_backward(hidden, weight, labels, logits, statistics)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, logits, statistics = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            to_gradient_(logits, statistics, labels, grad_output, ctx.softcap)
            needs_hidden, needs_weight = ctx.needs_input_grad[:2]
            grad_hidden = (logits @ weight).to(ctx.dtypes[0]) if needs_hidden else None
            grad_weight = (logits.t() @ hidden).to(ctx.dtypes[1]) if needs_weight else None
        return grad_hidden, grad_weight, None, None, None


class _ManyChunks(torch.autograd.Function):
    """Cross entropy with the logits of one chunk at a time. The forward pass computes gradients for grad_output = 1."""

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
        sum_dtype = torch.promote_types(dtype, torch.float32)
        compute_weight = weight.to(dtype)
        one = torch.ones((), dtype=sum_dtype, device=hidden.device)
        loss = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=sum_dtype, device=weight.device) if needs_weight else None
        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            rows = hidden[chunk].to(dtype)
            logits = cap_(rows @ compute_weight.t(), softcap)
            losses, statistics = losses_and_statistics(logits, labels[chunk])
            loss += losses.sum()
            if needs_hidden or needs_weight:
                to_gradient_(logits, statistics, labels[chunk], one, softcap)
            if grad_hidden is not None:
                grad_hidden[chunk] = logits @ compute_weight
            if grad_weight is not None:
                grad_weight += logits.t() @ rows
            del logits  # before the next chunk's logits are computed
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_output  # a 0-dim factor does not change the dtype
        if grad_weight is not None:
            grad_weight = torch.mul(grad_weight, grad_output, out=torch.empty_like(grad_weight, dtype=ctx.weight_dtype))
        return grad_hidden, grad_weight, None, None, None, None


def use_triton(logits: Tensor) -> bool:
    """Return True if Transformer Engine's kernels accept the contiguous `logits`: bf16 or fp32, on a GPU."""
    on_gpu = logits.is_cuda and logits.dtype in (torch.bfloat16, torch.float32) and logits.numel() > 0
    return on_gpu and importlib.util.find_spec("transformer_engine") is not None


def losses_and_statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses [T] of `logits [T, V]` (0 if ignored), and each row's maximum m and sum of exp(logit - m)."""
    if use_triton(logits):
        from transformer_engine.pytorch.triton.cross_entropy import cross_entropy_forward

        row_losses, _, row_statistics, *_ = cross_entropy_forward(
            logits.unsqueeze(0),
            labels.unsqueeze(0),
            label_smoothing=0.0,
            reduce_loss=False,
            dist_process_group=None,
            ignore_idx=IGNORE_INDEX,
            overwrite_input=True,  # avoids a copy; the forward kernel does not write to the logits
        )
        return row_losses.squeeze(0), row_statistics
    losses, statistics = [], []
    for rows, row_labels in zip(logits.split(_ROWS_PER_BLOCK), labels.split(_ROWS_PER_BLOCK), strict=True):
        ignored = row_labels == IGNORE_INDEX
        x = rows.to(torch.promote_types(logits.dtype, torch.float32))
        maximum = x.amax(dim=-1, keepdim=True)
        exp_sum = (x - maximum).exp_().sum(dim=-1, keepdim=True)
        label_logit = x.gather(-1, row_labels.masked_fill(ignored, 0)[:, None])
        losses.append((exp_sum.log() - (label_logit - maximum)).squeeze(-1).masked_fill_(ignored, 0.0))
        statistics.append(torch.cat([maximum, exp_sum], dim=-1))
    return torch.cat(losses), torch.cat(statistics)


def to_gradient_(logits: Tensor, statistics: Tensor, labels: Tensor, grad_output: Tensor, cap: float | None) -> None:
    """Overwrite `logits [T, V]` with their gradient: `grad_output` (0-dim) times (softmax - one_hot(label)), or 0 for
    ignored tokens. `statistics` come from `losses_and_statistics`. With `cap`, it is that of logits not yet capped.
    """
    slope = None if cap is None else (logits / cap).square_().neg_().add_(1)  # tanh' = 1 - tanh^2
    if use_triton(logits):
        from transformer_engine.pytorch.triton.cross_entropy import cross_entropy_backward

        cross_entropy_backward(
            logits.unsqueeze(0),
            statistics,
            labels.contiguous(),
            n_non_ignore=None,
            grad_output=grad_output.expand(logits.shape[0]),  # the kernel reads one value per row
            label_smoothing=0.0,
            reduce_loss=False,
            rank=0,
            world_size=1,
            ignore_idx=IGNORE_INDEX,
        )
        # Autograd does not notice that a Triton kernel writes. With this, a second backward pass raises an error.
        torch.autograd.graph.increment_version(logits)
    else:
        blocks = (tensor.split(_ROWS_PER_BLOCK) for tensor in (logits, statistics, labels))
        for rows, row_statistics, row_labels in zip(*blocks, strict=True):
            ignored = (row_labels == IGNORE_INDEX)[:, None]
            maximum, exp_sum = row_statistics.unbind(dim=-1)
            gradient = (rows.to(statistics.dtype) - maximum[:, None]).exp_().div_(exp_sum[:, None])
            label_column = row_labels[:, None].masked_fill(ignored, 0)
            gradient.scatter_add_(-1, label_column, torch.full_like(label_column, -1, dtype=gradient.dtype))
            rows.copy_(gradient.mul_(grad_output).masked_fill_(ignored, 0.0))
    if slope is not None:
        logits.mul_(slope)


def cap_(logits: Tensor, cap: float | None) -> Tensor:
    """Overwrite `logits` with cap tanh(logits / cap), unless `cap` is None."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
