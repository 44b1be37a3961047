"""Checkpoints stored in fp8 (e4m3) with scales: which are known, and how their weights become fp32.

    quant_method        scale of `X.weight` [n, k]                                         one scale for
    fp8                 `X.weight_scale_inv` [ceil(n / b0), ceil(k / b1)]                  a block of b0 x b1 values
    compressed-tensors  `X.weight_scale` [n, 1], [1] or [ceil(n / b0), ceil(k / b1)]       a row, a matrix or a block

A weight is the fp32 product of its fp8 value and its scale (`scale_inv` names the same factor), rounded afterwards like
any fp32 checkpoint. Scales are fp32, bf16 or fp16. Everything else that a `quantization_config` can ask for is refused.
Sources: transformers 5.23 (`integrations/finegrained_fp8.py`), compressed-tensors 0.20 (`float-quantized`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import require_entries

_GROUP = "config_groups.*."
_COMPRESSED_TENSORS: dict[str, Any] = {
    "format": str | None,
    "config_groups": dict,
    "config_groups.*": dict,
    f"{_GROUP}format": str | None,
    f"{_GROUP}weights": dict | None,
    f"{_GROUP}weights.strategy": str | None,
    f"{_GROUP}weights.block_structure": list | None,
    f"{_GROUP}input_activations": dict | None,
}
_FP8_WEIGHTS = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
"""Entries of a group's `weights`, which may be absent where compressed-tensors' default is the same."""
_UNKNOWN_PARTS = ("kv_cache_scheme", "sparsity_config", "transform_config")
_SCALE_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's entry in the header of a safetensors file."""

    path: Path
    dtype: str
    """In safetensors' words: "F32", "BF16", "F8_E4M3"."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fp8Format:
    """How the fp8 weights of a checkpoint are scaled."""

    scale_suffix: str
    """A scale's name is that of its weight with this behind it."""
    block: tuple[int | None, int | None]
    """Rows and columns of a weight that share a scale; None: all that it has."""
    has_input_scales: bool = False
    """Scales of activations are stored too, which training does not use."""

    def describe(self) -> str:
        """For example "fp8 (e4m3) with a scale for each block of 128 x 128 values"."""
        rows, columns = self.block
        shared = (
            "weight matrix" if rows is None else "row" if columns is None else f"block of {rows} x {columns} values"
        )
        return f"fp8 (e4m3) with a scale for each {shared}"

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that share a scale in a weight [n, k]."""
        return self.block[0] or shape[0], self.block[1] or shape[1]

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The shape of the scale of a weight [n, k]."""
        rows, columns = self.block_of(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)


def fp8_format(config: PretrainedConfig) -> Fp8Format | None:
    """How the weights that belong to `config` are stored in fp8; None where they are not quantised. Raises `UserError`
    for any other quantisation.
    """
    entries: Any = getattr(config, "quantization_config", None)
    if entries is None:
        return None
    where = f"--model_name {config.name_or_path}: quantization_config of its config.json"
    outer = {"quantization_config": entries}
    require_entries(where, outer, {"quantization_config": dict, "quantization_config.quant_method": str | None})
    method = entries.get("quant_method") or "a method without a name"

    def refuse(what: str = "") -> NoReturn:
        raise UserError(
            f"--model_name {config.name_or_path} holds quantised weights ({method}{what} in the quantization_config of "
            "its config.json), which cannot be trained; give the unquantised model, or one in fp8 that "
            "docs/data_and_checkpoints.md names."
        )

    if method == "fp8":
        if entries.get("fmt", "e4m3") != "e4m3":
            refuse(f" with fmt {entries['fmt']!r:.60}")
        return Fp8Format("_scale_inv", _block(entries.get("weight_block_size")) or refuse(" without weight_block_size"))
    if method != "compressed-tensors":
        refuse()
    require_entries(where, entries, _COMPRESSED_TENSORS)
    for part in _UNKNOWN_PARTS:
        value = entries.get(part)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):  # no sparsity
            refuse(f" with {part}")
    formats = set()
    for group in entries["config_groups"].values():
        stored_as, weights = group.get("format") or entries.get("format"), group.get("weights") or {}
        strategy = weights.get("strategy")
        block = {"channel": (1, None), "tensor": (None, None), "block": _block(weights.get("block_structure"))}.get(
            str(strategy)
        )
        if stored_as != "float-quantized":
            refuse(f" with format {stored_as!r:.60}")
        if block is None or any(weights.get(name, value) != value for name, value in _FP8_WEIGHTS.items()):
            refuse(f" with weights of strategy {strategy!r:.60} that are not symmetric fp8")
        inputs = group.get("input_activations")
        formats.add(Fp8Format("_scale", block, inputs is not None and not inputs.get("dynamic", False)))
    if len(formats) != 1:
        refuse(" with config_groups of several kinds")
    return formats.pop()


