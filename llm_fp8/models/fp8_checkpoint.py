"""Checkpoints stored in fp8 (e4m3) with scales: supported formats, and conversion of the weights to fp32.

    quant_method        name and shape of the scale of `X.weight` [n, k]                   one scale per
    fp8                 `X.weight_scale_inv` [ceil(n / b0), ceil(k / b1)]                  block of b0 x b1 values
    compressed-tensors  `X.weight_scale` [n, 1], [1] or [ceil(n / b0), ceil(k / b1)]       row, matrix or block

The fp32 weight is the fp8 value times its scale. Any other quantisation raises `UserError`.
Sources: transformers 5.23 (`integrations/finegrained_fp8.py`), compressed-tensors 0.20 (`float-quantized`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from llm_fp8.utils.errors import reading


@dataclass(frozen=True)
class Fp8Format:
    """Scaling of a checkpoint's fp8 weights."""

    suffix: str  # the name of a scale is the name of its weight plus this suffix
    block: tuple[int | None, int | None]  # number of rows and columns that share a scale; None for all

    def describe(self) -> str:
        """Return a description such as "fp8 (e4m3) with a scale for each block of 128 x 128 values"."""
        if None not in self.block:
            return "fp8 (e4m3) with a scale for each block of {} x {} values".format(*self.block)
        return f"fp8 (e4m3) with a scale for each {'weight matrix' if self.block[0] is None else 'row'}"


def fp8_format(config: PretrainedConfig) -> Fp8Format:
    """Return the fp8 format that a quantised model's config describes. Raise `UserError` for unsupported formats."""
    entries: Any = config.quantization_config
    advice = "Give the unquantised model, or an fp8 model in a format that docs/data_and_checkpoints.md lists."
    with reading("--model_name", config.name_or_path, "the quantised weights that its config.json describes", advice):
        if entries["quant_method"] == "fp8":
            return Fp8Format("_scale_inv", tuple(entries["weight_block_size"]))
        if entries["quant_method"] != "compressed-tensors":
            raise ValueError(f"quant_method {entries['quant_method']}")
        if entries.get("transform_config"):
            raise ValueError("transform_config")
        blocks = set()
        for group in entries["config_groups"].values():
            stored_as, weights = group.get("format") or entries["format"], group["weights"]
            if stored_as != "float-quantized":
                raise ValueError(f"format {stored_as}")
            shared = {"channel": (1, None), "tensor": (None, None), "block": weights.get("block_structure")}
            blocks.add(tuple(shared[weights["strategy"]]))
        if len(blocks) != 1:
            raise ValueError("config_groups of several kinds")
        return Fp8Format("_scale", blocks.pop())


class DequantisedRows:
    """An fp8 weight [n, k] in a file, with its scale. `[a:b]` reads rows a to b as fp32."""

    def __init__(self, rows: Any, fp8: Fp8Format, scale: Tensor) -> None:
        self._rows, (height, width) = rows, rows.get_shape()
        self._block = fp8.block[0] or height, fp8.block[1] or width
        self._scale = scale.reshape(-(-height // self._block[0]), -(-width // self._block[1]))

    def __getitem__(self, rows: slice) -> Tensor:
        return dequantised(self._rows[rows], self._scale, self._block, rows.start or 0)


def dequantised(values: Tensor, scale: Tensor, block: tuple[int, int], first: int = 0) -> Tensor:
    """Return the fp32 weights for fp8 `values` [r, k], which are rows `first` to `first + r` of a weight. `scale` has
    one number for each block of the whole weight. `block` is (rows, columns); blocks at the edges may be smaller.
    """
    row_blocks = torch.arange(first, first + len(values), device=values.device) // block[0]
    scales = scale.to(torch.float32)[row_blocks].repeat_interleave(block[1], dim=1)[:, : values.shape[1]]
    return values.to(torch.float32).mul_(scales)
