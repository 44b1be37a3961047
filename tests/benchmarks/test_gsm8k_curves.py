"""The training runs of the GSM8K loss curves."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.gsm8k_curves import VARIANTS, plan
from llm_fp8.config.parser import parse_config

SETTINGS = argparse.Namespace(data="rows.jsonl", seeds="1,2", epochs=4, eval_every=25, variants=",".join(VARIANTS))


def test_plan_has_every_precision_with_every_seed():
    jobs = plan(SETTINGS)
    assert [(job.variant, job.seed) for job in jobs] == [(variant, seed) for seed in (1, 2) for variant in VARIANTS]
    for job in jobs:
        config = parse_config(job.options(Path("out"), SETTINGS))
        assert config.data.batch_size == 8 and config.optim.optimizer == "auto" and config.optim.seed == job.seed
