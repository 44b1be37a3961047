"""fp8 for Hugging Face architectures: `nn.Linear` swapped for TE's or torchao's.

Without --use_te the decoder stays Hugging Face's and only its linear layers change. Parameters stay the same objects,
so tied weights stay tied, checkpoints keep their names and optimizers their parameters. Left alone are embedding and
lm_head, whose rounding would go straight into the loss, routers and the experts that they choose, and layers whose
sizes the recipe's fp8 GEMMs cannot take.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from llm_fp8.config.options import PrecisionConfig, names_in
from llm_fp8.config.recipes import FP8_SIZE_MULTIPLE
from llm_fp8.models.build import read_by_kernels
from llm_fp8.models.experts import routed_modules
from llm_fp8.precision.modules import linear_weights, never_in_fp8, size_misfit
from llm_fp8.precision.torchao import converted_modules
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.te_internals import require_te


def bf16_modules(options: PrecisionConfig, model: nn.Module, decoder_layers: nn.ModuleList) -> list[nn.Module]:
    """The modules that --fp8_bf16_modules keeps in bf16 with all that is inside them.

    A pattern is a decoder layer or a slice of them (`layers.0`, `layers.-4:`), or the end of the name of a module in
    one, in which `*` and `?` stand for any characters. Raises `UserError` for a pattern that names none.
    """
    kept: list[nn.Module] = []
    inside = {module for layer in decoder_layers for module in layer.modules()}
    inside = {module for module in inside if any(map(linear_weights, module.modules()))}
    names = {name: module for name, module in model.named_modules() if module in inside}
    for pattern in names_in(options.fp8_bf16_modules):
        found = _slice_of(pattern, decoder_layers)
        if found is None:
            found = [module for name, module in names.items() if fnmatchcase(f".{name}", f"*.{pattern}")]
        if not found:
            first_layer = [name for name in names if re.search(r"\.0\.", name)]
            raise UserError(f"--fp8_bf16_modules {pattern}: no such module; layer 0 has {', '.join(first_layer)}.")
        kept += found
    return kept


def _slice_of(pattern: str, decoder_layers: nn.ModuleList) -> list[nn.Module] | None:
    """The decoder layers that `layers.2`, `layers.-1` or `layers.2:5` means; None for another pattern."""
    match = re.fullmatch(r"layers\.(?:(-?\d+)|(-?\d+)?:(-?\d+)?)", pattern)
    if match is None:
        return None
    single, first, last = (None if number is None else int(number) for number in match.groups())
    if single is not None:
        first, last = single, single + 1 or None
    return list(decoder_layers[first:last])


def swap_linears(model: nn.Module, size_multiple: int = FP8_SIZE_MULTIPLE) -> dict[str, str]:
    """Replace the `nn.Linear` modules of `model` by TE's in place; returns name -> reason for each one left alone."""
    te = require_te("--mixed_precision fp8")

    class SwappedLinear(te.Linear):  # type: ignore[name-defined]
        """te.Linear, called like nn.Linear; `is_first_microbatch` is an attribute, as in te_llama.TEDecoderLayer."""

        is_first_microbatch: bool | None = None

        def forward(self, inputs: Any) -> Any:
            return super().forward(inputs, is_first_microbatch=self.is_first_microbatch)

    left = linears_left(model, size_multiple)
    for name, linear in plain_linears(model).items():
        if name in left:
            continue
        swapped = SwappedLinear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=linear.weight.dtype,
            device="meta",
        )
        swapped.weight = linear.weight
        if linear.bias is not None:
            swapped.bias = linear.bias
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, swapped)
    return left


def convert_with_torchao(model: nn.Module, config: Any, left_in_bf16: Iterable[nn.Module] = ()) -> dict[str, str]:
    """Replace the `nn.Linear` modules of `model` by torchao's in place, except in `left_in_bf16`; returns name ->
    reason for each one left alone. `config`: a `Float8LinearConfig`.
    """
    from torchao.float8 import convert_to_float8_training

    kept = {inner for module in left_in_bf16 for inner in module.modules()}
    linears = plain_linears(model)
    left = {name: "kept in bf16" for name, linear in linears.items() if linear in kept} | linears_left(model)
    chosen = linears.keys() - left.keys()
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)
    if config.emulate:
        for module in converted_modules(model).values():
            module.register_forward_pre_hook(_cast_input)
    return left


def _cast_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Cast the input to the CPU autocast's dtype; torchao itself looks at the GPU's autocast only."""
    device_type = inputs[0].device.type
    if device_type == "cuda" or not torch.is_autocast_enabled(device_type):
        return None
    return (inputs[0].to(torch.get_autocast_dtype(device_type)), *inputs[1:])


def plain_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Name -> `nn.Linear`; a subclass returns something else, as a router does."""
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}


def linears_left(model: nn.Module, size_multiple: int = FP8_SIZE_MULTIPLE) -> dict[str, str]:
    """Name of each `nn.Linear` that an fp8 run leaves as it is -> why."""
    by_kind = {module: routed.reason for module, routed in routed_modules(model).items()}
    by_kind |= dict.fromkeys(read_by_kernels(model).values(), "weight is read by Mamba's kernel")
    by_name, left = never_in_fp8(model), dict[str, str]()
    for name, linear in plain_linears(model).items():
        if reason := by_kind.get(linear) or by_name.get(name) or size_misfit(linear, size_multiple):
            left[name] = reason
    return left
