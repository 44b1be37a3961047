"""Simulated comparisons with 1 to 20 seeds: how often the intervals and verdicts are right."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from llm_fp8.tools.compare.figures import Gap, Interval, rate_interval, t_interval, variant_figures
from llm_fp8.tools.compare.verdict import QUALITY_MARGIN, judge
from tests.support.made_up_runs import made_up_run

SEEDS = [2, 3, 5, 10, 20]
NUM_COMPARISONS = 1000


def covers(interval: Interval, truth: float) -> bool:
    assert interval.low is not None and interval.high is not None
    assert interval.low <= interval.value <= interval.high
    return interval.low <= truth <= interval.high


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [3, 5])
def test_intervals_of_speed_cover_the_true_value_in_95_percent_of_cases(num_seeds):
    """Speed varies by 2% from run to run. The seed changes the speeds of both runs of a pair by another 5%."""
    random = np.random.default_rng(num_seeds)
    rates, ratios = 0, 0
    for _ in range(NUM_COMPARISONS):
        fp8, bf16 = 1000 * np.exp(random.normal(0, 0.02, (2, num_seeds)))
        seed = np.exp(random.normal(0, 0.05, num_seeds))
        rates += covers(rate_interval(fp8), 1000)
        ratios += covers(rate_interval(1.3 * fp8 * seed / (bf16 * seed)), 1.3)
    # Three standard errors of 1,000 trials to either side.
    assert all(930 <= num_covered <= 971 for num_covered in (rates, ratios))


BF16 = [made_up_run("bf16", seed, 100_000, 1.0) for seed in (1, 2, 3)]
REFERENCE = variant_figures("bf16", BF16, [])
FASTER = variant_figures("delayed", [made_up_run("delayed", seed, 130_000, 1.0) for seed in (1, 2, 3)], BF16)


def conclusion_shares(num_seeds: int, truth: float, deviation: float = 0.003) -> dict[str, float]:
    """Return the share of each conclusion among simulated comparisons of `num_seeds` pairs of runs. The loss difference
    of a pair is drawn from a normal distribution with mean `truth` and standard deviation `deviation`.
    """
    random = np.random.default_rng(num_seeds)
    counts: Counter[str] = Counter()
    for differences in random.normal(truth, deviation, (NUM_COMPARISONS, num_seeds)):
        gap = Gap(*dataclasses.astuple(t_interval(differences)), dict(enumerate(differences.tolist())))
        counts[judge(dataclasses.replace(FASTER, loss_gap=gap), REFERENCE, [], QUALITY_MARGIN).conclusion] += 1
    return {conclusion: count / NUM_COMPARISONS for conclusion, count in counts.items()}


@pytest.mark.parametrize("num_seeds", SEEDS)
def test_variant_exactly_at_the_margin_passes_in_one_case_in_forty(num_seeds):
    shares = conclusion_shares(num_seeds, truth=QUALITY_MARGIN)
    assert shares.get("use it", 0) + shares.get("slightly worse", 0) <= 0.042  # 2.5% and three standard errors
    assert shares.get("worse", 0) <= 0.042


def test_much_worse_variant_is_called_worse_more_often_with_more_seeds():
    """The variant is 0.05 nats worse. The differences within pairs of runs have a standard deviation of 0.003."""
    assert conclusion_shares(1, truth=0.05) == {"too few seeds": 1.0}
    shares = [conclusion_shares(num_seeds, truth=0.05).get("worse", 0) for num_seeds in SEEDS]
    assert shares == sorted(shares) and shares[1] > 0.99 and shares[2:] == [1, 1, 1]


@pytest.mark.parametrize("num_seeds", SEEDS)
def test_variant_that_is_worse_in_every_seed_is_not_recommended(num_seeds):
    """The verdict on a variant that is worse by less than the allowed margin is 'slightly worse'."""
    shares = conclusion_shares(num_seeds, truth=0.002, deviation=0.0003)
    assert shares.get("use it", 0) < 0.01
    assert shares.get("slightly worse", 0) > 0.95 or num_seeds == 2


def test_interval_of_one_run_is_its_value_alone():
    assert f"{t_interval([5.0]):.1f}" == "5.0"
    assert rate_interval([1.2, 1.2]) == Interval(pytest.approx(1.2), None, None), "two seeds have no interval"
    assert f"{t_interval([1.0, 2.0, 3.0]):.3f}" == "2.000 (-0.484 to 4.484)"
    assert rate_interval([1.0, 2.0, 3.0]).low > 0, "a rate is never negative"
