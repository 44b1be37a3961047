"""Reads the GPU's memory at marks through one optimizer step: hooks on the model and the optimizer, taken away afterwards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from llm_fp8.diagnose.memory_kinds import Mark, Stage, known_bytes

Meter = Callable[[], tuple[int, int]]
"""Bytes allocated now, and the most since the call before."""


def cuda_meter(device: torch.device) -> Meter:
    """The meter of PyTorch's allocator on a GPU."""

    def read() -> tuple[int, int]:
        allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return allocated, peak

    return read


class MemoryProbe:
    """Makes the marks of a step.

    Args:
        training_model: what the loop calls; its forward pass ends with the loss.
        decoder: the part of it that ends with the last hidden states.
        layers: its decoder layers.
        optimizer: may be wrapped by Accelerate.
        meter: what is read at each mark.
    """

    def __init__(
        self,
        training_model: nn.Module,
        decoder: nn.Module,
        layers: nn.ModuleList,
        optimizer: Any,
        device: torch.device,
        meter: Meter,
    ) -> None:
        self._model, self._decoder, self._layers, self._optimizer = training_model, decoder, layers, optimizer
        self._device, self._meter = device, meter
        self.marks: list[Mark] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Mark the step that runs in this block."""
        inner = getattr(self._optimizer, "optimizer", self._optimizer)
        enter = functools.partial(functools.partial, self._enter)
        handles: list[Any] = [
            self._model.register_forward_pre_hook(enter("forward")),
            self._decoder.register_forward_hook(enter("loss")),
            self._model.register_forward_hook(enter("loss_backward")),
            inner.register_step_pre_hook(enter("step")),
        ]
        for layer in self._layers:
            handles.append(layer.register_forward_pre_hook(enter("forward")))
            handles.append(layer.register_full_backward_pre_hook(enter("backward")))
        self._meter()  # the peak of what ran before is nobody's
        try:
            yield
            self._enter("end")
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, stage: Stage, *_: object) -> None:
        allocated, peak = self._meter()
        self.marks.append(Mark(stage, allocated, peak, known_bytes(self._model, self._optimizer, self._device)))
