"""What the evaluations of a run come to: the best step so far (--keep_best). Part of a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass
class EvalHistory:
    """Updated with the same eval losses on every rank."""

    keeps_best: bool = False
    best_step: int | None = None
    """The optimizer step behind which the eval loss was lowest, the first of several; None before an evaluation."""
    best_loss: float | None = None
    """Its eval loss, in nats per token."""

    def add(self, step: int, eval_loss: float) -> None:
        """Take in the eval loss after `step`; one that is not finite is never the best."""
        if self.keeps_best and eval_loss < (math.inf if self.best_loss is None else self.best_loss):
            self.best_step, self.best_loss = step, eval_loss

    def forget_best(self) -> None:
        """Begin anew to look for the best step."""
        self.best_step = self.best_loss = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint records."""
        return {"best_step": self.best_step, "best_loss": self.best_loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.best_step, self.best_loss = state["best_step"], state["best_loss"]
