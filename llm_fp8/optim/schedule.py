"""The learning rate over the steps of a run."""

from __future__ import annotations

import functools
import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from llm_fp8.config.options import OptimConfig
from llm_fp8.optim.optimizers import unwrap


def effective_warmup_steps(num_warmup_steps: int, total_steps: int) -> int:
    """Warm-up steps that a run of `total_steps` uses: what was asked for, at most a tenth of the run."""
    return min(num_warmup_steps, total_steps // 10)


def learning_rate_factor(step: int, total_steps: int, warmup_steps: int, kind: str) -> float:
    """The learning rate of the optimizer step with index `step` (0 for the first), as a share of the peak.

    The w warm-up steps get 1/w, 2/w, ..., 1: no step runs at zero. After them, with p = (step - w) / (total_steps - w),
    at most 1: constant 1, linear 1 - p, cosine (1 + cos(pi p)) / 2. `total_steps` includes resumed parts.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if kind == "linear":
        return 1.0 - progress
    return (1.0 + math.cos(math.pi * progress)) / 2


def build_scheduler(optimizer: Optimizer, config: OptimConfig, total_steps: int, completed_steps: int = 0) -> LambdaLR:
    """The schedule of `config` on `optimizer`; call `.step()` once after each optimizer step. Not for
    `Accelerator.prepare`, which would step it once per process.
    """
    optimizer = unwrap(optimizer)
    factor = functools.partial(
        learning_rate_factor,
        total_steps=total_steps,
        warmup_steps=effective_warmup_steps(config.num_warmup_steps, total_steps),
        kind=config.lr_scheduler,
    )
    for group in optimizer.param_groups:
        group["initial_lr"] = config.learning_rate
    return LambdaLR(optimizer, factor, last_epoch=completed_steps - 1)
