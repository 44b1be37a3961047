"""A reference in plain torch for `llm_fp8.kernels.rope_triton.split_rope`, and the cases in which they are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def positions_of(cu_seqlens: Tensor) -> Tensor:
    """Return the position of each token in its document, int64 [T]; `cu_seqlens` is int32 [n + 1]."""
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), cu_seqlens.diff().long())
    return torch.arange(starts.shape[0], device=cu_seqlens.device) - starts


def split_rope_reference(
    fused: Tensor, angles: Tensor, num_heads: int, num_kv_heads: int, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated q and k, and v, as `split_rope` does. Compute in fp32, or in fp64 if `fused` is fp64."""
    heads = fused.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=-2)
    positions = torch.arange(fused.shape[-2], device=fused.device) if cu_seqlens is None else positions_of(cu_seqlens)
    token_angles = angles[positions, 0]  # [tokens, 1, rotary_dim]: shared by all heads and, if padded, by all rows
    return _rotate(q, token_angles), _rotate(k, token_angles), v.contiguous()


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    rotary_dim = angles.shape[-1]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    cosine, sine = (function(angles[..., : rotary_dim // 2].to(dtype)) for function in (torch.cos, torch.sin))
    first, second = x[..., :rotary_dim].to(dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), dim=-1)


@dataclass(frozen=True)
class Case:
    """Sizes of a fused q, k and v projection. Packed cases have the `lengths` of the documents, and padded cases have
    the `shape` (rows, tokens per row).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    lengths: tuple[int, ...] = ()
    shape: tuple[int, int] | None = None
    first_position: int = 0
    """Position to which the first row of `angles` belongs."""

    def angles(self, device: str | torch.device) -> Tensor:
        """Return fp32 angles [n, 1, 1, rotary_dim], where n is the length of the longest document or of a row."""
        num_positions = max(self.lengths) if self.shape is None else self.shape[1]
        positions = self.first_position + torch.arange(num_positions, dtype=torch.float32)
        frequencies = 10000.0 ** (-torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim)
        return torch.outer(positions, frequencies).repeat(1, 2)[:, None, None, :].to(device)

    def cu_seqlens(self, device: str | torch.device) -> Tensor | None:
        """Return the bounds of n packed documents, int32 [n + 1], or None in a padded case."""
        if self.shape is not None:
            return None
        return torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)

    def fused(self, dtype: torch.dtype, device: str | torch.device) -> Tensor:
        """Return random numbers in place of the fused QKV projection: packed [T, width], padded [B, S, width]."""
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        generator = torch.Generator().manual_seed(0)
        return torch.randn(*(self.shape or (sum(self.lengths),)), width, generator=generator).to(device, dtype)


CASES = {
    "Llama-3.1-8B": Case(32, 8, 128, 128, lengths=(1, 30, 1, 5)),
    "head_dim 64": Case(4, 2, 64, 64, lengths=(20, 17)),
    "head_dim 80": Case(4, 4, 80, 80, lengths=(7, 12)),
    "head_dim 256": Case(2, 1, 256, 256, lengths=(3, 2, 4)),
    "part of a head": Case(4, 2, 128, 64, lengths=(9, 12)),
    "little of a head": Case(3, 1, 80, 20, lengths=(9, 60, 1)),
    "a group of heads holds some of q and all of k": Case(28, 4, 64, 64, lengths=(11, 8)),
    "documents of one token": Case(4, 2, 64, 64, lengths=(1,) * 45),
    "empty documents": Case(4, 2, 64, 64, lengths=(0, 5, 0, 0, 6, 0)),
    "late positions": Case(4, 2, 64, 64, lengths=(30, 3), first_position=131_000),
    "padded": Case(4, 2, 64, 64, shape=(3, 37)),
    "padded, part of a head": Case(12, 2, 128, 64, shape=(2, 16)),
}

GRADIENT_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "heads before tokens": lambda x: x.transpose(-2, -3).contiguous().transpose(-2, -3),
    "columns before heads": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "inside a wider tensor": lambda x: torch.cat((x, x), dim=-2)[..., : x.shape[-2], :],
    "one head for all": lambda x: x[..., :1, :].expand_as(x),
}
"""Name -> a function that gives a gradient other strides and the same shape."""


def _assert_rounding_apart(value: Tensor, reference: Tensor, pairs: Tensor) -> None:
    """Check that `value` differs from `reference` by at most the error bound of `llm_fp8.kernels.rope_triton`. `pairs`
    are the `_pair_sizes` of the inputs.
    """
    assert (value.dtype, value.shape) == (reference.dtype, reference.shape)
    unit = 0.0 if value.dtype == torch.float32 else torch.finfo(value.dtype).eps
    allowed = unit * reference.float().abs() + 2.0**-21 * pairs
    excess = ((value.float() - reference.float()).abs() - allowed).max().item()
    assert excess <= 0, f"beyond the bound by {excess}"


def _pair_sizes(heads: Tensor, rotary_dim: int) -> Tensor:
    """For each column x of `heads` [..., heads, d], return fp32 |x| + |y| if x is rotated with a column y, else 0."""
    first, second = heads[..., :rotary_dim].float().abs().chunk(2, dim=-1)
    rest = torch.zeros_like(heads[..., rotary_dim:], dtype=torch.float32)
    return torch.cat((first + second, first + second, rest), dim=-1)


Split = Callable[[Tensor, Tensor, int, int, Tensor | None], tuple[Tensor, ...]]


def assert_same_split(
    split: Split, other: Split, case: Case, dtype: torch.dtype, layout: str, device: str | torch.device
) -> None:
    """Check that outputs and gradients of the implementations `split` and `other` differ by rounding only, and that
    unrotated columns are equal. The outputs' gradients get the memory layout `layout`, a key of `GRADIENT_LAYOUTS`.
    """
    sizes, widths = (case.num_heads, case.num_kv_heads), (case.rotary_dim, case.rotary_dim, 0)
    angles, cu_seqlens = case.angles(device), case.cu_seqlens(device)
    ours, theirs = (case.fused(dtype, device).requires_grad_() for _ in range(2))
    parts, reference = split(ours, angles, *sizes, cu_seqlens), other(theirs, angles, *sizes, cu_seqlens)
    inputs = ours.detach().unflatten(-1, (-1, case.head_dim)).split((*sizes, sizes[1]), dim=-2)
    for part, expected, source, width in zip(parts, reference, inputs, widths, strict=True):
        assert part.is_contiguous()
        _assert_rounding_apart(part, expected, _pair_sizes(source, width))
        assert torch.equal(part[..., width:], source[..., width:])
    generator = torch.Generator().manual_seed(1)
    contiguous_gradients = [torch.randn(part.shape, generator=generator).to(device, dtype) for part in parts]
    gradients = [GRADIENT_LAYOUTS[layout](gradient) for gradient in contiguous_gradients]
    torch.autograd.backward(parts, gradients)
    torch.autograd.backward(reference, gradients)
    pairs = torch.cat([_pair_sizes(g, width) for g, width in zip(gradients, widths, strict=True)], dim=-2)
    gradient, expected = (leaf.grad.unflatten(-1, (-1, case.head_dim)) for leaf in (ours, theirs))
    _assert_rounding_apart(gradient, expected, pairs)
