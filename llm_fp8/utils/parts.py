"""Hugging Face tensors inside a model's parameters: what every decoder shares, with or without te_llama.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor


class UnsupportedArchitecture(ValueError):
    """The configuration asks for something that the decoder cannot express; the message names the entry."""


@dataclass(frozen=True)
class Part:
    """A Hugging Face tensor inside a model's: `start` to `stop` of dim 0, of shape `shape`."""

    hf_name: str
    start: int
    stop: int
    shape: tuple[int, ...]


class StoredTensor(NamedTuple):
    """A tensor's entry in the header of a safetensors file; `dtype` is "F32", "BF16", "F8_E4M3", ..."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


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
