"""CUDA graphs without a GPU, for `llm_fp8.train.micro_batch_graphs`: a graph repeats Python's work, at the addresses
that it was captured with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch.nn import Parameter

from llm_fp8.train.micro_batch_graphs import MicroBatchGraphs


class EmulatedGraph:
    """`replay` writes gradients where the parameters had them at the capture, and gives parameters none."""

    def __init__(self, work: Callable[[], None], parameters: Sequence[Parameter]) -> None:
        self._work, self._parameters = work, parameters
        self._gradients = [parameter.grad for parameter in parameters]
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        found = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._work()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            assert parameter.grad is gradient, "a graph would write to the memory of the old one"
        for parameter, gradient in zip(self._parameters, found, strict=True):
            parameter.grad = gradient


class EmulatedCapture:
    """In place of `Capture`; what it captured is in `graphs`. The work does not run at the capture."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self.graphs: list[EmulatedGraph] = []

    def __call__(self, work: Callable[[], None]) -> EmulatedGraph:
        self.graphs.append(EmulatedGraph(work, self._parameters))
        return self.graphs[-1]


def emulate_graphs(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedCapture]:
    """Let runs with --cuda_graphs do without a GPU; what they captured is in the list, one entry a run."""
    captures: list[EmulatedCapture] = []

    def graphs(run, parameters, overwritten, capture, behind):
        captures.append(EmulatedCapture(parameters))
        return MicroBatchGraphs(run, parameters, overwritten, captures[-1], behind)

    monkeypatch.setattr("llm_fp8.train.micro_batch_graphs.Capture", lambda: None)
    monkeypatch.setattr("llm_fp8.train.micro_batch_graphs.MicroBatchGraphs", graphs)
    return captures
