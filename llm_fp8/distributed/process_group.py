"""The process group of a run, with NCCL for tensors on GPUs and gloo for tensors in host memory."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks, end_with_parent

T = TypeVar("T")
TIMEOUT = datetime.timedelta(minutes=30)  # ranks wait while the main rank tokenises a large dataset


def start_process_group(ranks: LaunchRanks) -> None:
    """Join the launcher's process group, if any. Raise `UserError` if a GPU is missing or other ranks do not answer."""
    if not ranks.launched or dist.is_initialized():
        return
    end_with_parent()
    backend = "gloo"
    if torch.cuda.is_available():
        local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= num_gpus:
            visible = f"{num_gpus} are visible; use torchrun --nproc_per_node={num_gpus}"
            raise UserError(f"no GPU for LOCAL_RANK {local_rank}: {visible}.")
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    try:
        # After a restart, torchrun's store still has addresses of dead processes, so each attempt uses its own prefix.
        store, rank, size = next(dist.rendezvous("env://", timeout=TIMEOUT))
        attempt = dist.PrefixStore(f"attempt-{ranks.restart_count}", store)
        dist.init_process_group(backend, timeout=TIMEOUT, store=attempt, rank=rank, world_size=size)
    except RuntimeError as error:  # torch raises DistError, gloo RuntimeError
        reason = str(error).splitlines()[0]
        raise UserError(f"rank {ranks.rank} cannot reach the other processes ({reason}); see their logs.") from error


def device_of_process() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def largest(value: int) -> int:
    """Return the maximum of `value` over all ranks. Collective on the CPU, without a GPU synchronisation."""
    tensor = torch.tensor([value])
    if dist.is_initialized():
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor.item())


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the `value` of every rank, in rank order. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)  # on the CPU, which every group of `start_process_group` has
    return values


def decided_by_main(decide: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return the result of `decide` on rank 0. If it raises, rank 0 does too, others raise `UserError`. Collective."""
    outcome: tuple[Any, str | None] = None, None  # the result, and the reason of a failure
    failure: BaseException | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome = decide(), None
        except BaseException as error:  # raised below, after the other ranks know it
            failure = error
            outcome = None, str(error) if isinstance(error, UserError) else f"the main process failed: {error!r}"
    result, reason = gathered(outcome, group)[0]
    if reason is not None:
        raise failure or UserError(reason)
    return result
