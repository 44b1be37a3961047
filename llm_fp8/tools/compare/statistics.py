"""The statistics of a comparison. The unit is the run, since the steps of a run share its machine and weights.

**Intervals** are Student's t intervals over runs. For two variants with the same seeds they are taken over the
differences by seed. Rates and their ratios are averaged as logarithms. A single run has no interval.

**Answers** are compared over problems and over runs. The comparison over problems is an exact sign test with one trial
per problem, which the model that solves it in more seeds wins (with one seed: McNemar's exact test, 1947). The
comparison over runs is Student's t interval of the differences by seed. Pooling the answers of all seeds as trials
would reject a true null hypothesis in 22% of cases at p < 0.05, because seeds agree on which problems are hard.

`tests/tools/compare/test_statistics.py` simulates how often these intervals and tests are right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special, stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its 95% interval, which are None for a single run."""

    value: float
    low: float | None
    high: float | None

    def describe(self, shape: str) -> str:
        """The interval as text; `shape` is the format of a number."""
        between = "" if self.low is None else f" ({shape.format(self.low)} to {shape.format(self.high)})"
        return f"{shape.format(self.value)}{between}"


def t_interval(values: Sequence[float]) -> Interval:
    """The mean of one or more independent `values`, with Student's t interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, None, None)
    quantile = special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)
    half = float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)


def _exponential(interval: Interval) -> Interval:
    return Interval(*(None if end is None else math.exp(end) for end in (interval.value, interval.low, interval.high)))  # type: ignore[arg-type]


def rate_interval(rates: Sequence[float]) -> Interval:
    """The geometric mean of `rates`, with the interval of their logarithms, whose ends cannot be negative."""
    return _exponential(t_interval(np.log(rates).tolist()))


def ratio_interval(rates: Sequence[float], reference: Sequence[float], paired: bool) -> Interval:
    """The ratio of the geometric means of two variants' rates. The interval is taken over the ratios by seed if
    `paired` (entry i of both has the same seed), else it is Welch's.
    """
    own = np.log(rates)
    base = np.log(reference)
    if paired:
        return _exponential(t_interval((own - base).tolist()))
    value = float(own.mean() - base.mean())
    if min(len(own), len(base)) < 2:
        return _exponential(Interval(value, None, None))
    ends = stats.ttest_ind(own, base, equal_var=False).confidence_interval(CONFIDENCE)
    return _exponential(Interval(value, float(ends.low), float(ends.high)))


@dataclass(frozen=True)
class PairedAnswers:
    """Answers of two models to the same problems. A problem counts once per seed, and once in the `_better` counts."""

    num_problems: int
    num_only_reference_right: int
    num_only_other_right: int
    num_problems_reference_better: int  # the number of problems that the reference solved in more seeds
    num_problems_other_better: int
    low: float | None = None  # the ends of the 95% interval of the difference over seeds; None with one seed
    high: float | None = None
    worse_in_every_seed: bool = False

    @property
    def may_be_worse(self) -> bool:
        """Whether the other model is worse over problems, over runs, or in every seed."""
        over_problems = self.difference < 0 and self.p_value < 1 - CONFIDENCE
        return over_problems or (self.high is not None and self.high < 0) or self.worse_in_every_seed

    @property
    def is_worse(self) -> bool:
        """Whether the other model is worse over problems and over runs."""
        return self.difference < 0 and self.p_value < 1 - CONFIDENCE and self.high is not None and self.high < 0

    @property
    def difference(self) -> float:
        """The other model's share of right answers minus the reference's share."""
        return (self.num_only_other_right - self.num_only_reference_right) / self.num_problems

    @property
    def p_value(self) -> float:
        """The two-sided exact p-value of the sign test over problems."""
        total = self.num_problems_reference_better + self.num_problems_other_better
        return float(stats.binomtest(self.num_problems_other_better, total).pvalue) if total else 1.0


def pair_answers(reference: Sequence[dict[str, bool]], other: Sequence[dict[str, bool]]) -> PairedAnswers | None:
    """Compare the problems that both runs of a seed answered; None if there are none. Entry i of both arguments is the
    run of one seed: problem -> whether its answer is right.
    """
    by_seed = [
        [(problem, base[problem], own[problem]) for problem in base.keys() & own.keys()]
        for base, own in zip(reference, other, strict=True)
    ]
    pairs = [pair for seed in by_seed for pair in seed]
    lead: dict[str, int] = {}
    for problem, base_right, own_right in pairs:
        lead[problem] = lead.get(problem, 0) + own_right - base_right
    if not pairs:
        return None
    differences = [sum(own - base for _, base, own in seed) / len(seed) for seed in by_seed if seed]
    over_seeds = t_interval(differences)
    return PairedAnswers(
        low=over_seeds.low,
        high=over_seeds.high,
        worse_in_every_seed=max(differences) < 0,
        num_problems=len(pairs),
        num_only_reference_right=sum(base and not own for _, base, own in pairs),
        num_only_other_right=sum(own and not base for _, base, own in pairs),
        num_problems_reference_better=sum(value < 0 for value in lead.values()),
        num_problems_other_better=sum(value > 0 for value in lead.values()),
    )
