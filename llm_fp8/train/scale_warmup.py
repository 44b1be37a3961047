"""Scales of delayed scaling before the first step.

Delayed scaling takes a tensor's scale from the maxima of past passes, and before the first there is none: the scale is
1. Forward that costs some digits. Backward it costs the gradient: of a loss that is a mean over tens of thousands of
   tokens, gradients of activations lie below 1e-5, which in
E5M2 is nothing. What is left of the first step's gradient is what reached the weights past the fp8 products, and AdamW,
which divides by the gradient's own size, makes a whole update of it.

So the first micro-batch passes forward and backward before training, and its gradients are dropped. One pass is not
enough:

    pass 1        scales of weights, activations, and the gradients of attention's output projection and of fc2: the
                  gradient that reaches a layer's second product from behind comes right through the residual stream
    pass 2        those of the fused q, k and v projection and of fc1, whose gradients come out of the second
                  products, which were nothing so far
    pass 3 and on the residual stream's gradient, to which the layers now add their part, grows from layer to layer;
    where it exceeds its scale it is
                  cut off, and the layers before it see too little

The more layers there are and the more they add, the longer it goes on; with 32 layers nothing changes after the fifth
pass (`tests/train/test_scale_warmup.py`). Recipes that take scales from the tensor itself need none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from llm_fp8.data.collate import Batch
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.models.loss_model import TrainingModel
from llm_fp8.precision.context import Precision

PASSES = 5


def supervised_tokens_per_process(accelerator: Accelerator, batches: Sequence[Batch]) -> float:
    """Supervised tokens of a step, of which `batches` are this process's share, over the number of processes.
    Collective.

    The number by which a summed loss is divided before its backward pass: `llm_fp8.train.loop` divides by all of them,
    and `DistributedStrategy.backward` multiplies by the number of processes, whose gradients are averaged.
    """
    count = torch.tensor(float(sum(batch.num_supervised_tokens for batch in batches)), device=accelerator.device)
    return float(accelerator.reduce(count, reduction="mean"))


def warm_up_delayed_scales(model: TrainingModel, precision: Precision, batch: Batch, num_supervised: float) -> None:
    """Pass `batch` forward and backward as often as scales need; weights, gradients (there are none) and random numbers
    stay as they were.

    With `precision.scales_lag` False nothing happens. Collective where scales or parameters belong to several ranks.

    Args:
        model: before it is wrapped by what exchanges gradients, or with parameters that FSDP splits.
        precision: attached to it.
        batch: a micro-batch, on the device.
        num_supervised: of `supervised_tokens_per_process`. The size of gradients depends on it; maxima that are too
            large would stay in the history, and underflow with them, for as many steps as it is long.
    """
    if not precision.scales_lag:
        return
    device = batch.input_ids.device
    model.train()
    # Each gradient goes at once: together they can be more than training keeps of them on one rank (DeepSpeed's stages
    # 2 and 3).
    hooks = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in model.parameters() if p.requires_grad]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for _ in range(PASSES):
            with precision.context(first_microbatch=None):
                loss = model(batch) / max(1.0, num_supervised)
            loss.backward()
    for hook in hooks:
        hook.remove()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def prepare_with_scales(
    strategy: DistributedStrategy, model: TrainingModel, optimizer: Optimizer, find: Callable[[], None]
) -> tuple[nn.Module, Any]:
    """`strategy.prepare`, with `find`, which calls `warm_up_delayed_scales`, at the right moment.

    What DDP and DeepSpeed wrap takes every backward pass for training's; parameters that FSDP splits have their final
    form only behind `prepare`.
    """
    if not strategy.shards_parameters:
        find()
    prepared = strategy.prepare(model, optimizer)
    if strategy.shards_parameters:
        find()
    return prepared
