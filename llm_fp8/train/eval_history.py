"""What the evaluations of a run come to: its best step so far (--keep_best), and whether to stop early. Part of a
checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from llm_fp8.config.options import RunConfig

_STATE = ("best_step", "best_loss", "reference_loss", "num_without_improvement", "data")


@dataclass
class EvalHistory:
    """Updated with the same eval losses (nats per token) on every rank."""

    keeps_best: bool = False
    patience: int = 0
    """Evaluations without improvement that end the run; 0: none do."""
    best_step: int | None = None
    """The optimizer step behind which the eval loss was lowest, the first of several; None before an evaluation."""
    best_loss: float | None = None
    reference_loss: float | None = None
    """The lowest so far of these evaluations."""
    num_without_improvement: int = 0
    """Evaluations since then."""
    data: str | None = None
    """Identifies what is evaluated on; losses on different data do not compare."""

    @classmethod
    def of_run(cls, options: RunConfig, data: str | None) -> EvalHistory:
        """Before the first evaluation of a run."""
        return cls(options.keep_best, options.early_stopping_patience, data=data)

    @property
    def stops_early(self) -> bool:
        """Whether the run is to end now."""
        return 0 < self.patience <= self.num_without_improvement

    def describe_stop(self) -> str:
        """Why `stops_early` is true, for people."""
        lowest = "no finite eval loss" if self.reference_loss is None else f"eval loss {self.reference_loss:.4g}"
        return (
            f"{self.num_without_improvement} evaluations in a row did not improve on {lowest} "
            f"(--early_stopping_patience {self.patience})"
        )

    def add(self, step: int, eval_loss: float) -> None:
        """Take in the eval loss after `step`; one that is not finite is neither the best nor an improvement."""
        if self.keeps_best and eval_loss < _or_infinity(self.best_loss):
            self.best_step, self.best_loss = step, eval_loss
        if self.patience == 0 or self.stops_early:  # stopped: a resumed run evaluates again before its export
            return
        if eval_loss < _or_infinity(self.reference_loss):
            self.reference_loss, self.num_without_improvement = eval_loss, 0
        else:
            self.num_without_improvement += 1

    def forget_best(self) -> None:
        """Begin anew to look for the best step."""
        self.best_step = self.best_loss = None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint records."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on from a checkpoint, which an earlier version may have written: it lacks entries then. False, and nothing
        changes, where its evaluations were on other data.
        """
        if state.get("data", self.data) != self.data:
            return False
        for name in _STATE:
            if name in state:
                setattr(self, name, state[name])
        return True


def _or_infinity(loss: float | None) -> float:
    return math.inf if loss is None else loss
