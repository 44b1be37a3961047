"""Fp8 coverage: the linear layers in fp8, the other layers with a reason, and the fraction of linear FLOPs in fp8.

These layers never run in fp8: embedding and lm_head (since their rounding would affect the loss directly), adapters,
routers, routed experts, and layers whose sizes the fp8 GEMMs of the recipe do not support.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from llm_fp8.config.options import PrecisionConfig, names_in
from llm_fp8.config.recipes import FP8_SIZE_MULTIPLE, GEMMS
from llm_fp8.models.build import read_by_kernels
from llm_fp8.models.experts import Routed, expert_weights, routed_modules
from llm_fp8.models.model import Model, is_adapter
from llm_fp8.utils.errors import UserError

_HEAD_NAMES = ("lm_head", "embed_out", "output_layer", "score", "classifier")  # last component of the module name


@dataclass(frozen=True)
class ModuleState:
    """Counts of the linear modules of `library`, read from the fp8 state that each module has after the last step."""

    num_modules: int = 0
    num_in_fp8: int = 0  # modules whose last forward pass ran in fp8
    num_recipe_unreadable: int = 0  # modules in fp8 with a recipe that cannot be identified
    recipes: dict[str, int] = field(default_factory=dict)  # name of a recipe -> number of modules
    formats: dict[str, int] = field(default_factory=dict)  # format of a Transformer Engine recipe -> number of modules
    num_without_amax: int = 0  # modules whose amax history is empty after the step
    library: str = "Transformer Engine"

    @property
    def num_outside_fp8(self) -> int:
        """Number of modules whose last forward pass did not run in fp8."""
        return self.num_modules - self.num_in_fp8


@dataclass(frozen=True)
class Fp8Coverage:
    """Counts of the linear weights in fp8 and of all linear weights. A GEMM has 2 FLOPs per token and weight element.
    In a mixture of experts, FLOPs include only the experts that a token uses.
    """

    num_fp8_weights: int  # number of elements of weights in fp8
    num_linear_weights: int  # number of elements of all linear weights, including lm_head (tied or not) and all experts
    converted: dict[str, int]  # name pattern (layer numbers as *) -> number of modules in fp8
    skipped: dict[str, str]  # name pattern -> number of modules, their dtype, and the reason
    num_fp8_gemms: int  # per micro-batch, without recomputation: 3 per trained weight, fewer per frozen weight
    linear_flops_per_token: float
    fp8_linear_flop_share: float  # fraction of linear_flops_per_token in fp8, 0 to 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for run.json."""
        names = ("fp8_linear_flop_share", "num_fp8_weights", "num_linear_weights", "converted", "skipped")
        return {name: getattr(self, name) for name in names}

    def describe(self) -> str:
        """Describe the coverage in lines for the terminal, or in a single line if nothing is in fp8."""
        if not self.num_fp8_weights:
            return "linear layers in fp8: none"
        lines = [f"linear layers in fp8: {self.fp8_linear_flop_share:.1%} of linear FLOPs"]
        lines += [f"  fp8   {pattern} x {count}" for pattern, count in self.converted.items()]
        lines += [f"  other {pattern} x {reason}" for pattern, reason in self.skipped.items()]
        return "\n".join(lines)


def measure_coverage(
    model: nn.Module,
    fp8_modules: Iterable[nn.Module],
    compute: str,
    reasons: dict[str, str],
    gemms: Mapping[nn.Module, int] = MappingProxyType({}),
    gemms_in_fp8: tuple[str, ...] = GEMMS,
) -> Fp8Coverage:
    """Count the linear weights of `model` after conversion. GEMMs of `fp8_modules` run in fp8, all others in `compute`.

    `reasons` is module name -> reason why it is not in fp8. See `gemms_per_weight`; `gemms_in_fp8` is the recipe's.
    """
    in_fp8, routed, reasons = set(fp8_modules), routed_modules(model), never_in_fp8(model) | reasons
    converted: Counter[str] = Counter()
    skipped: Counter[tuple[str, str]] = Counter()
    num_fp8 = num_all = num_fp8_gemms = fp8_gemm_elements = 0
    all_gemm_elements = 0.0
    for name, module in model.named_modules():
        weights = linear_weights(module) or expert_weights(module)
        if not weights:
            continue
        share, routed_reason = routed.get(module, Routed(1.0, ""))
        size = sum(weight.numel() for weight in weights)
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        num_all += size
        num_gemms = gemms.get(module, len(GEMMS))
        all_gemm_elements += share * size * num_gemms
        if module in in_fp8:
            num_fp8 += size
            num_gemms_in_fp8 = len({*GEMMS[:num_gemms]}.intersection(gemms_in_fp8))
            num_fp8_gemms += len(weights) * num_gemms_in_fp8
            fp8_gemm_elements += size * num_gemms_in_fp8
            converted[pattern] += 1
        else:
            reason = routed_reason or reasons.get(name, "")
            skipped[pattern, f"{compute}{f' ({reason})' if reason else ''}"] += 1
    return Fp8Coverage(
        num_fp8_weights=num_fp8,
        num_linear_weights=num_all,
        num_fp8_gemms=num_fp8_gemms,
        linear_flops_per_token=2.0 * all_gemm_elements,
        fp8_linear_flop_share=fp8_gemm_elements / all_gemm_elements,
        converted=dict(converted),
        skipped={pattern: f"{count} {reason}" for (pattern, reason), count in skipped.items()},
    )


