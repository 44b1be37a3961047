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
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import require_entries

_ENTRIES: dict[str, Any] = {
    "format": str | None,
    **dict.fromkeys(("config_groups", "config_groups.*"), dict),
    "config_groups.*.format": str | None,
    **dict.fromkeys(("config_groups.*.weights", "config_groups.*.input_activations"), dict | None),
    "config_groups.*.weights.strategy": str | None,
}
"""Of compressed-tensors."""
_FP8_WEIGHTS = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
_SCALE_DTYPES = ("F32", "BF16", "F16")


class StoredTensor(NamedTuple):
    """A tensor's entry in the header of a safetensors file, `dtype` in its words: "F32", "BF16", "F8_E4M3"."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fp8Format:
    """How the fp8 weights of a checkpoint are scaled."""

    suffix: str
    """A scale's name is that of its weight with this behind it."""
    block: tuple[int | None, int | None]
    """Rows and columns of a weight that share a scale; None: all that it has."""
    has_input_scales: bool = False
    """Scales of activations are stored too, which training does not use."""

    def describe(self) -> str:
        """For example "fp8 (e4m3) with a scale for each block of 128 x 128 values"."""
        if None not in self.block:
            return "fp8 (e4m3) with a scale for each block of {} x {} values".format(*self.block)
        return f"fp8 (e4m3) with a scale for each {'weight matrix' if self.block[0] is None else 'row'}"

    def block_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that share a scale in a weight [n, k]."""
        return self.block[0] or shape[0], self.block[1] or shape[1]

    def is_surplus(self, name: str) -> bool:
        """Whether a stored tensor is a scale, and so none of the model's."""
        return name.endswith(f".weight{self.suffix}") or (self.has_input_scales and name.endswith(".input_scale"))


def fp8_format(config: PretrainedConfig) -> Fp8Format | None:
    """How the weights that belong to `config` are stored in fp8; None where they are not quantised. Raises `UserError`
    for any other quantisation.
    """
    entries: Any = getattr(config, "quantization_config", None)
    if entries is None:
        return None
    where, outer = f"--model_name {config.name_or_path}: config.json", {"quantization_config": entries}
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
    require_entries(f"{where}: quantization_config", entries, _ENTRIES)
    for part in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        value = entries.get(part)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):  # no sparsity
            refuse(f" with {part}")
    formats = set()
    for group in entries["config_groups"].values():
        stored_as, weights = group.get("format") or entries.get("format"), group.get("weights") or {}
        blocks = {"channel": (1, None), "tensor": (None, None), "block": _block(weights.get("block_structure"))}
        strategy, inputs = weights.get("strategy", ""), group.get("input_activations")
        if stored_as != "float-quantized":
            refuse(f" with format {stored_as!r:.60}")
        block = blocks.get(strategy)
        if block is None or any(weights.get(name, value) != value for name, value in _FP8_WEIGHTS.items()):
            refuse(f" with weights of strategy {strategy!r:.60} that are not symmetric fp8")
        formats.add(Fp8Format("_scale", block, inputs is not None and not inputs.get("dynamic")))
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

    def damaged(name: str, what: str) -> UserError:
        return UserError(f"{stored[name].path}: '{name}' {what}; fetch the model again.")

    found = {}
    for name, (_, dtype, shape) in stored.items():
        if not dtype.startswith("F8"):
            continue
        if fp8 is None:
            raise damaged(name, "is fp8, and config.json has no quantization_config that says how it is scaled")
        if dtype != "F8_E4M3" or len(shape) != 2 or not name.endswith(".weight"):
            raise damaged(name, f"is {dtype} {list(shape)}, and only weight matrices in F8_E4M3 can be dequantised")
        scale, (rows, columns) = name + fp8.suffix, fp8.block_of(shape)
        if scale not in stored:
            raise damaged(name, f"is fp8, and no file holds '{scale}'")
        expected, (_, scale_dtype, scale_shape) = (-(-shape[0] // rows), -(-shape[1] // columns)), stored[scale]
        fits = scale_shape == expected or (expected == (1, 1) and scale_shape in ((), (1,)))
        if not fits or scale_dtype not in _SCALE_DTYPES:
            needs = f"its weight {list(shape)} needs {list(expected)} in one of {', '.join(_SCALE_DTYPES)}"
            raise damaged(scale, f"is {scale_dtype} {list(scale_shape)}, and {needs}")
        found[name] = scale
    if fp8 is not None:
        for name in stored:
            if name.endswith(f".weight{fp8.suffix}") and name.removesuffix(fp8.suffix) not in found:
                raise damaged(name, "is the scale of no fp8 tensor")
            if not found and name.endswith(".weight"):
                raise damaged(name, "is not fp8, nor is any other tensor, and config.json has a quantization_config")
    return found


class DequantisedRows:
    """An fp8 weight [n, k] of a file, of which `[a:b]` reads rows a to b and the scale, and gives fp32."""

    def __init__(self, rows: Any, fp8: Fp8Format, read_scale: Callable[[], Tensor]) -> None:
        self._rows, self._read_scale, self._shape = rows, read_scale, tuple(rows.get_shape())
        self._block = fp8.block_of(self._shape)

    def __getitem__(self, wanted: slice) -> Tensor:
        first, last, _ = wanted.indices(self._shape[0])
        return dequantised(self._rows[first:last], self._read_scale(), self._block, first)


def dequantised(values: Tensor, scale: Tensor, block: tuple[int, int], first: int = 0) -> Tensor:
    """fp32 weights of fp8 `values` [r, k], rows `first` to `first + r` of a weight whose blocks of `block` rows and
    columns have a `scale` each; blocks at the lower and right edge may be cut.
    """
    width, (height, columns) = values.shape[1], block
    row_blocks = torch.arange(first, first + len(values), device=values.device) // height
    scale = scale.to(torch.float32).reshape(-1, -(-width // columns))[row_blocks]
    result, whole = values.to(torch.float32), width // columns
    result[:, : whole * columns].unflatten(1, (whole, columns)).mul_(scale[:, :whole, None])
    result[:, whole * columns :].mul_(scale[:, whole:])
    return result
