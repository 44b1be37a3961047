"""Short trainings on one or more GPUs, for tests that compare their steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm_fp8.config.recipes import recipe_names
from llm_fp8.tools.programs import recipe_argv
from tests.support import gpu_training
from tests.support.processes import run_ranks
from tests.support.small import steps, summary_json

NUM_STEPS = 6
MICRO_BATCHES = 2
ROWS = {1: 8, 2: 4, 4: 2}
"""Number of GPUs -> rows of a micro-batch on each, so that the global batch is the same."""
PRECISIONS = gpu_training.PRECISIONS | {name: [*recipe_argv(name), "--packing"] for name in recipe_names("torchao")}


def train(
    num_gpus: int, folder: Path, model: Path | str, *options: str, first: Callable[[], None] | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Train on `num_gpus` GPUs, after a call of `first` in each process. Return the records of the optimizer steps, the
    summary and the printed output.
    """
    printed = run_ranks(
        num_gpus,
        folder,
        f"--model_name={model}",
        "--max_seq_length=256",
        f"--batch_size={ROWS[num_gpus]}",
        "--learning_rate=1e-4",
        f"--gradient_accumulation_steps={MICRO_BATCHES}",
        "--no_merge_micro_batches",
        "--log_every=1",
        "--validation_fraction=0",
        f"--max_steps={NUM_STEPS}",
        f"--output_dir={folder}",
        *options,
        first=first,
        hosts=2 if "--sharding_mode=fsdp_hybrid" in options else 1,
    )
    return steps(folder), summary_json(folder), printed
