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
from llm_fp8.models.weight_shards import is_adapter
from llm_fp8.precision.modules import HEAD_NAMES, linear_weights, lm_head_of, size_misfit
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

    left, head, by_kind = dict[str, str](), lm_head_of(model), _left_by_kind(model)
    for name, linear in [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]:
        reason = by_kind.get(linear) or reason_to_leave(name, linear, head, size_multiple)
        if reason:
            left[name] = reason
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

    left, head, by_kind = dict[str, str](), lm_head_of(model), _left_by_kind(model)
    kept = {inner for module in left_in_bf16 for inner in module.modules()}

    def converts(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear:
            return False
        reason = by_kind.get(module) or reason_to_leave(name, module, head)
        if reason := reason or ("kept in bf16" if module in kept else None):
            left[name] = reason
        return reason is None

    convert_to_float8_training(model, config=config, module_filter_fn=converts)
    if config.emulate:
        for module in converted_modules(model).values():
            module.register_forward_pre_hook(_cast_input)
    return left


def _left_by_kind(model: nn.Module) -> dict[nn.Module, str]:
    """Modules that an fp8 run leaves alone for what they do -> why."""
    reasons = {module: routed.reason for module, routed in routed_modules(model).items()}
    return reasons | dict.fromkeys(read_by_kernels(model).values(), "weight is read by Mamba's kernel")


def _cast_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Cast the input to the CPU autocast's dtype; torchao itself looks at the GPU's autocast only."""
    device_type = inputs[0].device.type
    if device_type == "cuda" or not torch.is_autocast_enabled(device_type):
        return None
    return (inputs[0].to(torch.get_autocast_dtype(device_type)), *inputs[1:])


def reason_to_leave(
    name: str, linear: nn.Linear, head: nn.Module | None, size_multiple: int = FP8_SIZE_MULTIPLE
) -> str | None:
    """Why an fp8 run leaves this layer as it is; None where it is swapped. `head`: of `lm_head_of`."""
    if is_adapter(name):
        return "adapter"
    if linear is head or name.rpartition(".")[2] in HEAD_NAMES:
        return "lm_head"
    return size_misfit(linear, size_multiple)
