"""Fp8 coverage: which linear layers run in fp8, which do not and why, and their shares of the linear FLOPs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from llm_fp8.models.experts import Routed, expert_weights, routed_modules
from llm_fp8.precision.modules import GEMMS_PER_WEIGHT, linear_weights, never_in_fp8


@dataclass(frozen=True)
class Fp8Coverage:
    """Which linear weights compute in fp8. A GEMM takes 2 FLOPs per token and weight element; of a mixture of experts
    the elements that compute a token count.
    """

    num_fp8_weights: int
    """Elements of the weights of modules in fp8; lm_head never counts."""
    num_linear_weights: int
    """Elements of all linear weights, lm_head (also where it is the tied embedding) and every expert included."""
    converted: dict[str, int]
    """Name pattern (layer numbers as *) -> number of modules in fp8."""
    skipped: dict[str, str]
    """Name pattern -> number of modules, what they compute in, and why."""
    fp8_flops_per_token: float
    """FLOPs of the GEMMs in fp8 (3 per trained weight, fewer per frozen one)."""
    linear_flops_per_token: float

    @property
    def fp8_linear_flop_share(self) -> float:
        """0 to 1."""
        return self.fp8_flops_per_token / self.linear_flops_per_token

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        names = ("fp8_linear_flop_share", "num_fp8_weights", "num_linear_weights", "converted", "skipped")
        return {name: getattr(self, name) for name in names}

    def describe(self) -> str:
        """A few lines for the terminal; one where nothing is in fp8."""
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
    most_in_fp8: int = GEMMS_PER_WEIGHT,
) -> Fp8Coverage:
    """Count the linear weights of `model`, converted already. GEMMs of `fp8_modules` run in fp8, others in `compute`.

    `reasons`: name -> why a module is not in fp8, where known. `gemms`: `llm_fp8.models.lora.gemms_per_weight`. Of a
    trained weight's GEMMs the recipe computes `most_in_fp8` in fp8.
    """
    in_fp8, routed, reasons = set(fp8_modules), routed_modules(model), never_in_fp8(model) | reasons
    converted: Counter[str] = Counter()
    skipped: Counter[tuple[str, str]] = Counter()
    num_fp8 = num_all = fp8_gemm_elements = 0
    all_gemm_elements = 0.0
    for name, module in model.named_modules():
        weights = linear_weights(module) or expert_weights(module)
        if not weights:
            continue
        share, left = routed.get(module, Routed(1.0, ""))
        size = sum(weight.numel() for weight in weights)
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        num_all += size
        num_gemms = gemms.get(module, GEMMS_PER_WEIGHT)
        all_gemm_elements += share * size * num_gemms
        if module in in_fp8:
            num_fp8 += size
            fp8_gemm_elements += size * min(num_gemms, most_in_fp8)
            converted[pattern] += 1
        else:
            why = left or reasons.get(name, "")
            skipped[pattern, f"{compute}{f' ({why})' if why else ''}"] += 1
    return Fp8Coverage(
        num_fp8_weights=num_fp8,
        num_linear_weights=num_all,
        fp8_flops_per_token=2.0 * fp8_gemm_elements,
        linear_flops_per_token=2.0 * all_gemm_elements,
        converted=dict(converted),
        skipped={pattern: f"{count} {reason}" for (pattern, reason), count in skipped.items()},
    )
