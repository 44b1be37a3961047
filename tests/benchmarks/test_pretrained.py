"""benchmarks/pretrained.py: the plan of runs, and the comparison of the runs' losses."""

from __future__ import annotations

import pytest

from benchmarks import pretrained
from llm_fp8.config.parser import parse_config, to_argv
from llm_fp8.utils.errors import UserError


def settings(*args):
    return pretrained.make_parser().parse_args(["--model", "m", "--data", "d.jsonl", "--output", "o.json", *args])


def test_plan_alternates_variants_so_that_pairs_are_complete_early():
    jobs = pretrained.plan(settings("--variants", "bf16,delayed", "--learning_rates", "1e-5,3e-5", "--seeds", "1"))
    assert [(job.variant, job.learning_rate, job.seed) for job in jobs[:6]] == [
        ("bf16", 0.0, 0), ("delayed", 0.0, 0), ("bf16", 3e-5, 1), ("delayed", 3e-5, 1), ("bf16", 1e-5, 1),
        ("delayed", 1e-5, 1),
    ]  # fmt: skip
    assert sum(job.learning_rate == 3e-5 for job in jobs) == 2 * 5 and len(jobs) == 2 + 2 + 10


def test_unknown_variant_is_refused():
    with pytest.raises(UserError, match="'fp9' is unknown"):
        pretrained.plan(settings("--variants", "bf16,fp9"))


def test_variant_may_have_a_shorter_schedule(tmp_path):
    args = settings("--variants", "delayed,bf16/0.75", "--steps", "178", "--lr_scheduler", "linear")
    whole, shorter = (parse_config(to_argv(job.options(args, tmp_path))) for job in pretrained.plan(args)[-2:])
    assert whole.optim.lr_scheduler == shorter.optim.lr_scheduler == "linear"
    assert (whole.optim.max_steps, whole.precision.mixed_precision) == (178, "fp8")
    assert (shorter.optim.max_steps, shorter.precision.mixed_precision) == (134, "bf16")
    with pytest.raises(UserError, match="--steps"):
        pretrained.plan(settings("--variants", "bf16/0.75"))


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


def test_one_pair_has_no_interval():
    assert pretrained.interval([0.3]) == {"num_pairs": 1, "mean": 0.3, "half_width": None, "differences": [0.3]}


def test_equal_loss_step_is_interpolated_between_evaluations():
    reference = {"evaluations": [[40, 1.0], [80, 0.9], [120, 0.95], [160, 0.7]]}
    for loss, share in ((0.95, 60 / 160), (0.8, 140 / 160), (0.6, 1.0)):
        steps = pretrained.equal_loss_steps({"bf16_eval_loss": loss}, reference)
        assert steps == pytest.approx(share), loss
