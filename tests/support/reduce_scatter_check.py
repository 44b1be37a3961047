"""Trains 1B for three steps on two GPUs with our reduce-scatter (`llm_fp8.distributed.fsdp_internals`) and FSDP2's.

Rank 0 prints losses and memory of each as JSON.

    torchrun --nproc_per_node=2 tests/support/reduce_scatter_check.py fsdp_grad:delayed
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

# As in the scripts; and attention that is deterministic, so that equal sums give equal losses.
os.environ |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from llm_fp8.distributed import fsdp_internals as reduce_scatter
from llm_fp8.distributed.process_group import start_process_group
from llm_fp8.tools.bench.measure import measure
from llm_fp8.tools.bench.variants import parse_variant
from llm_fp8.tools.bench.workload import Workload
from llm_fp8.utils.ranks import LaunchRanks

WORKLOAD = "Llama-3.2-1B:2x512x2"
NUM_STEPS = 3


class Fsdp2s(DefaultReduceScatter):
    """FSDP2's own, made as ours is."""

    def __init__(self, unit: FSDPModule, stream: torch.cuda.Stream | None) -> None:
        super().__init__()


def main() -> None:
    """Measure the arm of the command line both ways."""
    ranks = LaunchRanks.from_environment(os.environ)
    start_process_group(ranks)
    device = torch.device("cuda", torch.cuda.current_device())
    work, found = Workload.parse(WORKLOAD, NUM_STEPS), {}
    for name, of_unit in (("ours", reduce_scatter.MemorySavingReduceScatter), ("fsdp2s", Fsdp2s)):
        reduce_scatter.MemorySavingReduceScatter = of_unit  # type: ignore[misc]
        measured = measure(work, parse_variant(sys.argv[1]), 1, device)
        gc.collect()  # the model is part of a cycle
        found[name] = {key: measured[key] for key in ("losses", "peak_memory_gib", "peak_reserved_memory_gib")}
    if ranks.rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
