"""Runs in bf16 that start from weights stored in fp32 or fp16."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from llm_fp8.optim import adamw_master
from tests.support.processes import exit_code, start_ranks
from tests.support.small import assert_same_bits, final_weights, stored_weights, train, write_model

pytestmark = pytest.mark.slow

SHORT = ["--validation_fraction=0", "--max_seq_length=256", "--batch_size=2", "--log_every=1"]
IN_BF16 = ["--mixed_precision=bf16", "--optimizer=adamw_master"]


@pytest.mark.parametrize(("dtype", "mode"), [(torch.float32, None), (torch.float16, "fsdp_full")], ids=str)
def test_run_with_zero_learning_rate_exports_the_stored_bits(dtype, mode, rows, tmp_path, capfd):
    model, folder = write_model(tmp_path / "model", dtype=dtype), tmp_path / "run"
    options = [f"--model_name={model}", f"--dataset_name={rows}", *SHORT, *IN_BF16, "--max_steps=2"]
    options += ["--learning_rate=0", f"--output_dir={folder}"]
    if mode is None:
        train(*options)
        output = capfd.readouterr().out
    else:
        log = tmp_path / "log"
        assert [exit_code(process) for process in start_ranks(2, log, *options, f"--sharding_mode={mode}")] == [0, 0]
        output = log.read_text()
    name = str(dtype).removeprefix("torch.")
    assert f"stored weights are {name}: training starts from their exact values" in output
    assert_same_bits(final_weights(folder), stored_weights(tmp_path / "model"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_bits_are_random_only_for_bf16_weights(dtype, rows, tmp_path, monkeypatch):
    drawing = mock.Mock(side_effect=adamw_master.draw_remainder)
    monkeypatch.setattr(adamw_master, "draw_remainder", drawing)
    model = write_model(tmp_path / "model", dtype=dtype)
    options = [f"--model_name={model}", f"--dataset_name={rows}", *SHORT, *IN_BF16, "--max_steps=2"]
    train(*options, "--learning_rate=0", f"--output_dir={tmp_path / 'run'}")
    assert drawing.called == (dtype == torch.bfloat16)
    assert_same_bits(final_weights(tmp_path / "run"), stored_weights(tmp_path / "model"))
