"""--dry_run on a machine without a GPU: it prints steps, data and memory of the run, and refuses invalid options."""

from __future__ import annotations

import shlex

import pytest

from llm_fp8.tools import memory
from llm_fp8.utils.errors import UserError
from tests.support.small import train

pytestmark = pytest.mark.slow


@pytest.fixture
def run_options(tiny_model, rows) -> list[str]:
    options = f"--model_name={tiny_model} --dataset_name={rows} --max_seq_length=128 --max_steps=70 --dry_run"
    return options.split()


@pytest.mark.parametrize(
    "options", [[], ["--use_te", "--mixed_precision=fp8"], ["--use_te", "--mixed_precision=fp8", "--batch_size=auto"]]
)
def test_dry_run_prints_steps_and_memory_and_writes_nothing(tmp_path, run_options, capsys, options):
    assert train(*run_options, "--batch_size=8", *options, f"--output_dir={tmp_path / 'run'}") == 0
    output = capsys.readouterr().out
    assert "70 steps" in output and not (tmp_path / "run").exists()
    assert ("GiB" in output and "H100" in output) == bool(options)


@pytest.mark.parametrize("options", ["--lora_rank=8 --batch_size=auto", "--mixed_precision=fp8 --fp8_scenario=mxfp8"])
def test_dry_run_of_the_command_that_memory_prints_shows_the_same_memory(call_main, capsys, options):
    assert call_main(memory, "--model_name=Llama-57M", "--gpu=L40S", *options.split()) == 0
    printed = capsys.readouterr().out.splitlines()
    command = next(line for line in printed if line.startswith("  python train_fp8.py "))
    assert train(*shlex.split(command)[2:], "--dry_run", "--gpu=L40S") == 0
    output = capsys.readouterr().out
    start = printed.index(next(line for line in printed if "GiB on each of 1 x L40S, assumed" in line))
    assert len(printed[start:]) > 4 and "\n".join(printed[start:]) in output
    # The fallback of mxfp8 is the recipe whose memory is estimated.
    assert ("WARNING: --fp8_scenario mxfp8" in output) == ("mxfp8" in options) and "not counted" not in output


@pytest.mark.parametrize("decoder", [[], ["--use_te", "--mixed_precision=bf16"]], ids=["hf", "te"])
def test_missing_lora_target_and_missing_eval_rows_are_refused(run_options, decoder):
    for options in ("--lora_rank=4 --lora_targets=v_proj,q_prj", "--eval_every=2 --validation_fraction=0"):
        with pytest.raises(UserError, match="--lora_targets.*q_prj|--eval_every"):
            train(*run_options, *decoder, *options.split())
    assert train(*run_options, *decoder, "--lora_rank=4", "--lora_targets=v_proj,q_proj") == 0


def test_dry_run_of_a_stream_counts_the_rows_that_it_read(run_options, capsys):
    assert train(*run_options, "--streaming") == 0
    assert "rows read" in capsys.readouterr().out
