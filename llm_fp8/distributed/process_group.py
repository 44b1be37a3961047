"""The process group of a run: NCCL for tensors on GPUs, gloo for tensors in host memory."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator

from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks

T = TypeVar("T")

TIMEOUT = datetime.timedelta(minutes=30)
"""How long a rank waits for another: the first one waits while the main rank tokenises a large dataset."""

_LOST_PEER = re.compile(
    r"connection (closed|reset) by peer|connection refused|broken pipe|socket closed|remote process exited|"
    r"timed out waiting|watchdog caught collective|nccl communicator was aborted",
    re.IGNORECASE,
)


def start_process_group(ranks: LaunchRanks) -> None:
    """Join the other processes of the launch, if there is a launcher and it is not done already. `UserError` where
    there is no GPU for this process, or the others do not come.
    """
    if not ranks.launched or dist.is_initialized():
        return
    from llm_fp8.utils.subprocesses import end_with_parent

    end_with_parent()
    backend = "gloo"
    if torch.cuda.is_available():
        local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise UserError(
                f"there is no GPU for LOCAL_RANK {local_rank}: this process sees {num_gpus}, counted from 0; start as "
                f"many processes on a host as it has GPUs (torchrun --nproc_per_node={num_gpus}, accelerate launch "
                "--num_processes), or make more of them visible (CUDA_VISIBLE_DEVICES, Slurm's --gpus-per-node)."
            )
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, timeout=TIMEOUT)
    except RuntimeError as error:  # torch's DistError, gloo's plain one
        raise UserError(
            f"rank {ranks.rank} did not meet all other processes of this run ({str(error).splitlines()[0]}): one was "
            "not started or has ended, see what the others print."
        ) from error


def own_device() -> torch.device:
    """This process's GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def end_process_group(accelerator: Accelerator) -> None:
    """Leave the group, at the end of a run that ended well."""
    # DDP first: as the last to refer to the group it would wait, holding the GIL, for threads of gloo that need it.
    accelerator.free_memory()
    if dist.is_initialized():
        dist.destroy_process_group()


def largest(value: int) -> int:
    """The largest `value` of all ranks; collective, on the CPU, without a GPU synchronisation."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return int(tensor.item())


def gathered(value: T) -> list[T]:
    """`value` of every rank, in their order. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)  # on the CPU, which every group of `start_process_group` has
    return values


def decided_by_main(decide: Callable[[], T]) -> T:
    """What `decide` returns on rank 0, on every rank; or the `UserError` that it raises there. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return decide()
    decision: list[object] = [None, None]
    if dist.get_rank() == 0:
        try:
            decision[0] = decide()
        except UserError as error:
            decision[1] = str(error)
    dist.broadcast_object_list(decision, src=0, device=torch.device("cpu"))
    value, problem = decision
    if problem is not None:
        raise UserError(str(problem))
    return value  # type: ignore[return-value]


def smallest_gpu_gib(device: torch.device) -> float | None:
    """Memory of the smallest GPU of the launch; None on CPUs. Collective."""
    if device.type != "cuda":
        return None
    return min(gathered(torch.cuda.get_device_properties(device).total_memory / 2**30))


def is_loss_of_a_peer(error: BaseException) -> bool:
    """Whether a collective operation failed because another process is gone, as far as the error's text tells."""
    return dist.is_initialized() and isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None
