"""What the GPU's memory holds at a step's peak.

The allocator counts bytes and keeps one maximum. What the bytes are, two things together say:

- tensors that can be reached by name are walked: parameters, `.grad`, optimizer state, Transformer Engine's casts of
  weights. Of a quantised tensor the tensors inside are counted (data, transpose, scales).
- `memory_marks` reads the count at marks through the step, with at most one decoder layer between two. The bytes that
  no walk finds are divided by when they were allocated and freed: activations, loss, and other (tensors that live for
  less than one layer, recomputed ones too, and the rest).

The peak lies between two marks and is divided as at the first; the rest is short-lived ("other", or "loss").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llm_fp8.optim.optimizers import unwrap

HOW_FOUND = {
    "weights": "parameters of the model, walked",
    "fp8_weights": "Transformer Engine's casts and transposes of weights kept between micro-batches, walked",
    "gradients": "gradients of the parameters, walked",
    "optimizer_state": "moments and master weights, walked",
    "activations": "allocated by the decoder layers' forward passes and still held",
    "loss": "logits and workspace of the loss: allocated after the last decoder layer",
    "other": "the rest: inputs, tables, libraries' workspaces, short-lived tensors",
}
"""Kind -> where its bytes come from. The first four are those of `known_bytes`."""

Stage = Literal["forward", "loss", "loss_backward", "backward", "step", "end"]


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors that own the memory of `value`: itself, or those inside a quantised tensor (TE's, torchao's)."""
    if type(value) in (Tensor, nn.Parameter):
        yield value
        return
    inner = [
        item
        for item in getattr(value, "__dict__", {}).values()
        if isinstance(item, Tensor) or hasattr(item, "_quantizer")
    ]
    if inner:
        for item in inner:
            yield from plain_tensors(item)
    elif isinstance(value, Tensor):
        yield value


def held_bytes(values: Iterable[Any], device: torch.device, seen: set[int]) -> int:
    """Bytes on `device` behind `values`, without the addresses in `seen`, to which the others are added."""
    total = 0
    for value in values:
        for tensor in plain_tensors(value):
            storage = tensor.untyped_storage()
            if tensor.device.type == device.type and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
    return total


def known_bytes(model: nn.Module, optimizer: Optimizer, device: torch.device) -> dict[str, int]:
    """Bytes of everything that can be walked to. `optimizer` may be wrapped by Accelerate."""
    parameters = list(model.parameters())
    seen: set[int] = {0}  # the address of tensors without memory
    state = unwrap(optimizer).state
    casts = (cast for module in model.modules() for cast in getattr(module, "_fp8_workspaces", {}).values())
    return {
        "weights": held_bytes(parameters, device, seen),
        "fp8_weights": held_bytes(casts, device, seen),
        "gradients": held_bytes((p.grad for p in parameters if p.grad is not None), device, seen),
        "optimizer_state": held_bytes((value for entry in state.values() for value in entry.values()), device, seen),
    }


@dataclass(frozen=True)
class Mark:
    """The memory at one moment of a step, in bytes."""

    stage: Stage
    """What begins here."""
    allocated: int
    peak_before: int
    """The most since the mark before."""
    known: Mapping[str, int]


def divide_peak(marks: Sequence[Mark]) -> tuple[Stage, dict[str, int]]:
    """The stage in which the peak of a step falls, by its marks, and the peak's bytes by kind (`HOW_FOUND`)."""
    number = max(range(len(marks) - 1), key=lambda mark: marks[mark + 1].peak_before)
    begin, end = marks[number], marks[number + 1]
    peak = end.peak_before
    standing = marks[0].allocated - sum(marks[0].known.values())
    kinds: dict[str, int] = dict.fromkeys(HOW_FOUND, 0) | dict(begin.known)
    if begin.stage == "loss_backward":
        before_loss = next(mark for mark in reversed(marks[:number]) if mark.stage == "loss")
        kinds["loss"] = begin.allocated - before_loss.allocated
    kinds["activations"] = max(0, begin.allocated - sum(begin.known.values()) - kinds["loss"] - standing)
    room = peak - begin.allocated
    for kind in begin.known:
        grown = min(room, max(0, end.known[kind] - begin.known[kind]))
        kinds[kind] += grown
        room -= grown
    if begin.stage == "forward":
        kept = end.allocated - begin.allocated - sum(end.known.values()) + sum(begin.known.values())
        kinds["activations"] += min(room, max(0, kept))
    elif begin.stage in ("loss", "loss_backward"):
        kinds["loss"] += room
    kinds["other"] = peak - sum(kinds.values())
    return begin.stage, kinds


Meter = Callable[[], tuple[int, int]]
"""Bytes allocated now, and the most since the call before."""


def cuda_meter(device: torch.device) -> Meter:
    def read() -> tuple[int, int]:
        allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return allocated, peak

    return read


@contextlib.contextmanager
def memory_marks(
    training_model: nn.Module,
    decoder: nn.Module,
    layers: nn.ModuleList,
    optimizer: Optimizer,
    device: torch.device,
    meter: Meter,
) -> Iterator[list[Mark]]:
    """The marks of the step that runs in this block, made by hooks on the model and the optimizer.

    The forward pass of `training_model` ends with the loss, that of `decoder` with the last hidden states. `layers`:
    the decoder layers. `optimizer` may be wrapped by Accelerate.
    """
    marks: list[Mark] = []

    def enter(stage: Stage) -> Callable[..., None]:
        def hook(*_: object) -> None:
            marks.append(Mark(stage, *meter(), known_bytes(training_model, optimizer, device)))

        return hook

    handles: list[Any] = [
        training_model.register_forward_pre_hook(enter("forward")),
        decoder.register_forward_hook(enter("loss")),
        training_model.register_forward_hook(enter("loss_backward")),
        unwrap(optimizer).register_step_pre_hook(enter("step")),
    ]
    for layer in layers:
        handles.append(layer.register_forward_pre_hook(enter("forward")))
        handles.append(layer.register_full_backward_pre_hook(enter("backward")))
    meter()  # resets the peak
    try:
        yield marks
        enter("end")()
    finally:
        for handle in handles:
            handle.remove()