def gemms_per_weight(model: Model) -> dict[nn.Module, int]:
    """Return the minimum number of GEMMs per weight and micro-batch of each frozen module, without recomputation: 2
    (fprop and dgrad), or 1 (fprop) if no earlier layer has an adapter. The result is empty if there are no adapters.
    """
    module, layers = model.module, list(model.layers)
    adapted = [any(is_adapter(name) for name, _ in layer.named_modules()) for layer in layers]
    if True not in adapted:
        return {}
    later_layers = layers[adapted.index(True) + 1 :]
    above = {part for layer in later_layers for part in layer.modules()} | {module.get_output_embeddings()}
    return {part: 1 + (part in above) for name, part in module.named_modules() if not is_adapter(name)}


def linear_weights(module: nn.Module) -> list[Tensor]:
    """Return the GEMM weights [out, in] of a linear module (torch's or TE's) or an adapter. Ignore its submodules."""
    if hasattr(module, "base_layer"):
        return []  # the `weight` of PEFT's wrapper is that of the wrapped layer
    if hasattr(module, "gemm_weights"):
        return module.gemm_weights  # type: ignore[return-value]
    if hasattr(module, "fc1_weight"):
        return [module.fc1_weight, module.fc2_weight]  # type: ignore[list-item]
    return [module.weight] if hasattr(module, "in_features") else []  # type: ignore[list-item]


def never_in_fp8(model: nn.Module) -> dict[str, str]:
    """Return module name -> "adapter" or "lm_head" for adapters and lm_head in `model`."""
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    kinds = dict[str, str]()
    for name, module in model.named_modules():
        if is_adapter(name):
            kinds[name] = "adapter"
        elif module is outputs or name.rpartition(".")[2] in _HEAD_NAMES:
            kinds[name] = "lm_head"
    return kinds


def size_misfit(module: nn.Module, multiple: int) -> str | None:
    """Return the reason why fp8 GEMMs do not support the module's sizes, or None if `multiple` divides all sizes."""
    for out_features, in_features in (weight.shape for weight in linear_weights(module)):
        if in_features % multiple or out_features % multiple:
            return f"size {in_features} x {out_features} is not a multiple of {multiple}"
    return None


def plain_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Return name -> `nn.Linear`. Subclasses are excluded, since some compute another function, such as routers."""
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}


def linears_left(model: nn.Module, size_multiple: int = FP8_SIZE_MULTIPLE) -> dict[str, str]:
    """Return name -> reason for each `nn.Linear` that an fp8 run does not convert."""
    by_kind = {module: routed.reason for module, routed in routed_modules(model).items()}
    by_kind |= dict.fromkeys(read_by_kernels(model).values(), "weight is read by Mamba's kernel")
    by_name, left = never_in_fp8(model), dict[str, str]()
    for name, linear in plain_linears(model).items():
        if reason := by_kind.get(linear) or by_name.get(name) or size_misfit(linear, size_multiple):
            left[name] = reason
    return left


def bf16_modules(options: PrecisionConfig, model: nn.Module, decoder_layers: nn.ModuleList) -> list[nn.Module]:
    """Return the modules that --fp8_bf16_modules selects. They and their submodules stay in bf16.

    A pattern is a decoder layer (`layers.0`), a slice of layers (`layers.-4:`), or the end of a module's name. In names
    `*` matches any characters and `?` one. Only modules of decoder layers match. Raise `UserError` if none does.
    """
    modules: list[nn.Module] = []
    inside = {module for layer in decoder_layers for module in layer.modules()}
    inside = {module for module in inside if any(map(linear_weights, module.modules()))}
    names = {name: module for name, module in model.named_modules() if module in inside}
    for pattern in names_in(options.fp8_bf16_modules):
        matches = _slice_of(pattern, decoder_layers)
        if matches is None:
            matches = [module for name, module in names.items() if fnmatchcase(f".{name}", f"*.{pattern}")]
        if not matches:
            first_layer = [name for name in names if re.search(r"\.0\.", name)]
            raise UserError(f"--fp8_bf16_modules {pattern}: no such module; layer 0 has {', '.join(first_layer)}.")
        modules += matches
    return modules


def _slice_of(pattern: str, decoder_layers: nn.ModuleList) -> list[nn.Module] | None:
    """Return the decoder layers for a `pattern` like layers.2, layers.-1 or layers.2:5, or None for other patterns."""
    match = re.fullmatch(r"layers\.(?:(-?\d+)|(-?\d+)?:(-?\d+)?)", pattern)
    if match is None:
        return None
    single, first, last = (None if number is None else int(number) for number in match.groups())
    if single is not None:
        first, last = single, single + 1 or None
    return list(decoder_layers[first:last])
