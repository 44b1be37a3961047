"""--dry_run: steps, data and memory of a run that does not take place, on a machine without a GPU."""

from __future__ import annotations

import re

import pytest

from llm_fp8.utils.errors import UserError
from tests.support.small import train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "options", [[], ["--use_te", "--mixed_precision=fp8"], ["--use_te", "--mixed_precision=auto", "--batch_size=auto"]]
)
def test_nothing_is_written_and_steps_and_memory_are_said(tmp_path, tiny_model, rows, capsys, options):
    given = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--max_seq_length=128", "--max_steps=70"]
    assert train(*given, "--batch_size=8", *options, "--dry_run", f"--output_dir={tmp_path / 'run'}") == 0
    said = capsys.readouterr().out
    assert "70 steps" in said and not (tmp_path / "run").exists()
    assert ("GiB" in said and "H100" in said) == bool(options)


def test_memory_without_a_gpu_is_of_the_recipe_that_the_assumed_one_has(tiny_model, rows, capsys):
    given = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--max_seq_length=128", "--max_steps=7"]
    figures = []
    for scenario in ("delayed", "mxfp8"):
        train(*given, "--use_te", "--mixed_precision=fp8", f"--fp8_scenario={scenario}", "--dry_run")
        figures.append(re.findall(r".*GiB", said := capsys.readouterr().out))
        assert ("WARNING: --fp8_scenario mxfp8" in said) == (scenario == "mxfp8")
    assert figures[0] == figures[1] and len(figures[0]) > 3


@pytest.mark.parametrize("decoder", [[], ["--use_te", "--mixed_precision=bf16"]], ids=["hf", "te"])
def test_a_layer_that_the_model_lacks_is_refused(tiny_model, rows, decoder):
    given = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--max_seq_length=128", "--max_steps=7", *decoder]
    for words in ("--lora_rank=4 --lora_targets=v_proj,q_prj", "--eval_every=2 --validation_fraction=0"):
        with pytest.raises(UserError, match="--lora_targets.*q_prj|--eval_every"):
            train(*given, *words.split(), "--dry_run")
    assert train(*given, "--lora_rank=4", "--lora_targets=v_proj,q_proj", "--dry_run") == 0


def test_the_beginning_of_a_stream_is_counted(tmp_path, tiny_model, rows, capsys):
    given = [f"--model_name={tiny_model}", f"--dataset_name={rows}", "--max_seq_length=128", "--max_steps=7"]
    assert train(*given, "--streaming", "--dry_run") == 0
    assert "rows read" in capsys.readouterr().out
