"""The accelerator of a run and the strategy of its mode."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

from llm_fp8.config.options import Config
from llm_fp8.distributed.deepspeed import DeepSpeedStrategy, accelerator_arguments
from llm_fp8.distributed.fsdp import FsdpStrategy
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.observability.reporter import accelerator_tracking
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.utils.ranks import LaunchRanks


def build_accelerator(config: Config, ranks: LaunchRanks, plan: PrecisionPlan) -> Accelerator:
    """The run's only Accelerator. Precision is ours (`llm_fp8.precision.context`), so it gets "no", or "fp16" on a GPU
    for its gradient scaler. Accumulation is the loop's, which divides by tokens: without the plugin, Accelerate would
    divide by a number of steps that it finds in the environment.
    """
    mode = config.parallel.sharding_mode
    if mode.startswith("deepspeed"):
        return Accelerator(
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            **accelerator_arguments(config, mode, plan.compute_name, ranks.world_size),
            **accelerator_tracking(config),
        )
    scales_gradients = config.precision.mixed_precision == "fp16" and torch.cuda.is_available()
    return Accelerator(
        cpu=not torch.cuda.is_available(),  # without it Accelerate takes processes that have no GPU for strangers
        mixed_precision="fp16" if scales_gradients else "no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        # No rank changes buffers; gradients share the memory of the buckets that are all-reduced.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
        **accelerator_tracking(config),
    )


def build_strategy(
    mode: str, config: Config, accelerator: Accelerator, ranks: LaunchRanks, compute_dtype: torch.dtype
) -> DistributedStrategy:
    """The strategy of `mode`, a value that `sharding_mode.choose_mode` gave."""
    if mode.startswith("fsdp"):
        return FsdpStrategy(
            mode, accelerator, config.parallel, compute_dtype, config.parallel.gpus_per_copy(ranks.local_world_size)
        )
    if mode.startswith("deepspeed"):
        return DeepSpeedStrategy(mode, accelerator, config.parallel)
    return DistributedStrategy(mode, accelerator, config.parallel)
