"""--mixed_precision auto: the choice after a measurement, and the state that the measurement must not change."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoTokenizer

from llm_fp8.config.parser import parse_config
from llm_fp8.precision.te import TEBackend
from llm_fp8.run import auto_precision
from llm_fp8.run.auto_precision import choose_precision, measure_precisions
from llm_fp8.run.run import load_data
from llm_fp8.settle.machine import assumed_machine
from llm_fp8.settle.plan import plan_run
from llm_fp8.utils.ranks import LaunchRanks
from tests.support.small import run_json, steps, train


@pytest.fixture
def options(small_run, tmp_path) -> list[str]:
    return [
        *small_run,
        "--max_steps=2",
        "--no_export",
        "--mixed_precision=auto",
        "--attn_implementation=eager",
        f"--output_dir={tmp_path / 'run'}",
    ]


@pytest.mark.slow
def test_run_without_fp8_gpu_is_in_bf16(options, tmp_path):
    assert train(*options) == 0
    assert run_json(tmp_path / "run")["precision"]["effective"] == "bf16"
    train(*options, "--mixed_precision=bf16", f"--output_dir={tmp_path / 'bf16'}")
    losses, expected = ([step["loss"] for step in steps(tmp_path / name)] for name in ("run", "bf16"))
    assert losses == expected


@pytest.fixture
def plan(options):
    """Return a bf16 run's `RunPlan`, changed to measure the speeds of fp8 and bf16, as --mixed_precision auto does."""
    planned = plan_run(parse_config([*options, "--mixed_precision=bf16"]), LaunchRanks())
    return dataclasses.replace(planned, measures_precision=True)


@pytest.mark.parametrize("faster", ["fp8", "bf16"])
def test_faster_precision_is_chosen_and_both_speeds_are_printed(plan, options, monkeypatch, capsys, faster):
    measured = {"fp8": 30_500.0, "bf16": 30_500.0} | {faster: 41_000.0}
    monkeypatch.setattr(auto_precision, "measure_precisions", lambda plans, data: measured)
    monkeypatch.setattr(auto_precision, "with_recipe", lambda precision, *_: precision)
    plan = dataclasses.replace(plan, machine=assumed_machine(LaunchRanks()), notes=("--batch_size auto: 8",))
    chosen_plan, speeds = choose_precision(parse_config(options), plan, None)
    assert (chosen_plan.precision.effective, speeds, chosen_plan.notes) == (faster, measured, plan.notes)
    assert not chosen_plan.measures_precision and "41,000" in capsys.readouterr().out


@pytest.mark.slow
def test_measurement_restores_random_state_and_data_position(plan, monkeypatch):
    data = load_data(plan, AutoTokenizer.from_pretrained(plan.config.model.model_name))
    monkeypatch.setattr(TEBackend, "call_in_bf16", lambda self, module, forward, *inputs: forward(*inputs))
    monkeypatch.setattr(auto_precision, "forget_delayed_scales", lambda: None)
    position, state = data.train.state_dict(), torch.get_rng_state()
    before = data.train.first_step()[0].input_ids
    speeds = measure_precisions({"fp8": plan, "bf16": plan}, data)
    assert set(speeds) == {"fp8", "bf16"} and min(speeds.values()) > 0
    assert data.train.state_dict() == position and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(data.train.first_step()[0].input_ids, before)
