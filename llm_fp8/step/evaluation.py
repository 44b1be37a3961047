"""Evaluate the loss in the precision of training."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import nn

from llm_fp8.data.collate import Batch
from llm_fp8.precision.context import Precision


@torch.no_grad()
def evaluate_loss(
    accelerator: Accelerator, model: nn.Module, precision: Precision, loader: Iterable[Batch]
) -> dict[str, float]:
    """Return the mean cross entropy (nats) per supervised token, and other metrics. Ranks need equally many batches."""
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
    total_loss, num_supervised = accelerator.reduce(totals, reduction="sum").tolist()
    loss = torch.tensor(total_loss / num_supervised if num_supervised else math.nan, dtype=torch.float64)
    return {
        "eval_loss": loss.item(),
        "eval_perplexity": loss.exp().item(),  # infinite if it is too large for a float
        "eval_num_supervised_tokens": num_supervised,
        "eval_time_s": time.perf_counter() - started,
    }