def _block(sizes: Any) -> tuple[int, int] | None:
    """Rows and columns of a block; None where `sizes` are no two positive whole numbers."""
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        return None
    return sizes[0], sizes[1]


def scales_of(fp8: Fp8Format | None, stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Name of each fp8 weight of a checkpoint -> name of its scale. Raises `UserError` naming file and tensor where a
    scale is missing, left over, or of a wrong dtype or shape, and where a tensor is fp8 and the config names no scales.
    """
    found = {}
    for name, tensor in stored.items():
        if not tensor.dtype.startswith("F8"):
            continue
        if fp8 is None:
            raise UserError(
                f"{tensor.path}: '{name}' is fp8, and config.json has no quantization_config that says how it is "
                "scaled; fetch the model again."
            )
        if tensor.dtype != "F8_E4M3" or len(tensor.shape) != 2 or not name.endswith(".weight"):
            raise UserError(
                f"{tensor.path}: '{name}' is {tensor.dtype} {list(tensor.shape)}, and only weight matrices in F8_E4M3 "
                "can be dequantised; give the unquantised model."
            )
        scale = name + fp8.scale_suffix
        if scale not in stored:
            raise UserError(f"{tensor.path}: '{name}' is fp8, and no file holds '{scale}'; fetch the model again.")
        found[name] = scale
    if fp8 is None:
        return found
    scales = {scale: name for name, scale in found.items()}
    for name, tensor in stored.items():
        if name in scales:
            _check_scale(fp8, name, tensor, stored[scales[name]].shape)
        elif name.endswith(f".weight{fp8.scale_suffix}"):
            raise UserError(f"{tensor.path}: '{name}' is the scale of no fp8 tensor; fetch the model again.")
    if not found:
        folder = next(iter(stored.values())).path.parent if stored else "the checkpoint"
        raise UserError(
            f"{folder}: config.json has a quantization_config, and no tensor is fp8; remove the entry if the weights "
            "were dequantised, else fetch the model again."
        )
    return found


def _check_scale(fp8: Fp8Format, name: str, tensor: StoredTensor, weight_shape: tuple[int, ...]) -> None:
    expected = fp8.scale_shape(weight_shape)
    fits = tensor.shape == expected or (expected == (1, 1) and tensor.shape in ((), (1,)))
    if not fits or tensor.dtype not in _SCALE_DTYPES:
        raise UserError(
            f"{tensor.path}: '{name}' is {tensor.dtype} {list(tensor.shape)}, and its weight {list(weight_shape)} "
            f"needs {list(expected)} in one of {', '.join(_SCALE_DTYPES)}; fetch the model again."
        )


def is_surplus(fp8: Fp8Format | None, name: str) -> bool:
    """Whether a stored tensor is none of the model: a scale, which `scales_of` has checked."""
    if fp8 is None:
        return False
    return name.endswith(f".weight{fp8.scale_suffix}") or (fp8.has_input_scales and name.endswith(".input_scale"))


class DequantisedRows:
    """An fp8 weight [n, k] of a file whose rows are read as fp32: `rows[a:b]` reads the fp8 values of rows a to b and
    the scale. `read_scale` raises `UserError` where that is damaged.
    """

    def __init__(self, rows: Any, fp8: Fp8Format, read_scale: Callable[[], Tensor]) -> None:
        self._rows, self._read_scale = rows, read_scale
        self.shape: tuple[int, ...] = tuple(rows.get_shape())
        self._block = fp8.block_of(self.shape)

    def __getitem__(self, wanted: slice) -> Tensor:
        first, last, _ = wanted.indices(self.shape[0])
        return dequantised(self._rows[first:last], self._read_scale(), self._block, first)


def dequantised(values: Tensor, scale: Tensor, block: tuple[int, int], first: int = 0) -> Tensor:
    """fp32 weights of fp8 `values` [r, k], rows `first` to `first + r` of a weight whose blocks of `block` rows and
    columns have a `scale` each; blocks at the lower and right edge may be cut.
    """
    width, (height, columns) = values.shape[1], block
    row_blocks = torch.arange(first, first + len(values), device=values.device) // height
    scale = scale.to(torch.float32).reshape(-1, -(-width // columns))[row_blocks]
    result = values.to(torch.float32)
    whole = width // columns
    result[:, : whole * columns].unflatten(1, (whole, columns)).mul_(scale[:, :whole, None])
    result[:, whole * columns :].mul_(scale[:, whole:])
    return result
