"""Scales of delayed scaling before the first step.

Delayed scaling takes a tensor's scale from the amax history of past passes; before the first pass the scale is 1. In
backward that costs the gradient: the loss is a mean over tens of thousands of tokens, so gradients of activations lie
below 1e-5 and underflow in E5M2.

So the first micro-batch runs forward and backward several times before training, and its gradients are dropped:

    pass 1         scales of weights, activations, and the output gradients of attention's projection and of fc2, which
                   come through the residual stream
    pass 2         scales of the output gradients of qkv and fc1, which come out of those layers' dgrads and were zero
    pass 3 and on  the residual stream's gradient, to which the layers now contribute, grows from layer to layer

With 32 layers nothing changes after the fifth pass (`tests/train/test_scale_warmup.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from llm_fp8.data.collate import Batch
from llm_fp8.data.loader import TrainLoader
from llm_fp8.models.loss_model import TrainingModel
from llm_fp8.precision.context import Precision
from llm_fp8.train.setup import TrainingSetup

PASSES = 5


def first_step(loader: TrainLoader) -> list[Batch]:
    """The micro-batches of the first step that `loader` will give, which it will give again."""
    position = loader.state_dict()
    batches = next(iter(loader))
    loader.load_state_dict(position)
    return batches


def warm_up_scales(setup: TrainingSetup, loader: TrainLoader) -> None:
    """Find the first scales of delayed scaling, where the run has it."""
    if not setup.precision.scales_lag:
        return
    plan, batches = setup.plan, first_step(loader)
    # The loop divides by the tokens of all processes, and `DistributedStrategy.backward` multiplies by their number.
    own = torch.tensor(float(sum(batch.num_supervised_tokens for batch in batches)), device=plan.device)
    num_supervised = float(plan.accelerator.reduce(own, reduction="mean"))
    warm_up_delayed_scales(setup.training_model, setup.precision, batches[0].to(plan.device), num_supervised)
    plan.say(f"delayed scaling: first scales from {PASSES} passes over the first micro-batch")


def warm_up_delayed_scales(model: TrainingModel, precision: Precision, batch: Batch, num_supervised: float) -> None:
    """Run `batch` forward and backward `PASSES` times where scales lag; weights and random state stay as they were,
    gradients None. Collective where scales or parameters are shared by ranks.

    `model` is sharded by FSDP, or not yet prepared by the strategy; `num_supervised`, the mean over processes of
    the step's supervised tokens, sets the gradients' size.
    """
    device = batch.input_ids.device
    model.train()

    # Each gradient is freed at once: all of them may be more than one rank holds in training (ZeRO 2 and 3).
    def drop_gradient(parameter: Tensor) -> None:
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(drop_gradient) for p in model.parameters() if p.requires_grad]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for _ in range(PASSES):
            with precision.context(first_microbatch=None):
                loss_sum, aux = model(batch)
                loss = sum(aux.values(), start=loss_sum) / max(1.0, num_supervised)
            loss.backward()
    for hook in hooks:
        hook.remove()


def prepare_with_scales(
    setup: TrainingSetup, optimizer: Optimizer, loader: TrainLoader | None
) -> tuple[nn.Module, Any]:
    """`strategy.prepare`, with the first scales before it, since it may take every backward pass for training's;
    or after it, since FSDP's sharded parameters have their final form only then. Without a `loader` they
    are in the checkpoint.
    """
    strategy = setup.plan.strategy
    if loader is not None and not strategy.shards_parameters:
        warm_up_scales(setup, loader)
    prepared = strategy.prepare(setup.training_model, optimizer, setup.precision)
    if loader is not None and strategy.shards_parameters:
        warm_up_scales(setup, loader)
    return prepared
