"""The strategy of a sharding mode, whose module is imported by the runs that need it."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin

from llm_fp8.config.options import MODES, Config
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.utils.ranks import LaunchRanks


def build_strategy(mode: str, config: Config, ranks: LaunchRanks, plan: PrecisionPlan) -> DistributedStrategy:
    """The strategy of a run and, in it, its only Accelerator, which of precision has fp16's gradient scaler alone."""
    engine, parallel = MODES[mode].engine, config.parallel
    if engine == "deepspeed":
        from llm_fp8.distributed import deepspeed

        arguments = deepspeed.accelerator_arguments(config, mode, plan.compute_name, ranks.world_size)
    else:
        # No rank changes buffers; gradients share the memory of the buckets that are all-reduced.
        ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        # Without cpu=True Accelerate misreads processes that have no GPU.
        arguments = {"cpu": not torch.cuda.is_available(), "kwargs_handlers": [ddp]}
    accelerator = Accelerator(
        mixed_precision="fp16" if plan.effective == "fp16" else "no",
        # Otherwise it would divide by a number of steps that it finds in the environment.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        **arguments,
    )
    run = mode, accelerator, parallel
    if engine == "deepspeed":
        return deepspeed.DeepSpeedStrategy(*run)
    if engine == "copies":
        return DistributedStrategy(*run, plain=config.always_graphs)
    sharded = (*run, plan.compute_dtype, ranks.local_world_size)
    if parallel.fp8_params:
        from llm_fp8.distributed.fp8_params import Fp8ParamsStrategy

        return Fp8ParamsStrategy(*sharded)
    from llm_fp8.distributed.fsdp import FsdpStrategy

    return FsdpStrategy(*sharded)
