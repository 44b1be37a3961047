"""Eval losses that a run is told, in place of those it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llm_fp8.run.evaluation import EvalHistory


def telling(losses: Mapping[int, float]) -> Callable[[EvalHistory, int, float], None]:
    """`EvalHistory.add` as it is now, but for what it takes in: the loss of the step in `losses`."""
    add = EvalHistory.add
    return lambda self, step, eval_loss: add(self, step, losses[step])


def tell(losses: Mapping[int, float]) -> None:
    """Tell every run of this process, which is a rank's own."""
    EvalHistory.add = telling(losses)  # type: ignore[method-assign]
