"""--mixed_precision auto: what is decided by what was measured, and what the measurement leaves behind."""

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
from llm_fp8.settle.machine import assume
from llm_fp8.settle.plan import plan_run
from llm_fp8.utils.errors import UserError
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
def test_without_a_gpu_that_has_fp8_the_run_is_in_bf16(options, tmp_path):
    assert train(*options) == 0
    assert run_json(tmp_path / "run")["precision"]["effective"] == "bf16"
    train(*options, "--mixed_precision=bf16", f"--output_dir={tmp_path / 'bf16'}")
    found, expected = ([step["loss"] for step in steps(tmp_path / name)] for name in ("run", "bf16"))
    assert found == expected


def test_torchao_is_refused(options):
    with pytest.raises(UserError, match="--mixed_precision auto"):
        train(*options, "--fp8_backend=torchao")


@pytest.fixture
def plan(options):
    """The plan of a run in bf16 that is to be measured."""
    planned = plan_run(parse_config([*options, "--mixed_precision=bf16"]), LaunchRanks())
    return dataclasses.replace(planned, measures_precision=True)


@pytest.mark.parametrize("faster", ["fp8", "bf16"])
def test_the_faster_one_is_taken_and_both_figures_are_said(plan, options, monkeypatch, capsys, faster):
    measured = {"fp8": 30_500.0, "bf16": 30_500.0} | {faster: 41_000.0}
    monkeypatch.setattr(auto_precision, "measure_precisions", lambda plan, data: measured)
    monkeypatch.setattr(auto_precision, "with_recipe", lambda precision, *_: precision)
    plan = dataclasses.replace(plan, machine=assume(LaunchRanks()), notes=("--batch_size auto: 8",))
    chosen, figures = choose_precision(parse_config(options), plan, None)
    assert (chosen.precision.effective, figures, chosen.notes) == (faster, measured, plan.notes)
    assert not chosen.measures_precision and "41,000" in capsys.readouterr().out


@pytest.mark.slow
def test_measuring_leaves_random_states_and_data_as_they_were(plan, monkeypatch):
    data = load_data(plan, AutoTokenizer.from_pretrained(plan.config.model.model_name))
    monkeypatch.setattr(TEBackend, "call_in_bf16", lambda self, module, forward, *inputs: forward(*inputs))
    monkeypatch.setattr(auto_precision, "forget_delayed_scales", lambda: None)
    position, state = data.train.state_dict(), torch.get_rng_state()
    before = data.train.first_step()[0].input_ids
    found = measure_precisions(plan, data)
    assert set(found) == {"fp8", "bf16"} and min(found.values()) > 0
    assert data.train.state_dict() == position and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(data.train.first_step()[0].input_ids, before)
