"""How the training loop runs on several GPUs: the interface, whose base class is one process, or DDP.

strategy.shard(model, layers)              FSDP: before weights are loaded
model, optimizer = strategy.prepare(model, optimizer)
for each step:
    for each micro-batch:
        with strategy.micro_batch(model, last=...):
            strategy.backward(loss)        loss: this rank's part of the global mean, see llm_fp8.step.stepper
    grad_norm = strategy.step(optimizer, parameters, max_norm)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from llm_fp8.config.options import ParallelConfig
from llm_fp8.optim.adamw_master import join_master, remainder_of
from llm_fp8.optim.optimizers import clip_and_step, initialize_state, optimizer_tensors, set_completed_steps
from llm_fp8.utils.torch_internals import materialize_

FindMainGrad: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""A module's weight -> the tensor that its forward passes see in its place, and its gradient so far, if any."""


class DistributedStrategy:
    """One process (mode 'single'), or several with a copy of the model each.

    The copies are DDP's or `plain`: then the last micro-batch of a step averages the gradients itself. Captured graphs
    need plain copies, since a replay runs no hooks of DDP.
    """

    shards_parameters = False  # parameters are DTensors, and weights are loaded shard by shard
    caches_weight_casts = True  # fp8 casts of weights may serve several micro-batches
    reentrant_te_checkpoints = False  # recomputed TE layers need a backward pass of their own
    saves_itself = False  # weights and optimizer state, by `save_state`, and not by name
    saved_by = "any mode but DeepSpeed's"  # can resume from a checkpoint, with any number of processes

    def __init__(self, mode: str, accelerator: Accelerator, options: ParallelConfig, plain: bool = False) -> None:
        self.mode, self.accelerator, self.options, self._is_plain = mode, accelerator, options, plain
        self.layers: nn.ModuleList | None = None  # set by `shard`
        self.context_group: Any = None  # the ranks that share sequences
        if (size := options.context_parallel_size) > 1:
            from llm_fp8.distributed.context_parallel import ContextGroup

            self.context_group = ContextGroup(size, accelerator.process_index % size)

    def shard(self, model: nn.Module, layers: nn.ModuleList, later: Collection[nn.Module] = ()) -> None:
        """Shard the parameters of `model`; `layers` are the decoder's. With `later`, and under FSDP, those on the meta
        device get memory, contents undefined, those of the modules `later` only by `give_memory_`.
        """
        self.layers = layers
        if later:
            materialize_(model, self.accelerator.device, self.accelerator.device, later)

    def prepare(self, model: nn.Module, optimizer: Optimizer, precision: Any = None) -> tuple[nn.Module, Any]:
        """The model to call and the optimizer to step. --fp8_params needs the `Precision` of `model`."""
        if self._is_plain:
            return model, self.accelerator.prepare(optimizer, device_placement=[False])
        return self.accelerator.prepare(model, optimizer, device_placement=[True, False])

    def without_ddp(self, model: nn.Module) -> nn.Module:
        """Leave DDP from the next step on, if the prepared `model` is in it; returns the model to call."""
        if not isinstance(model, DistributedDataParallel):
            return model
        self._is_plain = True
        return model.module  # DDP's hooks go with it, when the first graph is captured at the latest

    def main_grads(self, model: nn.Module) -> FindMainGrad | None:
        """How the GEMMs of a prepared `model` find the gradients to add to; None if they must not add."""
        return lambda weight: (weight, weight.grad)

    def reduces_by_hooks(self, last: bool) -> bool:
        """Return True if a micro-batch's gradients are reduced when autograd, and not a GEMM, has accumulated them."""
        return self._reduces(last) and self.accelerator.num_processes > 1 and not self._is_plain

    def _reduces(self, last: bool) -> bool:
        return last or self.options.sync_every_micro_batch

    @contextlib.contextmanager
    def micro_batch(self, model: nn.Module, last: bool) -> Iterator[None]:
        """Encloses forward and backward of a micro-batch; gradients are reduced in the `last` one of a step only."""
        if not self._is_plain:
            context = contextlib.nullcontext() if self._reduces(last) else self.accelerator.no_sync(model)
        elif last and self.accelerator.num_processes > 1:
            assert self.layers is not None
            context = averaged_over_ranks(model, self.layers)
        else:
            context = contextlib.nullcontext()
        with context:
            yield

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of `loss`, this rank's part of a sum over ranks."""
        # The reduction averages over ranks, which this factor undoes.
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def step(self, optimizer: Any, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
        """Clip to the global norm `max_norm` (0: none), step, drop the gradients; the norm before clipping, fp32."""
        self.accelerator.unscale_gradients()  # fp16 only
        norm = clip_and_step(optimizer, parameters, max_norm)
        optimizer.zero_grad(set_to_none=True)
        return norm

    def full_tensor(self, parameter: Tensor) -> Tensor:
        """The unsharded parameter on every rank, in fp32 where it has a remainder; collective where it is sharded."""
        remainder = remainder_of(parameter)
        return parameter.detach() if remainder is None else join_master(parameter.detach(), remainder)

    def master_of(self, parameter: Any) -> tuple[Any, Tensor]:
        """The parameter that the optimizer holds for `parameter`, and its values, which a checkpoint holds."""
        return parameter, parameter.detach()

    def state(self, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        """Name -> live tensor of trained weights and optimizer; none in a mode that saves itself."""
        masters = {name: self.master_of(p) for name, p in model.named_parameters() if p.requires_grad}
        tensors = {f"model.{name}": values for name, (_, values) in masters.items()}
        state = optimizer_tensors(optimizer, [(name, master) for name, (master, _) in masters.items()])
        return tensors | {f"optimizer.{name}": tensor for name, tensor in state.items()}

    def state_bytes(self) -> int:
        """Bytes that `save_state` writes on all ranks together."""
        return 0

    def save_state(self, folder: Path) -> None:
        """Write weights and optimizer state in a mode that saves itself, synced to disk. Collective."""

    def load_state(self, folder: Path, optimizer: Any) -> None:
        """Restore what `save_state` wrote, or prepare the tensors of `state` to be read. Collective."""
        initialize_state(optimizer)

    def after_load(self, model: nn.Module, optimizer: Any, step: int) -> None:
        """Compute anew what is derived from weights and `step`, once the tensors of `state` were read. Collective."""
        set_completed_steps(optimizer, step)


@contextlib.contextmanager
def averaged_over_ranks(model: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
    """Average the gradients of the enclosed backward pass of `model` over the ranks: those of a decoder layer while the
    pass goes on below it, the others at the end.
    """
    remaining = {id(parameter): parameter for parameter in model.parameters()}
    reductions: list[Any] = []

    def reduce(parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            if remaining.pop(id(parameter), None) is not None and parameter.grad is not None:
                reductions.append(dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, async_op=True))

    def watch(above: nn.Module, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            # The pass has left `layer`. GEMMs write to a gradient without autograd, but none of `above` is to come.
            inputs[0].register_hook(lambda gradient: reduce(above.parameters()))

    with contextlib.ExitStack() as hooks:
        for layer, above in itertools.pairwise(layers):
            hooks.callback(layer.register_forward_pre_hook(functools.partial(watch, above)).remove)
        yield
    reduce(list(remaining.values()))
    for reduction in reductions:
        reduction.wait()
