"""The statistics of a comparison. The unit is the run, since the steps of a run share its machine and weights, and its
answers share its problems: pooled over runs as trials, they would reject a true null hypothesis far too often.

Intervals are Student's t intervals over runs. For two variants they are taken over the differences by seed. Rates and
their ratios are averaged as logarithms. A single run has no interval.

`tests/tools/compare/test_statistics.py` simulates how often these intervals are right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its 95% interval, which are None for a single run."""

    value: float
    low: float | None
    high: float | None

    def __format__(self, spec: str) -> str:
        """The estimate and the ends, each formatted as a number by `spec`."""
        return format(self.value, spec) + ("" if self.low is None else f" ({self.low:{spec}} to {self.high:{spec}})")


def t_interval(values: Sequence[float]) -> Interval:
    """The mean of one or more independent `values`, with Student's t interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, None, None)
    quantile = special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)
    half = float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)


def rate_interval(rates: Sequence[float]) -> Interval:
    """The geometric mean of `rates`, with the interval of their logarithms, whose ends cannot be negative."""
    found = t_interval(np.log(rates).tolist())
    return Interval(*(None if end is None else math.exp(end) for end in (found.value, found.low, found.high)))  # type: ignore[arg-type]
