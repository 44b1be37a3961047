"""The accelerator of a run and the strategy of its sharding mode."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

from llm_fp8.config.options import Config
from llm_fp8.distributed.deepspeed import (
    DeepSpeedStrategy,
    accelerator_arguments,
    deepspeed_settings,
    load_deepspeed,
)
from llm_fp8.distributed.fsdp import FsdpStrategy
from llm_fp8.distributed.strategy import DistributedStrategy, PlainCopiesStrategy
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.utils.ranks import LaunchRanks


def build_accelerator(config: Config, ranks: LaunchRanks, plan: PrecisionPlan) -> Accelerator:
    """The run's only Accelerator. Precision is `precision.context`'s part, but for fp16's gradient scaler."""
    mode = config.parallel.sharding_mode
    # No rank changes buffers; gradients share the memory of the buckets that are all-reduced.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    # Without cpu=True Accelerate misreads processes that have no GPU.
    arguments = {"cpu": not torch.cuda.is_available(), "kwargs_handlers": [ddp]}
    if mode.startswith("deepspeed"):
        load_deepspeed(f"--sharding_mode {mode}")
        arguments = accelerator_arguments(deepspeed_settings(config, mode, plan.compute_name, ranks.world_size))
    return Accelerator(
        mixed_precision="fp16" if config.precision.mixed_precision == "fp16" and torch.cuda.is_available() else "no",
        # Otherwise it would divide by a number of steps that it finds in the environment.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        **arguments,
    )


def build_strategy(
    mode: str, config: Config, accelerator: Accelerator, ranks: LaunchRanks, compute_dtype: torch.dtype
) -> DistributedStrategy:
    if mode.startswith("fsdp"):
        return FsdpStrategy(mode, accelerator, config.parallel, compute_dtype, ranks.local_world_size)
    if mode.startswith("deepspeed"):
        return DeepSpeedStrategy(mode, accelerator, config.parallel)
    if config.model.cuda_graphs:
        return PlainCopiesStrategy(mode, accelerator, config.parallel)
    return DistributedStrategy(mode, accelerator, config.parallel)
