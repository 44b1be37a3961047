"""Compute the scales of delayed scaling before the first step.

Delayed scaling computes a tensor's scale from the amax history of past passes. Before the first pass, the scale is 1.
With it gradients would underflow in E5M2: a loss that is a mean over tens of thousands of tokens has some below 1e-5.

Therefore the first micro-batch runs forward and backward several times before training, without a step:

    pass 1         finds the scales of weights, activations, and the output gradients of attention's projection and of
                   fc2, which are the gradient of the residual stream
    pass 2         finds the scales of the output gradients of qkv and fc1, which are computed from the gradients above
                   and were zero in pass 1
    later passes   update the scales, as the residual stream's gradient now includes the layers' contributions

With 32 layers nothing changes after the fifth pass (`tests/step/test_scale_warmup.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm_fp8.data.collate import Batch
from llm_fp8.precision.context import Precision
from llm_fp8.step.loss_model import TrainingModel

PASSES = 5


def warm_up_delayed_scales(model: TrainingModel, precision: Precision, batch: Batch, num_supervised: float) -> None:
    """Fill amax histories by `PASSES` forward and backward passes on `batch`. Weights and random state do not change;
    gradients are None afterwards. `model` is sharded by FSDP, or not yet prepared by the strategy. `num_supervised`, by
    which losses are divided, is the mean over processes of the step's supervised tokens. All ranks must call it.
    """
    device = batch.input_ids.device
    model.train()

    # Free each gradient at once: all unsharded gradients may need more memory than training does (ZeRO 2 and 3).
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
