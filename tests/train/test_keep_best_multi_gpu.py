"""--keep_best with --early_stopping_patience where the weights are kept in fp8 between steps."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.support.families import write_family
from tests.support.processes import exit_code, start_ranks
from tests.support.small import assert_same_tensors, final_weights, steps, summary_json, write_rows
from tests.support.told_losses import tell

pytestmark = pytest.mark.multi_gpu

LOSSES = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.5, 10: 6.0}
"""Step -> the eval loss that the run is told."""


@pytest.mark.parametrize("mode", ["fsdp_full", "fsdp_grad"])
@pytest.mark.parametrize("scenario", ["delayed", "current"])
def test_fp8_parameters_stop_early_and_export_the_best_step(tmp_path, monkeypatch, mode, scenario):
    """Steps 6 and 8 are no improvement on step 4, whose weights are, bit for bit, those of a run that ends there."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # gradients of attention have the same bits each time
    options = [
        f"--model_name={write_family(tmp_path / 'model', 'llama3_rope_gqa', torch.float32)}",
        f"--dataset_name={write_rows(tmp_path / 'rows.jsonl', 64)}",
        "--use_te",
        "--mixed_precision=fp8",
        f"--fp8_scenario={scenario}",
        "--fp8_params",
        f"--sharding_mode={mode}",
        "--max_seq_length=256",
        "--batch_size=4",
        "--learning_rate=1e-3",
        "--lr_scheduler=constant",
        "--num_warmup_steps=0",
        "--eval_every=2",
    ]
    kept, short = tmp_path / "kept", tmp_path / "short"
    keeping = ["--max_steps=10", "--keep_best", "--early_stopping_patience=2"]
    for folder, more in ((kept, keeping), (short, ["--max_steps=4"])):
        log = tmp_path / f"{folder.name}.log"
        told = functools.partial(tell, LOSSES)
        ranks = start_ranks(2, log, *options, *more, f"--output_dir={folder}", first=told)
        assert [exit_code(rank, deadline_s=240) for rank in ranks] == [0, 0], log.read_text()
    assert [step["step"] for step in steps(kept)] == list(range(1, 9)) and "stopped_early" in summary_json(kept)
    assert summary_json(kept)["best"]["step"] == summary_json(kept)["exported_step"] == 4
    assert_same_tensors(final_weights(kept), final_weights(short))
    assert all(step["learning_rate"] > 0 and step["grad_norm"] > 0 for step in steps(kept)), "weights move in each"
