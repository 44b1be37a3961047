"""Eval losses that a run is told, in place of those it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llm_fp8.train.loop import TrainingLoop


def telling(losses: Mapping[int, float]) -> Callable[[TrainingLoop], float]:
    """`TrainingLoop.eval_loss` as it is now, but for what it returns: the loss of the step in `losses`."""
    eval_loss = TrainingLoop.eval_loss

    def told(self: TrainingLoop) -> float:
        eval_loss(self)
        return losses[self.step]

    return told


def tell(losses: Mapping[int, float]) -> None:
    """Tell every run of this process, which is a rank's own."""
    TrainingLoop.eval_loss = telling(losses)  # type: ignore[method-assign]
