"""Evaluate in the precision of training; track the best step (--keep_best) and --early_stopping_patience."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from llm_fp8.data.collate import Batch
from llm_fp8.precision.context import Precision

_STATE = ("last_step", "best_step", "best_loss", "num_without_improvement", "data")


@torch.no_grad()
def evaluate_loss(
    accelerator: Accelerator, model: nn.Module, precision: Precision, loader: Iterable[Batch]
) -> dict[str, float]:
    """Return the mean cross entropy (nats) per supervised token. Every rank needs as many batches in `loader`."""
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


@dataclass
class EvalHistory:
    """A run's evaluations: part of a checkpoint, and updated with the same eval losses on every rank."""

    keeps_best: bool = False
    patience: int = 0  # number of evaluations without improvement that ends the run; 0: never
    data: str | None = None  # identifies the eval data: losses on other data are not comparable
    last_step: int | None = None  # of the last evaluation
    best_step: int | None = None  # of the lowest eval loss, the first if several are equal
    best_loss: float = math.inf
    num_without_improvement: int = 0  # number of evaluations since `best_step`

    @property
    def kept_step(self) -> int | None:
        """The step whose checkpoint --keep_best keeps."""
        return self.best_step if self.keeps_best else None

    @property
    def stops_early(self) -> bool:
        return 0 < self.patience <= self.num_without_improvement

    def add(self, step: int, eval_loss: float) -> None:
        """Record the eval loss after `step`. A NaN or infinite loss is neither the best nor an improvement."""
        self.last_step = step
        if eval_loss < self.best_loss:
            self.best_step, self.best_loss, self.num_without_improvement = step, eval_loss, 0
        else:
            self.num_without_improvement += 1

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a checkpoint's evaluations; return False and change nothing if they used other data."""
        if state["data"] != self.data:
            return False
        vars(self).update(state)
        return True
