"""Build the strategy of a sharding mode. The module with this strategy is imported only in runs that use it."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

from llm_fp8.config.options import Config
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.models.memory import MODES
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.utils.ranks import LaunchRanks


def build_strategy(mode: str, config: Config, ranks: LaunchRanks, plan: PrecisionPlan) -> DistributedStrategy:
    """Build the strategy of the sharding mode `mode`, with an Accelerator. Only fp16 uses Accelerate's autocast."""
    engine, parallel = MODES[mode].engine, config.parallel
    if engine == "deepspeed":
        from llm_fp8.distributed import deepspeed

        arguments = deepspeed.accelerator_arguments(config, mode, plan.compute_name, ranks.world_size)
    else:
        # Buffers do not change, and gradients can be views of the buckets that are all-reduced.
        ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        # Without cpu=True, Accelerate mishandles processes that have no GPU.
        arguments = {"cpu": not torch.cuda.is_available(), "kwargs_handlers": [ddp]}
    accelerator = Accelerator(
        mixed_precision="fp16" if plan.effective == "fp16" else "no",
        # Otherwise Accelerate would divide the loss by a number of steps from the environment.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        **arguments,
    )
    common_arguments = mode, accelerator, parallel
    if engine == "deepspeed":
        return deepspeed.DeepSpeedStrategy(*common_arguments)
    if engine == "copies":
        return DistributedStrategy(*common_arguments, plain=bool(config.model.cuda_graphs))
    sharded = (*common_arguments, plan.compute_dtype, ranks.local_world_size)
    if parallel.fp8_params:
        from llm_fp8.distributed.fp8_params import Fp8ParamsStrategy

        return Fp8ParamsStrategy(*sharded)
    from llm_fp8.distributed.fsdp import FsdpStrategy

    return FsdpStrategy(*sharded)
