"""`MasterAdamW` with state in host memory (--offload_optimizer), updated on the GPU by the same function: same bits.

Eight of adamw_master's twelve bytes per parameter (remainder, m and v) are read and written once a step and by nothing
else. They lie in pinned host memory and pass through three fixed buffers on the GPU, in pieces of `PIECE_ELEMENTS`:

    copy in     1   2   3   4   5 ...     a stream of its own; a buffer is filled when it has been copied out
    update          1   2   3   4 ...     the stream of the step, which has weights and gradients
    copy out            1   2   3 ...     a stream of its own: the bus carries both directions at once

On the CPU the same lines run one after the other, without streams. The step ends with its stream waiting for the last
copy out, so whatever waits for the step may read the state.

Parameters are offloaded whole, the largest first: few and long copies, norms and biases stay on the GPU, and what is
offloaded beyond the share that was asked for is less than the smallest parameter taken.

Why not others': torchao 0.18's CPUOffloadOptimizer and DeepSpeed's ZeRO-Offload step on the CPU, another function with
other bits, and keep gradients there too, with fp32 weights 16 bytes per parameter and not 8. IST Austria's llmq (CUDA
C++) passes m and v through two buffers of a decoder layer and updates on the GPU, as we do; ours are cut by elements,
so that their size does not grow with a layer or the embedding.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from llm_fp8.optim.adamw_base import State
from llm_fp8.optim.adamw_master import FIRST_MOMENT_DTYPE, SECOND_MOMENT_DTYPE, MasterAdamW, remainder_of
from llm_fp8.utils.errors import UserError

PIECE_ELEMENTS = 2**24
"""Elements that are copied and updated at a time: 128 MiB of state."""
NUM_BUFFERS = 3
_DTYPES = {"exp_avg": FIRST_MOMENT_DTYPE, "exp_avg_sq": SECOND_MOMENT_DTYPE, "remainder": torch.int16}


def largest_first(parameters: Sequence[Parameter], share: float) -> list[Parameter]:
    """The fewest parameters, the largest ones, that hold `share` of all elements or more."""
    wanted, held, taken = share * sum(parameter.numel() for parameter in parameters), 0, []
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
        if held >= wanted:
            break
        taken.append(parameter)
        held += parameter.numel()
    return taken


def pinned_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [count] in host memory, page-locked where `device` is a GPU; `UserError` where the driver refuses that.

    `pin_memory=True` would round every tensor up to a power of two bytes (torch 2.13, CachingHostAllocator).
    """
    zeros = torch.zeros(count, dtype=dtype)
    if device.type == "cuda":
        status = int(torch.cuda.cudart().cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0))
        if status != 0:
            raise UserError(
                f"--offload_optimizer: the driver does not pin {zeros.nbytes / 2**30:.1f} GiB of host memory (CUDA "
                f"error {status}); lower it."
            )
        weakref.finalize(zeros, _unpin, zeros.data_ptr())
    return zeros


def _unpin(address: int) -> None:
    torch.cuda.synchronize()  # copies may still run
    torch.cuda.cudart().cudaHostUnregister(address)


class AtOnce:
    """What stands for a CUDA stream on the CPU, where work is done when it is given."""

    def record_event(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...


def stream_of(device: torch.device, current: bool = False) -> Any:
    """A new stream, or the current one."""
    if device.type != "cuda":
        return AtOnce()
    return torch.cuda.current_stream(device) if current else torch.cuda.Stream(device)


def run_on(stream: Any, work: Callable[[], object]) -> None:
    with contextlib.nullcontext() if isinstance(stream, AtOnce) else torch.cuda.stream(stream):
        work()


class StatePipeline:
    """Passes state from the host through fixed buffers on `device`, of `num_elements` elements each."""

    def __init__(self, device: torch.device, num_elements: int) -> None:
        self._device, self._turn = device, 0
        self._buffers = [
            {name: torch.empty(num_elements, dtype=dtype, device=device) for name, dtype in _DTYPES.items()}
            for _ in range(NUM_BUFFERS)
        ]
        self._copies_in, self.copies_out = stream_of(device), stream_of(device)
        # At first: when whatever had the buffers' memory before is done with it.
        self._emptied = [stream_of(device, current=True).record_event() for _ in self._buffers]

    def update_(self, state: State, update_: Callable[[State], object]) -> None:
        """Call `update_` with a copy on the device of `state`, flat tensors on the host; bring back what it leaves."""
        turn, self._turn = self._turn, (self._turn + 1) % NUM_BUFFERS
        buffer = {name: self._buffers[turn][name][: len(tensor)] for name, tensor in state.items()}
        step = stream_of(self._device, current=True)
        self._copies_in.wait_event(self._emptied[turn])
        run_on(self._copies_in, lambda: _copy(state, buffer))
        step.wait_event(self._copies_in.record_event())
        run_on(step, lambda: update_(buffer))
        self.copies_out.wait_event(step.record_event())
        run_on(self.copies_out, lambda: _copy(buffer, state))
        self._emptied[turn] = self.copies_out.record_event()

    def finish_step(self) -> None:
        """Let the current stream, and the next step's copies in, wait for all copies out."""
        event = self.copies_out.record_event()
        stream_of(self._device, current=True).wait_event(event)
        self._copies_in.wait_event(event)


def _copy(source: State, target: State) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor, non_blocking=True)


class OffloadedMasterAdamW(MasterAdamW):
    """`MasterAdamW` that keeps the state of `share` of its (unsharded) parameters, the largest, in host memory.

    All state is created at once, `host_bytes` of it there. `arguments` are those of `MasterAdamW`.
    """

    def __init__(
        self, params: Iterable[Parameter] | Iterable[dict[str, Any]], *, share: float, **arguments: Any
    ) -> None:
        super().__init__(params, **arguments)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        taken, device = largest_first(parameters, share), parameters[0].device
        self._places: dict[Parameter, slice] = {}
        count = 0
        for parameter in taken:
            self._places[parameter] = slice(count, count + parameter.numel())
            count += parameter.numel()
        self._numbers = {number for number, parameter in enumerate(parameters) if parameter in self._places}
        self._host = {name: pinned_zeros(count, dtype, device) for name, dtype in _DTYPES.items()}
        self.host_bytes = sum(tensor.nbytes for tensor in self._host.values())
        self.pipeline = pipeline = StatePipeline(device, min(PIECE_ELEMENTS, taken[0].numel()))
        self.register_step_post_hook(lambda *_: pipeline.finish_step())
        self.initialize_state()

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

    def _update_(self, weight: Tensor, *arguments: Any, place: tuple[int, int]) -> None:
        if place[1] not in self._numbers:
            super()._update_(weight, *arguments, place=place)
            return
        gradient, state, *others = arguments
        weight, gradient = weight.view(-1), gradient.view(-1)
        for start in range(0, len(weight), PIECE_ELEMENTS):
            piece = slice(start, start + PIECE_ELEMENTS)

            def update_(buffer: State, piece: slice = piece) -> None:
                super(OffloadedMasterAdamW, self)._update_(weight[piece], gradient[piece], buffer, *others, place=place)

            self.pipeline.update_({name: tensor.view(-1)[piece] for name, tensor in state.items()}, update_)
