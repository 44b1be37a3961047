"""The accelerator of a run and the strategy of its sharding mode, whose module is imported by the runs that need it."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

from llm_fp8.config.options import Config
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
        from llm_fp8.distributed import deepspeed

        deepspeed.load_deepspeed(f"--sharding_mode {mode}")
        settings = deepspeed.deepspeed_settings(config, mode, plan.compute_name, ranks.world_size)
        arguments = deepspeed.accelerator_arguments(settings)
    return Accelerator(
        mixed_precision="fp16" if config.precision.mixed_precision == "fp16" and torch.cuda.is_available() else "no",
        # Otherwise it would divide by a number of steps that it finds in the environment.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        **arguments,
    )


def build_strategy(
    mode: str, config: Config, accelerator: Accelerator, ranks: LaunchRanks, compute_dtype: torch.dtype
) -> DistributedStrategy:
    run = mode, accelerator, config.parallel
    if mode.startswith("deepspeed"):
        from llm_fp8.distributed.deepspeed import DeepSpeedStrategy

        return DeepSpeedStrategy(*run)
    if not mode.startswith("fsdp"):
        return PlainCopiesStrategy(*run) if config.always_graphs else DistributedStrategy(*run)
    if not config.parallel.fp8_params:
        from llm_fp8.distributed.fsdp import FsdpStrategy

        return FsdpStrategy(*run, compute_dtype, ranks.local_world_size)
    from llm_fp8.distributed.fp8_params import Fp8ParamsStrategy

    return Fp8ParamsStrategy(*run, compute_dtype, ranks.local_world_size)
