"""An evaluation leaves FSDP's parameters split, for what is saved and exported after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes import exit_code, start_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["fsdp_full", "fsdp_grad"])
def test_a_checkpoint_after_an_evaluation_holds_everything(
    tmp_path: Path, tiny_model: str, rows: str, mode: str
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    processes = start_ranks(
        2,
        log,
        f"--model_name={tiny_model}",
        f"--dataset_name={rows}",
        "--max_seq_length=256",
        "--batch_size=2",
        "--max_steps=2",
        "--validation_fraction=0.2",
        "--eval_every=1",
        "--eval_batches=1",
        "--save_every=1",
        "--no_export",
        f"--sharding_mode={mode}",
        f"--output_dir={folder}",
    )
    assert [exit_code(process) for process in processes] == [0, 0], log.read_text()[-4000:]
    after_evaluation, last = (
        json.loads((folder / "checkpoints" / f"step-0000000{step}" / "manifest.json").read_text())["tensors"]
        for step in (1, 2)
    )
    assert after_evaluation == last
    weights = [name.removeprefix("model.") for name in last if name.startswith("model.")]
    assert len(weights) > 10 and all(f"optimizer.{name}.exp_avg" in after_evaluation for name in weights)
