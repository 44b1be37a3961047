"""The strategy of --cuda_graphs: one process, or several GPUs without DDP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.distributed.wgrad_fusion import FusedWgradAccumulation


class PlainCopiesStrategy(DistributedStrategy):
    """Trains a copy of the model on each GPU without DDP, whose hooks would run only while a graph is captured.
    Gradients are averaged over the ranks after a step's last micro-batch.
    """

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        self.wgrad_accumulation = FusedWgradAccumulation(model)
        return model, self.accelerator.prepare(optimizer, device_placement=[False])

    @contextlib.contextmanager
    def micro_batch(self, model: nn.Module, last: bool) -> Iterator[None]:
        assert self.wgrad_accumulation is not None
        with self.wgrad_accumulation.micro_batch():
            yield

    def step(self, optimizer: Any, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
        if self.accelerator.num_processes > 1:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            for reduction in [dist.all_reduce(grad, dist.ReduceOp.AVG, async_op=True) for grad in gradients]:
                reduction.wait()
        return super().step(optimizer, parameters, max_norm)
