"""Eval loss, in the same precision as training."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import nn

from llm_fp8.data.collate import Batch
from llm_fp8.observability.metrics import perplexity
from llm_fp8.precision.context import Precision


@torch.no_grad()
def evaluate_loss(
    accelerator: Accelerator, model: nn.Module, precision: Precision, loader: Iterable[Batch]
) -> dict[str, float]:
    """Mean cross entropy over all supervised tokens of `loader`, under the `eval_` keys of `metrics.METRICS`.

    The mean is over tokens, not over batches. Restores the model's training mode. `loader` gives every rank the same
    number of batches.
    """
    started = time.perf_counter()
    was_training = model.training
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    with precision.preserving_state():
        for batch in loader:
            with precision.context(first_microbatch=None):
                loss_sum, _ = model(batch.to(accelerator.device, non_blocking=True))
            totals[0] += loss_sum
            totals[1] += batch.num_supervised_tokens
    model.train(was_training)
    loss_sum, num_supervised = accelerator.reduce(totals, reduction="sum").tolist()
    loss = loss_sum / num_supervised if num_supervised else float("nan")
    return {
        "eval_loss": loss,
        "eval_perplexity": perplexity(loss),
        "eval_num_supervised_tokens": num_supervised,
        "eval_time_s": time.perf_counter() - started,
    }
