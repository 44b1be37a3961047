"""The training runs of the GSM8K loss curves: the plan of runs, and the comparison of several GPUs with one."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.gsm8k_curves import VARIANTS, compare_to_one_gpu, plan
from llm_fp8.config.parser import parse_config
from llm_fp8.utils.errors import FailedCheck


def settings(num_gpus: int) -> argparse.Namespace:
    return argparse.Namespace(
        data="rows.jsonl", seeds="1,2", epochs=4, eval_every=25, num_gpus=num_gpus, variants=",".join(VARIANTS)
    )


def test_plan_on_one_gpu_has_every_precision_with_every_seed():
    jobs = plan(settings(1))
    assert [(job.variant, job.seed) for job in jobs] == [(variant, seed) for seed in (1, 2) for variant in VARIANTS]
    for job in jobs:
        config = parse_config(job.options(Path("out"), settings(1)))
        assert config.data.batch_size == 8 and config.optim.optimizer == "auto"


@pytest.mark.parametrize("num_gpus", [2, 8])
def test_global_batch_does_not_depend_on_the_number_of_gpus(num_gpus):
    arguments = settings(num_gpus)
    for job in plan(arguments):
        config = parse_config(job.options(Path("out"), arguments), parallel=job.mode is not None)
        gpus = num_gpus if job.mode else 1
        assert config.data.batch_size * config.optim.gradient_accumulation_steps * gpus == 16
        assert config.optim.optimizer == "adamw_fp32" and config.optim.seed == job.seed


def run(variant: str, num_gpus: int, *losses: float, rows: int = 16) -> dict:
    return {
        "variant": variant,
        "seed": 1,
        "num_gpus": num_gpus,
        "global_batch_size": rows,
        "num_parameters": 57_000_000,
        "final_eval_loss": losses[-1],
        "evaluations": [[25 * n, 1000 * n, loss] for n, loss in enumerate(losses, start=1)],
    }


def test_comparison_with_one_gpu_has_final_and_largest_difference():
    runs = [run("bf16", 1, 3.0, 2.0), run("delayed", 1, 3.0, 2.5), run("ddp:bf16", 4, 3.5, 2.25)]
    (comparison,) = compare_to_one_gpu(runs)["variants"]["ddp:bf16"]
    assert comparison["final_difference"] == 0.25 and comparison["largest_difference"] == 0.5
    with pytest.raises(FailedCheck, match="used 8 rows a step, but one GPU used 16"):
        compare_to_one_gpu([runs[0], run("ddp:bf16", 4, 3.5, 2.25, rows=8)])
