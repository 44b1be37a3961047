"""Writes models with fp8 weights, and copies of them in fp32 with the same values, without the package's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.small import write_model

KINDS = ("block", "uneven block", "channel", "tensor", "compressed block")
_BLOCKS = {"block": (128, 128), "uneven block": (20, 12), "compressed block": (16, 24)}


def quantization_config(kind: str) -> dict[str, Any]:
    """Return the `quantization_config` entry of config.json for weights of a `kind` in `KINDS`."""
    block = list(_BLOCKS.get(kind, ()))
    if kind in ("block", "uneven block"):
        return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    weights = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False, "strategy": kind}
    if kind == "compressed block":
        weights |= {"strategy": "block", "block_structure": block}
    inputs = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def quantise(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix's e4m3 values and scales. A scale is 1.1 * amax / 448, so that it is not a power of two."""
    rows, columns = {"channel": (1, weight.shape[1]), "tensor": weight.shape}.get(kind) or _BLOCKS[kind]
    scale = torch.stack(
        [
            torch.stack([block.abs().max() / 448 * 1.1 for block in band.split(columns, 1)])
            for band in weight.split(rows, 0)
        ]
    )
    values = (weight.double() / expanded_scale(scale, weight.shape, (rows, columns))).to(torch.float8_e4m3fn)
    return values, scale.reshape(1) if kind == "tensor" else scale


def expanded_scale(scale: torch.Tensor, shape: torch.Size, block: tuple[int, ...]) -> torch.Tensor:
    """Return an fp64 matrix [*shape] with the scale of each value. `scale` has one entry per block of shape `block`."""
    row_blocks = scale.double().reshape(-(-shape[0] // block[0]), -1)
    return row_blocks.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def write_fp8_model(folder: Path, kind: str, max_shard_size: str = "1GB", **changes: Any) -> tuple[str, str]:
    """Write the model of `tiny_config(**changes)` with fp8 weights of `kind`, and an fp32 copy. Return both folders."""
    plain, fp8 = folder / "plain", folder / "fp8"
    for path in (plain, fp8):
        write_model(path, max_shard_size=max_shard_size, **changes)
    suffix = "_scale_inv" if kind in ("block", "uneven block") else "_scale"
    weight_map = {}
    for file in sorted(fp8.glob("*.safetensors")):
        stored, dequantised = load_file(file), load_file(plain / file.name)
        for name in [name for name in stored if name.endswith("_proj.weight")]:
            values, scale = quantise(stored[name], kind)
            if kind == "channel":
                scale = scale.to(torch.bfloat16)  # compressed-tensors writes scales in the model's dtype
            block = _BLOCKS.get(kind) or ((1, values.shape[1]) if kind == "channel" else values.shape)
            dequantised[name] = (values.double() * expanded_scale(scale, values.shape, block)).float()
            stored[name], stored[name + suffix] = values, scale.contiguous()
        save_file(stored, file, metadata={"format": "pt"})
        save_file(dequantised, plain / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(stored, file.name)
    if (index := fp8 / "model.safetensors.index.json").exists():
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    set_quantization(fp8, quantization_config(kind))
    return str(fp8), str(plain)


def set_quantization(folder: str | Path, entries: Any) -> None:
    """Set `quantization_config` in the config.json of `folder` to `entries`."""
    path = Path(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": entries}))
