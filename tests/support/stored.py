"""The tensors of an exported folder, and their comparison bit by bit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

CARD = {"base model": "a/b", "optimizer steps": 0}
"""Facts for the model card of an export."""


def stored_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    return {
        name: tensor for path in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Same names, dtypes and values."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name
