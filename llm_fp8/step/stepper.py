"""The optimizer step: micro-batches, their gradients, and the update.

The global batch is split into micro-batches m = 1..M on each of R ranks. Let C be the number of its supervised tokens,
and L_m the summed cross entropy of a micro-batch plus its auxiliary losses. Then

    loss = (1 / C) * sum over ranks and m of L_m        gradient = d loss / d weights

so the loss is the mean over supervised tokens, regardless of how the batch is split. If a sharding mode averages
gradients over ranks, its strategy (llm_fp8.distributed) multiplies the loss by R.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from llm_fp8.data.collate import Batch, count_tokens
from llm_fp8.distributed.process_group import gathered
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.observability.kernel_trace import StepProfile
from llm_fp8.observability.metrics import StepTokens
from llm_fp8.precision.context import Precision
from llm_fp8.step.loss_model import TrainingModel
from llm_fp8.step.wgrad_fusion import FusedWgradAccumulation


class StepClock:
    """Time stamps: CUDA events on a GPU, which need no synchronisation, or `time.perf_counter` on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def stamp(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two stamps. On a GPU, both events must have completed."""
        return start.elapsed_time(end) / 1e3 if self._cuda else end - start


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step."""

    learning_rate: float
    values: dict[str, Tensor]  # name -> 0-dim tensor on the device: metrics and `StepTokens` over all ranks
    rank_loss: Tensor  # this rank's part of the training loss
    row_ids: tuple[int, ...]
    start: Any
    end: Any


@dataclass(eq=False)
class Stepper:
    """Runs optimizer steps, eagerly or with CUDA graphs."""

    training_model: TrainingModel
    model: nn.Module  # `training_model` as prepared by the strategy, with its `optimizer`
    optimizer: Optimizer
    scheduler: LRScheduler
    strategy: DistributedStrategy
    precision: Precision
    max_grad_norm: float
    graphs: bool | None  # True if micro-batches run as CUDA graphs; None if `take_graphs_if_idle` decides it

    def __post_init__(self) -> None:
        self.accelerator = self.strategy.accelerator
        self.clock = StepClock(self.accelerator.device)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.wgrad_accumulation = FusedWgradAccumulation(self.model, self.strategy)
        self.may_take_graphs = self.graphs is None
        self._graph_notes: list[str] = []
        self.micro_batch_graphs = self._build_graphs() if self.graphs else None

    def take_graphs_if_idle(
        self, profile: StepProfile, steps: list[dict[str, Any]], num_micro_batches: int, step: int, asks_again: bool
    ) -> str | None:
        """Run micro-batches as CUDA graphs from the next step on, if the GPU is often idle and has enough memory.
        Return a note to print, or None if graphs are not worthwhile. All ranks must call this method.

        `profile` is the profile of a recorded step. `steps` (used on the main rank) are the records of all steps up to
        `step`. If `asks_again` is set and the GPU is not often idle, `may_take_graphs` stays True for a later call.
        """
        from llm_fp8.step.micro_batch_graphs import WORTH_GRAPHS, memory_beside_graphs

        sharded, gradients = self.strategy.shards_parameters, 0
        if not sharded and num_micro_batches == 1:  # without graphs, gradients reuse the memory of activations
            gradients = sum(parameter.nbytes for parameter in self.parameters)
        idle, communication_s = gathered((profile.gpu_idle(steps), profile.exposed_communication_s))[0]
        lacking_gib, drops_graphs = memory_beside_graphs(gradients)
        if idle is None:
            return None
        share = idle["share"]
        if not sharded:  # in sharded modes, communication mostly waits for hosts, and graphs include it
            share -= communication_s / idle["step_time_s"]
        self.may_take_graphs = share < WORTH_GRAPHS and asks_again
        if share < WORTH_GRAPHS or (sharded and num_micro_batches > 1):
            return None
        if lacking_gib:
            consequence = f"--cuda_graphs would help, but might need {lacking_gib:.1f} GiB more than the GPU has"
        else:
            self.begin_graphs(drops_graphs)
            consequence = f"micro-batches run as CUDA graphs from step {step + 1} on"
        self._graph_notes = [f"the GPU computes nothing during {share:.0%} of a step: {consequence}"]
        return self._graph_notes[0]

    def summary(self) -> dict[str, Any]:
        """Return the entry about CUDA graphs in summary.json."""
        return {"cuda_graphs": {"used": self.micro_batch_graphs is not None, "notes": self._graph_notes}}

    def begin_graphs(self, drops_before_eager: bool = False) -> None:
        """Run micro-batches as CUDA graphs from the next step on. For `drops_before_eager` see `MicroBatchGraphs`."""
        self.model = self.strategy.without_ddp(self.model)
        self.wgrad_accumulation = FusedWgradAccumulation(self.model, self.strategy)
        self.micro_batch_graphs = self._build_graphs()
        self.micro_batch_graphs.drops_before_eager = drops_before_eager

    def drop_graphs_if_memory_is_short(self) -> None:
        """Measure memory after a step. If it is short, every later eager pass deletes the graphs first. Collective."""
        if self.micro_batch_graphs is not None:
            from llm_fp8.step.micro_batch_graphs import memory_beside_graphs

            _, self.micro_batch_graphs.drops_before_eager = memory_beside_graphs()

    def _build_graphs(self) -> Any:
        from llm_fp8.step.micro_batch_graphs import Capture, MicroBatchGraphs, ShardedMicroBatchGraphs

        sharded, collective = self.strategy.shards_parameters, self.accelerator.num_processes > 1

        def run(batch: Batch, num_supervised: Tensor, first: bool, last: bool) -> Tensor:
            return self._micro_batch_by_old_scales(batch, num_supervised, None if sharded else first, last)

        overwritten = [] if sharded else self.wgrad_accumulation.weights()
        graphs = ShardedMicroBatchGraphs if sharded else MicroBatchGraphs
        return graphs(run, self.parameters, overwritten, Capture(), self.precision.update_scales, collective)

    def take_step(self, batches: list[Batch], start: Any = None) -> StepResult:
        """Run an optimizer step on this rank's micro-batches. `start` is the time stamp of its beginning."""
        accelerator, device, strategy = self.accelerator, self.accelerator.device, self.strategy
        # In pinned memory, like the batches: a copy from pageable memory would wait for all queued work on the GPU.
        on_host = torch.tensor(count_tokens(batches), pin_memory=device.type == "cuda")
        tokens = accelerator.reduce(on_host.to(device, non_blocking=True), reduction="sum")
        num_supervised = tokens[2].clamp(min=1)
        loss_names = self.training_model.loss_names
        losses = torch.zeros(len(loss_names), device=device)
        # The other micro-batches reuse the weights that the first one cast.
        caches_casts = strategy.caches_weight_casts and len(batches) > 1
        graphs = None if strategy.shards_parameters and len(batches) > 1 else self.micro_batch_graphs
        for number, batch in enumerate(batches, start=1):
            first, last = number == 1, number == len(batches)
            reuse = first if caches_casts else None
            if graphs is not None:
                losses += graphs(batch, num_supervised, first, last or accelerator.num_processes == 1)
            elif strategy.shards_parameters:  # weights are cast again in the backward pass
                losses += self._micro_batch_by_old_scales(batch, num_supervised, reuse, last)
                self.precision.update_scales()
            else:
                losses += self.micro_batch(batch, num_supervised, reuse, last)
        learning_rate = float(self.scheduler.get_last_lr()[0])
        grad_norm = strategy.step(self.optimizer, self.parameters, self.max_grad_norm)
        self.scheduler.step()
        end = self.clock.stamp()
        reduced = accelerator.reduce(losses.clone(), reduction="sum")  # gloo reduces in place
        values = {**dict(zip(loss_names, reduced, strict=True)), "grad_norm": grad_norm}
        values |= dict(zip(StepTokens._fields, tokens, strict=True))
        rows = tuple(row for batch in batches for row in batch.row_ids)
        return StepResult(learning_rate, values, losses.sum(), rows, start, end)

    def micro_batch(self, batch: Batch, num_supervised: Tensor, first: bool | None, last: bool = True) -> Tensor:
        """Run forward and backward of a micro-batch. Return its contributions to the step's mean losses (fp32,
        detached), in the order of `TrainingModel.loss_names`. For `first` see `Precision.context`. Gradients are
        reduced over ranks if the micro-batch is the `last` of its step.
        """
        with self.strategy.micro_batch(self.model, last=last), self.wgrad_accumulation.micro_batch(last):
            with self.precision.context(first_microbatch=first):
                loss_sum, aux = self.model(batch.to(num_supervised.device, non_blocking=True))
                auxiliary = (aux[name] for name in self.training_model.coefficients)
                losses = torch.stack([loss_sum, *auxiliary]) / num_supervised
            self.strategy.backward(losses.sum())
        return losses.detach()

    def _micro_batch_by_old_scales(
        self, batch: Batch, num_supervised: Tensor, first: bool | None, last: bool = True
    ) -> Tensor:
        """Run `micro_batch` without updating delayed scaling's scales. The caller must then call `update_scales`."""
        with self.precision.defer_scale_updates():
            return self.micro_batch(batch, num_supervised, first, last)
