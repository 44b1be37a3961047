"""How the training loop runs on several GPUs: the interface, whose base class is one process, or DDP.

strategy.shard(model, layers)              FSDP: before weights are loaded
model, optimizer = strategy.prepare(model, optimizer)
for each step:
    for each micro-batch:
        with strategy.micro_batch(model, last=...):
            strategy.backward(loss)        loss: this rank's part of the global mean, see llm_fp8.run.timeline
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
    """One process (mode 'single'), or several with a copy of the model each (DDP)."""

    shards_parameters = False  # parameters are DTensors, and weights are loaded shard by shard
    caches_weight_casts = True  # fp8 casts of weights may serve several micro-batches
    reentrant_te_checkpoints = False  # recomputed TE layers need a backward pass of their own
    saves_itself = False  # weights and optimizer state, by `save_state`, and not by name
    saved_by = "any mode but DeepSpeed's"  # can resume from a checkpoint, with any number of processes

    def __init__(self, mode: str, accelerator: Accelerator, options: ParallelConfig) -> None:
        self.mode = mode
        self.accelerator = accelerator
        self.options = options
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
        return self.accelerator.prepare(model, optimizer, device_placement=[True, False])

    def main_grads(self, model: nn.Module) -> FindMainGrad | None:
        """Where the GEMMs of a prepared `model` find the gradients to add to; None where they may not."""
        return lambda weight: (weight, weight.grad)

    def reduces_by_hooks(self, last: bool) -> bool:
        """Return True if a micro-batch's gradients are reduced when autograd, and not a GEMM, has accumulated them."""
        return self._reduces(last) and self.accelerator.num_processes > 1

    def _reduces(self, last: bool) -> bool:
        return last or self.options.sync_every_micro_batch

    @contextlib.contextmanager
    def micro_batch(self, model: nn.Module, last: bool) -> Iterator[None]:
        """Encloses forward and backward of a micro-batch; gradients are reduced in the `last` one of a step only."""
        with contextlib.nullcontext() if self._reduces(last) else self.accelerator.no_sync(model):
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


class PlainCopiesStrategy(DistributedStrategy):
    """The strategy of captured micro-batches: a copy of the model on each GPU without DDP, whose hooks would run only
    while a graph is captured. The last micro-batch of a step averages gradients over the ranks, in its graph too.
    """

    @classmethod
    def without_ddp(cls, strategy: DistributedStrategy, model: nn.Module) -> tuple[DistributedStrategy, nn.Module]:
        """The strategy and the model of a run from a step on that captures its micro-batches, from those before it."""
        if not isinstance(model, DistributedDataParallel):
            return strategy, model
        plain = cls(strategy.mode, strategy.accelerator, strategy.options)
        plain.layers = strategy.layers
        return plain, model.module  # DDP's hooks go with it, when the first graph is captured at the latest

    def prepare(self, model: nn.Module, optimizer: Optimizer, precision: Any = None) -> tuple[nn.Module, Any]:
        return model, self.accelerator.prepare(optimizer, device_placement=[False])

    def reduces_by_hooks(self, last: bool) -> bool:
        return False

    @contextlib.contextmanager
    def micro_batch(self, model: nn.Module, last: bool) -> Iterator[None]:
        assert self.layers is not None
        reduces = last and self.accelerator.num_processes > 1
        with averaged_over_ranks(model, self.layers) if reduces else contextlib.nullcontext():
            yield


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
