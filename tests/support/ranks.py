"""Run a function on several gloo ranks, each in its own process, and record how many bytes FSDP2 gathers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from llm_fp8.config.options import ParallelConfig
from llm_fp8.distributed.fsdp import FsdpStrategy
from llm_fp8.models.build import fill_weights
from llm_fp8.models.model import Model
from tests.support.processes import DEADLINE_S
from tests.support.small import model_structure


def _rank_main(rank: int, num_ranks: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks))
    torch.set_num_threads(1)
    place, timeout = f"file://{folder}/store", timedelta(seconds=DEADLINE_S)
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=num_ranks, timeout=timeout)
    torch.save(function(rank, *args), f"{folder}/{rank}.result")
    dist.barrier()
    dist.destroy_process_group()


def run_on_ranks(num_ranks: int, folder: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(rank, *args)` on every rank of a process group, and return the results by rank. If one rank
    fails, all are ended. `folder` is created for files of the ranks.
    """
    folder.mkdir()
    process_options: dict[str, Any] = {"nprocs": num_ranks, "daemon": True, "start_method": "forkserver"}
    torch.multiprocessing.start_processes(_rank_main, (num_ranks, str(folder), function, args), **process_options)
    return [torch.load(folder / f"{rank}.result", weights_only=False) for rank in range(num_ranks)]


def fsdp_strategy() -> FsdpStrategy:
    """Return the `FsdpStrategy` of --sharding_mode fsdp_full in fp32 on CPUs."""
    return FsdpStrategy("fsdp_full", Accelerator(cpu=True), ParallelConfig(), torch.float32, 1)


def sharded_model(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    """Build the model of --model_name `name` as a run with FSDP does: on the meta device, then sharded, then loaded.
    `dtype` is that of the parameters, and `options` are fields of `ModelConfig`.
    """
    model, strategy = model_structure(name, dtype, **options), fsdp_strategy()
    assert {parameter.device.type for parameter in model.module.parameters()} == {"meta"}
    strategy.shard(model.module, model.layers)
    fill_weights(model, seed=3)
    assert all(isinstance(parameter, DTensor) for parameter in model.module.parameters())
    return replace(model, full_tensor=strategy.full_tensor)


def full_parameters(model: Model) -> dict[str, Tensor]:
    return {name: model.full_tensor(parameter) for name, parameter in model.module.named_parameters()}


class CountedAllGather:
    """All-gather for FSDP2 that appends to `sent_bytes` how many bytes this rank contributes to each gather."""

    def __init__(self, model: nn.Module) -> None:
        """Install this object as the all-gather of every FSDP2 module of `model`."""
        self.sent_bytes: list[int] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(self)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self.sent_bytes.append(input_tensor.nbytes)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
