"""One process of several that exchange tensors: are the results right, and how fast is it.

    torchrun --nproc_per_node=8 -m llm_fp8.tools.verify.nccl_probe RESULT.json [MEBIBYTES]

NCCL on GPUs, gloo on CPUs. Bus bandwidth as NVIDIA's nccl-tests define it, which compares with the links' own figure
whatever the number n of
processes: bytes of the whole buffer over time, times 2 (n - 1) / n for all-reduce and (n - 1) / n for all-gather.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from llm_fp8.utils.json_files import write_json_atomic

NUM_REPEATS = 10


def pattern(rank: int, size: int, device: torch.device) -> Tensor:
    """fp32 [size], whole numbers that differ by place and rank and whose sums over ranks are exact."""
    return (torch.arange(size, device=device) % 251 + rank).float()


def timed(exchange: Callable[[], object], device: torch.device) -> float:
    """Median seconds of one exchange on this process."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    times = []
    for _ in range(NUM_REPEATS + 2):
        wait()
        dist.barrier()
        wait()
        began = time.perf_counter()
        exchange()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def main(result: Path, mebibytes: int) -> None:
    """Exchange, compare, time; the first process writes."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = mebibytes * 2**20 // 4 // world_size * world_size
    part = size // world_size

    reduced = pattern(rank, size, device)
    dist.all_reduce(reduced)
    expected = pattern(0, size, device) * world_size + sum(range(world_size))
    gathered = torch.empty(size, device=device)
    own = pattern(rank, part, device)
    dist.all_gather_into_tensor(gathered, own)
    wanted = torch.cat([pattern(other, part, device) for other in range(world_size)])
    right = torch.tensor(
        [torch.equal(reduced, expected), torch.equal(gathered, wanted)], dtype=torch.int32, device=device
    )
    dist.all_reduce(right, dist.ReduceOp.MIN)

    num_bytes = size * 4
    reduce_s = timed(lambda: dist.all_reduce(reduced), device)
    gather_s = timed(lambda: dist.all_gather_into_tensor(gathered, own), device)
    slowest = torch.tensor([reduce_s, gather_s], dtype=torch.float32, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank == 0:
        share = (world_size - 1) / world_size
        record = {
            "world_size": world_size,
            "backend": dist.get_backend(),
            "all_reduce_right": bool(right[0]),
            "all_gather_right": bool(right[1]),
            "all_reduce_gb_s": 2 * share * num_bytes / float(slowest[0]) / 1e9,
            "all_gather_gb_s": share * num_bytes / float(slowest[1]) / 1e9,
            "buffer_mib": mebibytes,
        }
        if device.type == "cuda":
            others = [other for other in range(world_size) if other != local_rank]
            record["without_peer_access"] = [
                other for other in others if not torch.cuda.can_device_access_peer(local_rank, other)
            ]
            record["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
        write_json_atomic(result, record)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 256)
