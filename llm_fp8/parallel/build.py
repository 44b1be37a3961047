"""The engine of a mode."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from llm_fp8.config import Config
from llm_fp8.parallel.choice import hybrid_shard_size
from llm_fp8.parallel.deepspeed import DeepSpeedEngine
from llm_fp8.parallel.engine import Engine
from llm_fp8.parallel.fsdp import FsdpEngine
from llm_fp8.ranks import LaunchRanks


def build_engine(mode: str, config: Config, accelerator: Accelerator, ranks: LaunchRanks, compute_dtype: torch.dtype) -> Engine:
    """The engine for `mode`, a value that `choice.choose_mode` gave."""
    if mode.startswith("fsdp"):
        return FsdpEngine(mode, accelerator, config.parallel, compute_dtype, hybrid_shard_size(config, ranks))
    if mode.startswith("deepspeed"):
        return DeepSpeedEngine(mode, accelerator, config.parallel)
    return Engine(mode, accelerator, config.parallel)
