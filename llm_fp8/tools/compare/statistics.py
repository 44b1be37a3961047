"""The statistics of a comparison. The unit is the run: the steps of one run share its machine and its weights.

**Intervals** are Student's t intervals over runs; of two variants that ran the same seeds, over the differences by
seed. Quotients of rates are taken as logarithms. A single run has no interval.

**Answers** are compared over problems and over runs. Over problems by an exact sign test in which a problem is one
trial: it is a win for the model that solves it in more seeds (with one seed McNemar's exact test, 1947). Over runs by
Student's t interval of the differences by seed. Pooling the answers of all seeds as trials would reject a true null
hypothesis in 22% of cases at p < 0.05, because seeds agree on which problems are hard.

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
    """An estimate and the ends of its 95% interval, None where a single run has none."""

    value: float
    low: float | None
    high: float | None

    def describe(self, shape: str) -> str:
        """As text; `shape` formats a number."""
        between = "" if self.low is None else f" ({shape.format(self.low)} to {shape.format(self.high)})"
        return f"{shape.format(self.value)}{between}"


def t_interval(values: Sequence[float]) -> Interval:
    """The mean of independent `values`, at least one, with Student's t interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, None, None)
    quantile = special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)
    half = float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))
    return Interval(mean, mean - half, mean + half)


def _exponential(interval: Interval) -> Interval:
    return Interval(*(None if end is None else math.exp(end) for end in (interval.value, interval.low, interval.high)))  # type: ignore[arg-type]


def ratio_interval(rates: Sequence[float], reference: Sequence[float], paired: bool) -> Interval:
    """The quotient of the geometric means of two variants' rates. Its interval is over the quotients by seed where
    `paired` (entry i of both ran the same seed), else Welch's.
    """
    own, base = np.log(rates), np.log(reference)
    if paired:
        return _exponential(t_interval((own - base).tolist()))
    value = float(own.mean() - base.mean())
    if min(len(own), len(base)) < 2:
        return _exponential(Interval(value, None, None))
    found = stats.ttest_ind(own, base, equal_var=False).confidence_interval(CONFIDENCE)
    return _exponential(Interval(value, float(found.low), float(found.high)))


@dataclass(frozen=True)
class PairedAnswers:
    """Answers of two models to the same problems. A problem counts once per seed, but for the `_better` ones."""

    num_problems: int
    num_only_reference_right: int
    num_only_other_right: int
    num_problems_reference_better: int
    """Problems that the reference solved in more seeds."""
    num_problems_other_better: int
    low: float | None = None
    """Ends of the 95% interval of the difference over seeds; None with one seed."""
    high: float | None = None
    worse_in_every_seed: bool = False

    @property
    def may_be_worse(self) -> bool:
        """Whether problems alone, or runs alone, or every seed show the other answering worse."""
        over_problems = self.difference < 0 and self.p_value < 1 - CONFIDENCE
        return over_problems or (self.high is not None and self.high < 0) or self.worse_in_every_seed

    @property
    def is_worse(self) -> bool:
        """Whether the other answers worse, over problems and over runs."""
        return self.difference < 0 and self.p_value < 1 - CONFIDENCE and self.high is not None and self.high < 0

    @property
    def difference(self) -> float:
        """Share right of the other minus that of the reference."""
        return (self.num_only_other_right - self.num_only_reference_right) / self.num_problems

    @property
    def p_value(self) -> float:
        """Two-sided exact p-value of the sign test over problems."""
        total = self.num_problems_reference_better + self.num_problems_other_better
        return float(stats.binomtest(self.num_problems_other_better, total).pvalue) if total else 1.0


def pair_answers(reference: Sequence[dict[str, bool]], other: Sequence[dict[str, bool]]) -> PairedAnswers | None:
    """Compare the problems that both runs of a seed answered; None where there is none. Entry i of both arguments is
    the run of one seed: problem -> whether its answer is right.
    """
    by_seed = [
        [(problem, ours[problem], theirs[problem]) for problem in ours.keys() & theirs.keys()]
        for ours, theirs in zip(reference, other, strict=True)
    ]
    pairs = [pair for seed in by_seed for pair in seed]
    lead: dict[str, int] = {}
    for problem, ours_right, theirs_right in pairs:
        lead[problem] = lead.get(problem, 0) + theirs_right - ours_right
    if not pairs:
        return None
    differences = [sum(b - a for _, a, b in seed) / len(seed) for seed in by_seed if seed]
    over_seeds = t_interval(differences)
    return PairedAnswers(
        low=over_seeds.low,
        high=over_seeds.high,
        worse_in_every_seed=max(differences) < 0,
        num_problems=len(pairs),
        num_only_reference_right=sum(ours and not theirs for _, ours, theirs in pairs),
        num_only_other_right=sum(theirs and not ours for _, ours, theirs in pairs),
        num_problems_reference_better=sum(value < 0 for value in lead.values()),
        num_problems_other_better=sum(value > 0 for value in lead.values()),
    )
