"""Interface between the training loop and the sharding modes. The base class is for one process and for DDP.

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
from llm_fp8.models.model import decoder_layers
from llm_fp8.optim.adamw_master import join_master, remainder_of
from llm_fp8.optim.optimizers import clip_and_step, initialize_state, optimizer_tensors, set_completed_steps
from llm_fp8.utils.torch_internals import materialize_

FindMainGrad: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Function from a module's weight to the tensor that forward passes use for it, and its gradient so far or None."""


class DistributedStrategy:
    """Strategy for one process (mode 'single'), or for several processes with a copy of the model each.

    The copies are wrapped in DDP unless they are `plain`. For plain copies, the last `micro_batch` of a step averages
    gradients. Graphs require plain copies, since a replay does not run DDP's hooks.
    """

    shards_parameters = False  # True if parameters are DTensors and weights are loaded shard by shard
    caches_weight_casts = True  # True if several micro-batches can use the same fp8 casts of weights
    reentrant_te_checkpoints = False  # True if each recomputed TE layer needs its own backward pass
    saves_itself = False  # True if its `save_state` writes weights and optimizer state; otherwise `state` returns them
    saved_by = "any mode but DeepSpeed's"  # modes that can resume each other's checkpoints, on any number of ranks

    def __init__(self, mode: str, accelerator: Accelerator, options: ParallelConfig, plain: bool = False) -> None:
        self.mode, self.accelerator, self.options, self._is_plain = mode, accelerator, options, plain
        self.context_group: Any = None  # set with context parallelism
        if (size := options.context_parallel_size) > 1:
            from llm_fp8.distributed.context_parallel import ContextGroup

            self.context_group = ContextGroup(size, accelerator.process_index % size)

    def shard(self, model: nn.Module, layers: nn.ModuleList, later: Collection[nn.Module] = ()) -> None:
        """Shard the parameters of `model`, whose decoder layers are `layers`. With FSDP, or if `later` is not empty,
        allocate memory for parameters on "meta", except for those of the modules in `later`.
        """
        if later:
            materialize_(model, self.accelerator.device, self.accelerator.device, later)

    def prepare(self, model: nn.Module, optimizer: Optimizer, precision: Any = None) -> tuple[nn.Module, Any]:
        """Return the model to call and the optimizer to step. Only --fp8_params uses `precision`."""
        if self._is_plain:
            return model, self.accelerator.prepare(optimizer, device_placement=[False])
        return self.accelerator.prepare(model, optimizer, device_placement=[True, False])

    def without_ddp(self, model: nn.Module) -> nn.Module:
        """Return `model` without its DDP wrapper. The training loop calls the result from the next step on."""
        if not isinstance(model, DistributedDataParallel):
            return model
        self._is_plain = True
        return model.module  # DDP and its hooks are deleted when the first graph is captured, or before

    def main_grads(self, model: nn.Module) -> FindMainGrad | None:
        """Return a function that finds the gradient to which a weight's wgrad GEMM adds; None if no GEMM may add."""
        return lambda weight: (weight, weight.grad)

    def reduces_by_hooks(self, last: bool) -> bool:
        """Return True if autograd hooks reduce the gradients of this micro-batch. Then GEMMs must not accumulate."""
        return self._reduces(last) and self.accelerator.num_processes > 1 and not self._is_plain

    def _reduces(self, last: bool) -> bool:
        return last or self.options.sync_every_micro_batch

    def micro_batch(self, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Return a context for forward and backward of a micro-batch. Gradients are reduced over ranks in the `last`
        micro-batch of a step, or in every micro-batch with --sync_every_micro_batch.
        """
        if not self._is_plain:
            return contextlib.nullcontext() if self._reduces(last) else self.accelerator.no_sync(model)
        if not last or self.accelerator.num_processes == 1:
            return contextlib.nullcontext()
        causal_lm: Any = model.model  # `model` is the `TrainingModel`
        return averaged_over_ranks(model, decoder_layers(causal_lm))

    def backward(self, loss: Tensor) -> None:
        """Run backward and accumulate gradients. A step's loss is the sum of `loss` over micro-batches and ranks."""
        # The reduction averages over ranks, and this factor makes it a sum.
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def step(self, optimizer: Any, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
        """Clip to the global norm `max_norm` (0: never), step, and set gradients to None. Return the unclipped norm."""
        self.accelerator.unscale_gradients()  # fp16 only
        norm = clip_and_step(optimizer, parameters, max_norm)
        optimizer.zero_grad(set_to_none=True)
        return norm

    def full_tensor(self, parameter: Tensor) -> Tensor:
        """Return the unsharded parameter or, in adamw_master, its fp32 master weight. Collective if it is sharded."""
        remainder = remainder_of(parameter)
        return parameter.detach() if remainder is None else join_master(parameter.detach(), remainder)

    def master_of(self, parameter: Any) -> tuple[Any, Tensor]:
        """Return the parameter that the optimizer updates for `parameter`, and the values to store in checkpoints."""
        return parameter, parameter.detach()

    def state(self, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        """Return trained weights and optimizer state by name, not copied; {} if the strategy `saves_itself`."""
        masters = {name: self.master_of(p) for name, p in model.named_parameters() if p.requires_grad}
        tensors = {f"model.{name}": values for name, (_, values) in masters.items()}
        state = optimizer_tensors(optimizer, [(name, master) for name, (master, _) in masters.items()])
        return tensors | {f"optimizer.{name}": tensor for name, tensor in state.items()}

    def load_state(self, folder: Path, optimizer: Any) -> None:
        """If the strategy `saves_itself`, restore the state. If not, allocate it for the caller to fill. Collective."""
        initialize_state(optimizer)

    def after_load(self, model: nn.Module, optimizer: Any, step: int) -> None:
        """Set the optimizer's count of completed steps, and update values that depend on the weights. Collective."""
        set_completed_steps(optimizer, step)


@contextlib.contextmanager
def averaged_over_ranks(model: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
    """Return a context for a backward pass of `model` that averages gradients over the ranks. The gradients of a
    decoder layer are reduced while the pass continues with earlier layers. The other gradients are reduced at the end.
    """
    remaining = {id(parameter): parameter for parameter in model.parameters()}
    reductions: list[Any] = []

    def reduce(parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            if remaining.pop(id(parameter), None) is not None and parameter.grad is not None:
                reductions.append(dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, async_op=True))

    def watch(above: nn.Module, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].requires_grad:
            # When this hook runs, all GEMMs of `above` are launched, even those that write gradients without autograd.
            inputs[0].register_hook(lambda gradient: reduce(above.parameters()))

    with contextlib.ExitStack() as hooks:
        for layer, above in itertools.pairwise(layers):
            hooks.callback(layer.register_forward_pre_hook(functools.partial(watch, above)).remove)
        yield
    reduce(list(remaining.values()))
    for reduction in reductions:
        reduction.wait()
