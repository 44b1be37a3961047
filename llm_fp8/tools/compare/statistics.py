"""The statistics of a comparison: pure functions of numbers, deterministic.

**Intervals of speed** are percentile bootstrap intervals (Efron & Tibshirani, An Introduction to the Bootstrap, 1993,
chapter 13) over two levels: runs (one per seed) are drawn with replacement, and within each drawn run its steps.
Consecutive steps share what slows them (clocks, a neighbour on the host), so steps are drawn in blocks of consecutive
ones (moving blocks, Künsch 1989). Two variants that ran the same seeds are drawn together, seed by seed. With one run
per variant the interval covers the steps of that run alone.

**Answers** are compared by McNemar's exact test: of the problems that exactly one of the two models solved, how many
were solved by each, against a fair coin (McNemar 1947; the exact form is the binomial test).

Not scipy, which no other package here needs: `scipy.stats.bootstrap` draws neither in two levels nor in blocks, and
`scipy.stats.binomtest` would replace three lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2000
BLOCK_STEPS = 10
"""Consecutive steps that are drawn together; fewer in runs of fewer than ten such blocks."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its 95% interval."""

    value: float
    low: float
    high: float


def _resampled_medians(
    steps: Sequence[float], generator: np.random.Generator, num_resamples: int
) -> NDArray[np.float64]:
    """Medians of `num_resamples` block-wise resamples of one run's steps; shape [num_resamples]."""
    values = np.asarray(steps, dtype=np.float64)
    block = max(1, min(BLOCK_STEPS, len(values) // 10))
    num_blocks = math.ceil(len(values) / block)
    medians = np.empty(num_resamples)
    chunk = max(1, 2_000_000 // len(values))  # resamples at a time, for runs of many steps
    for start in range(0, num_resamples, chunk):
        size = min(chunk, num_resamples - start)
        starts = generator.integers(0, len(values) - block + 1, size=(size, num_blocks, 1))
        drawn = values[(starts + np.arange(block)).reshape(size, -1)[:, : len(values)]]
        medians[start : start + size] = np.median(drawn, axis=1)
    return medians


def _variant_estimates(medians: NDArray[np.float64], chosen: NDArray[np.int64]) -> NDArray[np.float64]:
    """Mean over the drawn runs; both arguments are [num_runs, num_resamples], the result [num_resamples]."""
    return np.take_along_axis(medians, chosen, axis=0).mean(axis=0)


def _interval(value: float, resampled: NDArray[np.float64]) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Interval(value, float(low), float(high))


def mean_of_medians(runs: Sequence[Sequence[float]]) -> float:
    """Mean over runs of the median over their steps."""
    return float(np.mean([np.median(steps) for steps in runs]))


def speed_interval(runs: Sequence[Sequence[float]], num_resamples: int = NUM_RESAMPLES) -> Interval:
    """The mean over `runs` of their median step figure, with its interval. Each run holds at least one step."""
    generator = np.random.default_rng(0)
    medians = np.stack([_resampled_medians(steps, generator, num_resamples) for steps in runs])
    chosen = generator.integers(0, len(runs), size=medians.shape)
    return _interval(mean_of_medians(runs), _variant_estimates(medians, chosen))


def ratio_interval(
    runs: Sequence[Sequence[float]],
    reference: Sequence[Sequence[float]],
    paired: bool,
    num_resamples: int = NUM_RESAMPLES,
) -> Interval:
    """`mean_of_medians(runs) / mean_of_medians(reference)` with its interval.

    `paired`: entry i of both ran the same seed, and both are drawn together.
    """
    if paired and len(runs) != len(reference):
        raise ValueError(f"{len(runs)} runs cannot be paired with {len(reference)}")
    generator = np.random.default_rng(0)
    upper = np.stack([_resampled_medians(steps, generator, num_resamples) for steps in runs])
    lower = np.stack([_resampled_medians(steps, generator, num_resamples) for steps in reference])
    chosen = generator.integers(0, len(runs), size=upper.shape)
    chosen_below = chosen if paired else generator.integers(0, len(reference), size=lower.shape)
    value = mean_of_medians(runs) / mean_of_medians(reference)
    return _interval(value, _variant_estimates(upper, chosen) / _variant_estimates(lower, chosen_below))


def spread(values: Sequence[float]) -> float | None:
    """Largest minus smallest; None for fewer than two values, which have none."""
    return max(values) - min(values) if len(values) > 1 else None


@dataclass(frozen=True)
class PairedAnswers:
    """Answers of two models to the same problems."""

    num_problems: int
    num_both_right: int
    num_only_reference_right: int
    num_only_other_right: int

    @property
    def difference(self) -> float:
        """Share right of the other minus share right of the reference."""
        return (self.num_only_other_right - self.num_only_reference_right) / self.num_problems

    @property
    def p_value(self) -> float:
        """Two-sided exact p-value of McNemar's test: how likely a split at least as uneven is if neither model is
        better.
        """
        return two_sided_sign_test(self.num_only_reference_right, self.num_only_other_right)


def two_sided_sign_test(num_first: int, num_second: int) -> float:
    """Probability of a split at least as uneven as this among fair coin tosses; 1 without tosses."""
    total, fewer = num_first + num_second, min(num_first, num_second)
    # Whole numbers up to the end: 2**total overflows a float beyond 1023 tosses, a quotient of integers does not.
    return min(1.0, 2 * sum(math.comb(total, k) for k in range(fewer + 1)) / 2**total)


def pair_answers(reference: Sequence[dict[str, bool]], other: Sequence[dict[str, bool]]) -> PairedAnswers | None:
    """Pool the problems that both models of each pair of runs answered; None where there is none.

    Entry i of both is the run of one seed: problem -> whether its answer is right.
    """
    both = only_reference = only_other = neither = 0
    for ours, theirs in zip(reference, other, strict=True):
        for problem in ours.keys() & theirs.keys():
            right = (ours[problem], theirs[problem])
            both += right == (True, True)
            only_reference += right == (True, False)
            only_other += right == (False, True)
            neither += right == (False, False)
    total = both + only_reference + only_other + neither
    return PairedAnswers(total, both, only_reference, only_other) if total else None


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the up to `window - 1` before it."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return ((sums[ends] - sums[starts]) / (ends - starts)).tolist()


def first_at_or_below(values: Sequence[float], times: Sequence[float], target: float) -> float | None:
    """The time of the first value at or below `target`; None where none is."""
    return next((time for value, time in zip(values, times, strict=True) if value <= target), None)
