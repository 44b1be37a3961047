"""Trainings on one or more GPUs whose steps are compared."""

from __future__ import annotations

import json
from pathlib import Path

from llm_fp8.utils.json_files import read_jsonl
from tests.support.processes import exit_code, start_ranks

NUM_STEPS = 6

MICRO_BATCHES = 2

ROWS = {1: 8, 2: 4, 4: 2}
"""Rows of a micro-batch by number of GPUs."""

PRECISIONS = {
    "bf16": ["--mixed_precision", "bf16"],
    "delayed": ["--mixed_precision", "fp8"],
    "current": ["--mixed_precision", "fp8", "--fp8_scenario", "current"],
    "block": ["--mixed_precision", "fp8", "--fp8_scenario", "block"],
}


def train(num_gpus: int, folder: Path, model: Path, *options: str) -> tuple[list[dict[str, float]], dict, str]:
    """Train on so many GPUs; the records of its steps, its summary and what it printed."""
    log = folder.with_name(f"{folder.name}.log")
    processes = start_ranks(
        num_gpus,
        log,
        f"--model_name={model}",
        "--max_seq_length=256",
        f"--batch_size={ROWS[num_gpus]}",
        "--learning_rate=1e-4",
        f"--gradient_accumulation_steps={MICRO_BATCHES}",
        "--log_every=1",
        "--validation_fraction=0",
        f"--max_steps={NUM_STEPS}",
        f"--output_dir={folder}",
        *options,
        hosts=2 if "--sharding_mode=fsdp_hybrid" in options else 1,
    )
    codes = [exit_code(process, deadline_s=240) for process in processes]
    assert codes == [0] * num_gpus, log.read_text()
    records = read_jsonl(folder / "metrics.jsonl")
    return [r for r in records if "loss" in r], json.loads((folder / "summary.json").read_text()), log.read_text()
