"""Trains 1B for three steps on two GPUs with our reduce-scatter (`llm_fp8.distributed.fsdp_internals`) and FSDP2's.

Rank 0 prints losses and memory of each as JSON.

    torchrun --nproc_per_node=2 tests/support/reduce_scatter_check.py --sharding_mode fsdp_grad \\
        --mixed_precision fp8
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

from llm_fp8.config.parser import parse_config
from llm_fp8.distributed import fsdp_internals as reduce_scatter
from llm_fp8.distributed.process_group import start_process_group
from llm_fp8.observability.metrics import GIB
from llm_fp8.utils.ranks import LaunchRanks
from llm_fp8.utils.te_import import forget_delayed_scales
from tests.support.built_training import BuiltTraining
from tests.support.small import forget_accelerator

OPTIONS = [
    *("--model_name", "Llama-3.2-1B", "--random_init", "--use_te", "--output_dir", os.devnull),
    *("--batch_size", "2", "--max_seq_length", "512", "--gradient_accumulation_steps", "2"),
    *("--lr_scheduler", "constant", "--num_warmup_steps", "0"),
]
NUM_STEPS = 3


class Fsdp2s(DefaultReduceScatter):
    """FSDP2's own, made as ours is."""

    def __init__(self, unit: FSDPModule, stream: torch.cuda.Stream | None) -> None:
        super().__init__()


def main() -> None:
    """Train with the options of the command line both ways."""
    ranks = LaunchRanks.from_environment(os.environ)
    start_process_group(ranks)
    device = torch.device("cuda", torch.cuda.current_device())
    config, found = parse_config([*OPTIONS, *sys.argv[1:]], parallel=True), {}
    for name, of_unit in (("ours", reduce_scatter.MemorySavingReduceScatter), ("fsdp2s", Fsdp2s)):
        reduce_scatter.MemorySavingReduceScatter = of_unit  # type: ignore[misc]
        forget_accelerator()
        forget_delayed_scales()
        training = BuiltTraining(config)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        training.take(NUM_STEPS)
        peaks = {"peak_memory_gib": torch.cuda.max_memory_allocated(device) / GIB}
        peaks["peak_reserved_memory_gib"] = torch.cuda.max_memory_reserved(device) / GIB
        found[name] = {"losses": training.losses, **peaks}
        del training
        gc.collect()  # the model is part of a cycle
    if ranks.rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
