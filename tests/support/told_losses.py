"""Eval losses that a run is told in place of those that it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llm_fp8.train.callbacks import RunCallbacks


def telling(losses: Mapping[int, float]) -> Callable[[RunCallbacks, int], float]:
    """`RunCallbacks.evaluate` as it is now, but for what it returns: the loss of the step in `losses`."""
    evaluate = RunCallbacks.evaluate

    def told(self: RunCallbacks, step: int) -> float:
        evaluate(self, step)
        return losses[step]

    return told


def tell(losses: Mapping[int, float]) -> None:
    """Tell every run of this process, which is a rank's own."""
    RunCallbacks.evaluate = telling(losses)  # type: ignore[method-assign]
