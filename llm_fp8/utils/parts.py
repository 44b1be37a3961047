"""Hugging Face tensors inside a model's parameters: what every decoder shares, with or without te_llama.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class UnsupportedArchitecture(ValueError):
    """The configuration asks for something that the decoder cannot express; the message names the entry."""


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor inside a model's: `start` to `stop` of dim 0, of shape `shape`. With `strides` it is a view
    of these rows, from their element `offset` on: of a single row, or with its own dim 0 along the rows.
    """

    hf_name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    offset: int = 0

    @property
    def by_rows(self) -> bool:
        """Whether each of the rows is one of the tensor's own."""
        return self.strides is None or self.stop - self.start > 1

    def view(self, rows: Tensor) -> Tensor:
        """The tensor, or its part, in `rows`: contiguous rows of the model's tensor, from `start` to `stop`."""
        if self.strides is None:
            return rows
        shape = (len(rows), *self.shape[1:]) if self.by_rows else self.shape
        return rows.as_strided(shape, self.strides, rows.storage_offset() + self.offset)


class StoredTensor(NamedTuple):
    """A tensor's entry in the header of a safetensors file; `dtype` is "F32", "BF16", "F8_E4M3", ..."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def num_positions(config: Any) -> int | None:
    """How many positions a language model's config allows: max_position_embeddings, or what RoPE's scaling makes of the
    length before it (`factor` times), if that is more; None where it states no limit.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    given = getattr(config, "rope_parameters", None) or {}
    scalings = [part for part in (given, *given.values()) if isinstance(part, dict) and part.get("factor")]
    if limit is None:
        return None
    return max(limit, *(int(s["factor"] * (s.get("original_max_position_embeddings") or limit)) for s in scalings), 0)


@torch.no_grad()
def random_(parameter: Tensor, name: str, std: float, generator: torch.Generator) -> None:
    """Random weights for an unsharded parameter, as Hugging Face draws them for the Llama family: normal with standard
    deviation `std`, norms one, biases zero.
    """
    if name.endswith("bias"):
        parameter.zero_()
    elif parameter.ndim == 1:
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, std, generator=generator)
