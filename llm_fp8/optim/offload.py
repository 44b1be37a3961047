"""`MasterAdamW` with state in host memory (--offload_optimizer). The GPU computes the same update, bit for bit.

The remainder, m and v (eight of adamw_master's twelve bytes per parameter) are used only in the step. They are stored
in pinned host memory and copied through three fixed buffers on the GPU, in pieces of `PIECE_ELEMENTS` elements:

    copy in     1   2   3   4   5 ...     in its own stream; waits until the buffer's last piece is copied out
    update          1   2   3   4 ...     in the stream of the step, with weights and gradients on the GPU
    copy out            1   2   3 ...     in its own stream, since the bus transfers in both directions at once

At the end of a step, its stream waits for the last copy out. On a CPU, torch's streams do nothing. Whole parameters are
offloaded, the largest first, so that copies are few and long. Other libraries compute the step on the CPU, with
different rounding, and store 16 bytes per parameter there instead of 8.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from llm_fp8.optim.adamw import MasterAdamW, Params, State
from llm_fp8.optim.adamw_master import FIRST_MOMENT_DTYPE, SECOND_MOMENT_DTYPE, remainder_of
from llm_fp8.utils.errors import UserError

PIECE_ELEMENTS = 2**24  # elements that are copied and updated at a time: 128 MiB of state
NUM_BUFFERS = 3
_DTYPES = {"exp_avg": FIRST_MOMENT_DTYPE, "exp_avg_sq": SECOND_MOMENT_DTYPE, "remainder": torch.int16}


def largest_first(parameters: Sequence[Parameter], share: float) -> dict[Parameter, slice]:
    """Choose the fewest parameters with at least `share` of all elements. Return their slices in a flat buffer."""
    num_wanted = share * sum(parameter.numel() for parameter in parameters)
    places: dict[Parameter, slice] = {}
    end = 0
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
        if end < num_wanted:
            places[parameter] = slice(end, end + parameter.numel())
            end += parameter.numel()
    return places


def pinned_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [count] in host memory, page-locked if `device` is a GPU. Raise `UserError` if CUDA fails to pin."""
    # `pin_memory=True` would round the size up to a power of two (torch 2.13, CachingHostAllocator).
    zeros = torch.zeros(count, dtype=dtype)
    if device.type == "cuda":
        status = int(torch.cuda.cudart().cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0))
        if status != 0:
            gib = zeros.nbytes / 2**30
            raise UserError(f"--offload_optimizer: CUDA error {status} on pinning {gib:.1f} GiB; lower the share.")
        weakref.finalize(zeros, _unpin, zeros.data_ptr())
    return zeros


def _unpin(address: int) -> None:
    torch.cuda.synchronize()  # copies may still run
    torch.cuda.cudart().cudaHostUnregister(address)


class StatePipeline:
    """Pipeline that copies state from the host to buffers of `num_elements` elements on `device`, and back."""

    def __init__(self, device: torch.device, num_elements: int) -> None:
        self._cuda: Any = torch.get_device_module(device)  # torch.cuda, or torch.cpu, which has the same names
        self._turn = 0
        self._buffers = [
            {name: torch.empty(num_elements, dtype=dtype, device=device) for name, dtype in _DTYPES.items()}
            for _ in range(NUM_BUFFERS)
        ]
        self._copies_in, self._copies_out = self._cuda.Stream(device), self._cuda.Stream(device)
        # The first copies wait for earlier kernels that used the buffers' memory.
        self._emptied = [self._cuda.current_stream().record_event() for _ in self._buffers]

    def update_(self, state: State, update_: Callable[[State], object]) -> None:
        """Copy `state` (flat host tensors) to the device, call `update_` on the copy, and copy the new values back."""
        turn, self._turn = self._turn, (self._turn + 1) % NUM_BUFFERS
        buffer = {name: self._buffers[turn][name][: len(tensor)] for name, tensor in state.items()}
        step_stream = self._cuda.current_stream()
        self._copies_in.wait_event(self._emptied[turn])
        with self._cuda.stream(self._copies_in):
            _copy(state, buffer)
        step_stream.wait_event(self._copies_in.record_event())
        update_(buffer)
        self._copies_out.wait_event(step_stream.record_event())
        with self._cuda.stream(self._copies_out):
            _copy(buffer, state)
        self._emptied[turn] = self._copies_out.record_event()

    def finish_step(self) -> None:
        """Make the current stream and the next step's copies to the device wait for all copies to the host."""
        event = self._copies_out.record_event()
        self._cuda.current_stream().wait_event(event)
        self._copies_in.wait_event(event)


def _copy(source: State, target: State) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor, non_blocking=True)


class OffloadedMasterAdamW(MasterAdamW):
    """`MasterAdamW` for unsharded parameters. The fraction `share` of its state lies in host memory."""

    def __init__(self, params: Params, *, share: float, **arguments: Any) -> None:
        super().__init__(params, **arguments)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        device = parameters[0].device
        self._places = largest_first(parameters, share)
        sizes = [parameter.numel() for parameter in self._places]
        self._host = {name: pinned_zeros(sum(sizes), dtype, device) for name, dtype in _DTYPES.items()}
        self.host_bytes = sum(tensor.nbytes for tensor in self._host.values())
        self.pipeline = pipeline = StatePipeline(device, min(PIECE_ELEMENTS, sizes[0]))
        self.register_step_post_hook(lambda *_: pipeline.finish_step())
        for parameter in parameters:
            self.state_of(parameter)

    def _new_state(self, parameter: Parameter) -> dict[str, Tensor]:
        state = super()._new_state(parameter)
        if parameter not in self._places:
            return state
        on_host = {name: self._host[name][self._places[parameter]].view(parameter.shape) for name in state}
        for name, tensor in state.items():
            on_host[name].copy_(tensor)
        if remainder_of(parameter) is not None:
            parameter.master_remainder = on_host["remainder"]  # type: ignore[attr-defined]
        return on_host

    def _update_(self, parameter: Parameter, weight: Tensor, *arguments: Any) -> None:
        update_ = functools.partial(super()._update_, parameter)
        if parameter not in self._places:
            update_(weight, *arguments)
            return
        gradient, state, *others = arguments
        weight, gradient = weight.view(-1), gradient.view(-1)
        for start in range(0, len(weight), PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)
            self.pipeline.update_(
                {name: tensor.view(-1)[piece] for name, tensor in state.items()},
                lambda buffer, piece=piece: update_(weight[piece], gradient[piece], buffer, *others),  # type: ignore[misc]
            )
