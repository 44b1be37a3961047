"""--dry_run: steps, data and memory of a run that does not take place, on a machine without a GPU."""

from __future__ import annotations

import re

import pytest

from llm_fp8.utils.errors import UserError
from tests.support.small import train

pytestmark = pytest.mark.slow


@pytest.fixture
def words(tiny_model, rows) -> list[str]:
    options = f"--model_name={tiny_model} --dataset_name={rows} --max_seq_length=128 --max_steps=70 --dry_run"
    return options.split()


@pytest.mark.parametrize(
    "options", [[], ["--use_te", "--mixed_precision=fp8"], ["--use_te", "--mixed_precision=auto", "--batch_size=auto"]]
)
def test_steps_and_memory_are_printed_and_nothing_is_written(tmp_path, words, capsys, options):
    assert train(*words, "--batch_size=8", *options, f"--output_dir={tmp_path / 'run'}") == 0
    output = capsys.readouterr().out
    assert "70 steps" in output and not (tmp_path / "run").exists()
    assert ("GiB" in output and "H100" in output) == bool(options)


def test_without_a_gpu_the_memory_is_that_of_the_assumed_gpus_recipe(words, capsys):
    figures = []
    for scenario in ("delayed", "mxfp8"):
        train(*words, "--use_te", "--mixed_precision=fp8", f"--fp8_scenario={scenario}")
        figures.append(re.findall(r".*GiB", output := capsys.readouterr().out))
        assert ("WARNING: --fp8_scenario mxfp8" in output) == (scenario == "mxfp8")
    assert figures[0] == figures[1] and len(figures[0]) > 3


@pytest.mark.parametrize("decoder", [[], ["--use_te", "--mixed_precision=bf16"]], ids=["hf", "te"])
def test_a_layer_that_the_model_lacks_is_refused(words, decoder):
    for options in ("--lora_rank=4 --lora_targets=v_proj,q_prj", "--eval_every=2 --validation_fraction=0"):
        with pytest.raises(UserError, match="--lora_targets.*q_prj|--eval_every"):
            train(*words, *decoder, *options.split())
    assert train(*words, *decoder, "--lora_rank=4", "--lora_targets=v_proj,q_proj") == 0


def test_the_beginning_of_a_stream_is_counted(words, capsys):
    assert train(*words, "--streaming") == 0
    assert "rows read" in capsys.readouterr().out
