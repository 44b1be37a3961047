"""benchmarks/pretrained.py: the plan of runs, and the comparison of the runs' losses."""

from __future__ import annotations

import pytest

from benchmarks import pretrained


def settings(*args):
    return pretrained.make_parser().parse_args(["--model", "m", "--data", "d.jsonl", "--output", "o.json", *args])


def test_plan_alternates_variants_so_that_pairs_are_complete_early():
    jobs = pretrained.plan(settings("--variants", "bf16,delayed", "--learning_rates", "1e-5,3e-5", "--seeds", "1"))
    assert [(job.variant, job.learning_rate, job.seed) for job in jobs[:6]] == [
        ("bf16", 0.0, 0), ("delayed", 0.0, 0), ("bf16", 3e-5, 1), ("delayed", 3e-5, 1), ("bf16", 1e-5, 1),
        ("delayed", 1e-5, 1),
    ]  # fmt: skip
    assert sum(job.learning_rate == 3e-5 for job in jobs) == 2 * 5 and len(jobs) == 2 + 2 + 10


def test_differences_are_paired_by_seed_and_learning_rate():
    def run(variant, rate, seed, loss):
        losses = dict(eval_loss=loss, bf16_eval_loss=loss - 0.5, evaluations=[[40, loss + 1], [80, loss]])
        return dict(variant=variant, learning_rate=rate, seed=seed, **losses)

    runs = [run("bf16", 3e-5, seed, float(seed)) for seed in (1, 2, 3)]
    runs += [run("delayed", 3e-5, seed, seed + gap) for seed, gap in ((1, 0.1), (2, 0.2), (3, 0.3))]
    runs += [run("delayed", 1e-5, 1, 9.0), dict(variant="block", learning_rate=3e-5, seed=1, failed="out of memory")]
    (comparison,) = pretrained.compare(runs)
    assert (comparison["variant"], comparison["reference"], comparison["learning_rate"]) == ("delayed", "bf16", 3e-5)
    assert comparison["eval_loss"]["num_pairs"] == 3 and comparison["eval_loss"]["mean"] == pytest.approx(0.2)
    # Student's t for three pairs: 4.303 standard deviations over the root of three.
    assert comparison["eval_loss"]["half_width"] == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)
    assert comparison["reference_bf16_eval_loss"] == pytest.approx(1.5)


def test_equal_loss_step_is_interpolated_between_evaluations():
    reference = {"evaluations": [[40, 1.0], [80, 0.9], [120, 0.95], [160, 0.7]]}
    for loss, share in ((0.95, 60 / 160), (0.8, 140 / 160), (0.6, 1.0)):
        steps = pretrained.equal_loss_steps({"bf16_eval_loss": loss}, reference)
        assert steps == pytest.approx(share), loss
