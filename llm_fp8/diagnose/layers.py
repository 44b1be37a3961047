"""Identical layers as one line: 'layers 0-31  qkv  e4m3 x e4m3  ...'."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llm_fp8.diagnose.operands import PASSES, ModuleGemms, Pass

_NUMBER = re.compile(r"^(?P<before>.*?\.)(?P<number>\d+)\.(?P<after>.*)$")


@dataclass(frozen=True)
class LayerGroup:
    """Modules of the same place in several decoder layers that multiply in the same formats."""

    module: str
    """Name inside the layer ('qkv', 'self_attn.q_proj'), or the whole name outside the layers."""
    layers: tuple[int, ...]
    """Numbers of the layers in order; empty outside the layers."""
    kind: str
    told_by: str
    operands: dict[Pass, tuple[str, ...]]

    @property
    def layer_ranges(self) -> str:
        """'0-31', '0-3, 5'; empty outside the layers."""
        return number_ranges(self.layers)


def number_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: (0, 1, 2, 5) as '0-2, 5'."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def group_layers(modules: Iterable[ModuleGemms]) -> list[LayerGroup]:
    """One group for each place, class and set of formats, in the order in which the modules come."""
    groups: dict[tuple[object, ...], tuple[ModuleGemms, list[int], str]] = {}
    for module in modules:
        match = _NUMBER.match(module.name)
        before, name = (match["before"], match["after"]) if match else ("", module.name)
        formats = tuple(module.operands(gemm_pass) for gemm_pass in PASSES)
        _, numbers, _ = groups.setdefault((before, name, module.kind, module.told_by, formats), (module, [], name))
        if match:
            numbers.append(int(match["number"]))
    return [
        LayerGroup(name, tuple(sorted(numbers)), module.kind, module.told_by, {p: module.operands(p) for p in PASSES})
        for module, numbers, name in groups.values()
    ]
