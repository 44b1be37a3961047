"""Mixtures of experts under FSDP2 on two gloo ranks: losses equal to those of one process, bit-exact resuming, and an
export that transformers reads. The same two processes train all runs one after the other, to save time.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.families import MOE_FAMILIES
from tests.support.processes import free_port, run_ranks
from tests.support.small import (
    assert_same_continuation,
    final_weights,
    short_run,
    steps,
    stored_weights,
    train,
    write_model,
)

pytestmark = pytest.mark.slow

MODES = {"qwen3_moe": "fsdp_full", "gpt_oss": "fsdp_grad"}
RESUMED = "qwen3_moe"


def train_before(runs: list[list[str]], ports: list[int]) -> None:
    """Train with each options list in `runs` on a port of `ports`. Set MASTER_PORT to the last one for the next run."""
    torch.set_num_threads(1)
    for options, port in zip([*runs, None], ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        if options is not None:
            assert train(*options, parallel=True) == 0


def test_sharded_experts_train_resume_and_export_as_in_one_process(tmp_path, rows):
    runs, models = [], {}
    for kind, mode in MODES.items():
        models[kind] = write_model(tmp_path / kind, **MOE_FAMILIES[kind])
        single, sharded, resumed = (tmp_path / f"{kind}-{name}" for name in ("single", "sharded", "resumed"))
        cut = ["--max_seq_length=128", "--learning_rate=1e-2", "--max_steps=3", "--gradient_accumulation_steps=2"]
        train(*short_run(models[kind], rows, single, *cut, "--batch_size=4"))
        cut += ["--batch_size=2", f"--sharding_mode={mode}", "--save_every=2", "--save_total_limit=9"]
        runs.append(short_run(models[kind], rows, sharded, *cut))
        if kind == RESUMED:
            resume = f"--resume_from={sharded}/checkpoints/step-00000002"
            runs.append(short_run(models[kind], rows, resumed, *cut, resume))
    *before, last = runs
    ports = [free_port() for _ in runs]
    run_ranks(2, tmp_path / "ranks", *last, first=functools.partial(train_before, before, ports))

    assert_same_continuation(tmp_path / f"{RESUMED}-sharded", tmp_path / f"{RESUMED}-resumed", completed=2)
    for kind, model in models.items():
        folders = [tmp_path / f"{kind}-{name}" for name in ("sharded", "single")]
        for key in ("loss", "grad_norm"):
            values, expected = ([step[key] for step in steps(folder)] for folder in folders)
            assert values == pytest.approx(expected, rel=1e-5 if key == "loss" else 1e-4)
        assert final_weights(folders[0]).keys() == stored_weights(model).keys()
        exports = (AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32) for run in folders)
        logits = [exported(torch.arange(3, 43)[None]).logits for exported in exports]
        torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
