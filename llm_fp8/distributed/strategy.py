"""The interface of the training loop to its processes. The base class serves one process, or DDP.

strategy.shard(model, layers)              FSDP: before weights are loaded
model, optimizer = strategy.prepare(model, optimizer)
for each step:
    for each micro-batch:
        with strategy.micro_batch(model, last=...):
            strategy.backward(loss)        loss: this rank's share of the global mean, see llm_fp8.step.stepper
    grad_norm = strategy.step(optimizer, parameters, max_norm)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
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
"""A module's weight -> the tensor that forward passes use for the weight, and the gradient so far, if any."""


class DistributedStrategy:
    """One process (mode 'single'), or several with a copy of the model each.

    The copies are wrapped in DDP, or `plain`: then the last micro-batch of a step averages gradients itself. Graphs
    need plain copies, since a replay does not run DDP's hooks.
    """

    shards_parameters = False  # parameters are DTensors, and weights are loaded shard by shard
    caches_weight_casts = True  # fp8 casts of weights may serve several micro-batches
    reentrant_te_checkpoints = False  # recomputed TE layers need a backward pass of their own
    saves_itself = False  # True: `save_state` writes weights and optimizer state, instead of `state` by name
    saved_by = "any mode but DeepSpeed's"  # the modes that can resume each other's checkpoints, on any number of ranks

    def __init__(self, mode: str, accelerator: Accelerator, options: ParallelConfig, plain: bool = False) -> None:
        self.mode, self.accelerator, self.options, self._is_plain = mode, accelerator, options, plain
        self.layers: nn.ModuleList | None = None  # set by `shard`
        self.context_group: Any = None  # the ranks that share sequences
        if (size := options.context_parallel_size) > 1:
            from llm_fp8.distributed.context_parallel import ContextGroup

            self.context_group = ContextGroup(size, accelerator.process_index % size)

    def shard(self, model: nn.Module, layers: nn.ModuleList, later: Collection[nn.Module] = ()) -> None:
        """Shard the parameters of `model`; `layers` are the decoder's. Under FSDP, or with `later`, give parameters on
        the meta device memory with undefined contents. Modules in `later` get memory only from `give_memory_`.
        """
        self.layers = layers
        if later:
            materialize_(model, self.accelerator.device, self.accelerator.device, later)

    def prepare(self, model: nn.Module, optimizer: Optimizer, precision: Any = None) -> tuple[nn.Module, Any]:
        """Return the model to call and the optimizer to step. --fp8_params needs the `Precision` of `model`."""
        if self._is_plain:
            return model, self.accelerator.prepare(optimizer, device_placement=[False])
        return self.accelerator.prepare(model, optimizer, device_placement=[True, False])

    def without_ddp(self, model: nn.Module) -> nn.Module:
        """Leave DDP from the next step on if the prepared `model` uses it; return the model to call."""
        if not isinstance(model, DistributedDataParallel):
            return model
        self._is_plain = True
        return model.module  # DDP's hooks end with DDP, at the latest when the first graph is captured

    def main_grads(self, model: nn.Module) -> FindMainGrad | None:
        """Return how GEMMs of a prepared `model` find the gradients to add to; None if GEMMs must not add."""
        return lambda weight: (weight, weight.grad)

    def reduces_by_hooks(self, last: bool) -> bool:
        """Return True if autograd's hooks reduce a micro-batch's gradients: a GEMM that accumulates calls none."""
        return self._reduces(last) and self.accelerator.num_processes > 1 and not self._is_plain

    def _reduces(self, last: bool) -> bool:
        return last or self.options.sync_every_micro_batch

    def micro_batch(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro-batch's forward and backward pass. Gradients are reduced in the `last` one of a
        step, or in every one with --sync_every_micro_batch.
        """
        if not self._is_plain:
            return contextlib.nullcontext() if self._reduces(last) else self.accelerator.no_sync(model)
        if not last or self.accelerator.num_processes == 1:
            return contextlib.nullcontext()
        assert self.layers is not None
        return averaged_over_ranks(model, self.layers)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of `loss`, this rank's share of a sum over ranks."""
        # This factor undoes the reduction's average over ranks.
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def step(self, optimizer: Any, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
        """Clip to the global norm `max_norm` (0: none), step, drop the gradients. Return the unclipped norm, fp32."""
        self.accelerator.unscale_gradients()  # fp16 only
        norm = clip_and_step(optimizer, parameters, max_norm)
        optimizer.zero_grad(set_to_none=True)
        return norm

    def full_tensor(self, parameter: Tensor) -> Tensor:
        """Return the unsharded parameter on every rank, in fp32 if it has a remainder. Collective if it is sharded."""
        remainder = remainder_of(parameter)
        return parameter.detach() if remainder is None else join_master(parameter.detach(), remainder)

    def master_of(self, parameter: Any) -> tuple[Any, Tensor]:
        """Return the parameter that the optimizer holds for `parameter`, and its values for a checkpoint."""
        return parameter, parameter.detach()

    def state(self, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        """Return name -> live tensor of trained weights and optimizer; empty if the strategy `saves_itself`."""
        masters = {name: self.master_of(p) for name, p in model.named_parameters() if p.requires_grad}
        tensors = {f"model.{name}": values for name, (_, values) in masters.items()}
        state = optimizer_tensors(optimizer, [(name, master) for name, (master, _) in masters.items()])
        return tensors | {f"optimizer.{name}": tensor for name, tensor in state.items()}

    def state_bytes(self) -> int:
        """Return the bytes that `save_state` writes on all ranks together."""
        return 0

    def save_state(self, folder: Path) -> None:
        """Write weights and optimizer state if the strategy `saves_itself`, synced to disk. Collective."""

    def load_state(self, folder: Path, optimizer: Any) -> None:
        """Restore what `save_state` wrote, or allocate the tensors of `state` for reading. Collective."""
        initialize_state(optimizer)

    def after_load(self, model: nn.Module, optimizer: Any, step: int) -> None:
        """Recompute everything derived from weights and `step`, after the tensors of `state` are read. Collective."""
        set_completed_steps(optimizer, step)


@contextlib.contextmanager
def averaged_over_ranks(model: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
    """Average the gradients of the enclosed backward pass of `model` over the ranks. Reduce a decoder layer's gradients
    while the pass continues below the layer, and all others at the end.
    """
    remaining = {id(parameter): parameter for parameter in model.parameters()}
    reductions: list[Any] = []

    def reduce(parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            if remaining.pop(id(parameter), None) is not None and parameter.grad is not None:
                reductions.append(dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, async_op=True))

    def watch(above: nn.Module, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            # The pass has left `layer`. GEMMs write gradients without autograd, but those of `above` are all launched.
            inputs[0].register_hook(lambda gradient: reduce(above.parameters()))

    with contextlib.ExitStack() as hooks:
        for layer, above in itertools.pairwise(layers):
            hooks.callback(layer.register_forward_pre_hook(functools.partial(watch, above)).remove)
        yield
    reduce(list(remaining.values()))
    for reduction in reductions:
        reduction.wait()
