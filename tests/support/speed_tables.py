"""A row of a speed table, a table's file, and an answer as a GPU gives it."""

from __future__ import annotations

import json
from pathlib import Path


def write_table(folder: Path, *rows: dict) -> Path:
    path = folder / "table.json"
    path.write_text(json.dumps({"rows": list(rows)}))
    return path


def made_up(step_s: float, loss: float = 12.0, gpu: str | None = "NVIDIA H200") -> dict:
    """An answer as a GPU gives it: three timed steps, most of whose time is in kernels."""
    gpus = [] if gpu is None else [{"name": gpu, "memory_gib": 139.8}]
    return {
        "failed": None,
        "header": {"provenance": {"command": [], "gpus": gpus}, "peaks": None},
        "step_times_s": [step_s * 0.99, step_s, step_s * 1.02],
        "losses": [loss, loss - 1],
        "peak_memory_gib": 30.0,
        "census": {"num_fp8_weights": 973_078_528, "num_linear_weights": 1_235_746_816},
        "gemm_kernels": {},
        "recorded_step": {"time_s_by_class": {"gemm": 0.6 * step_s, "attention": 0.3 * step_s}},
        "wall_time_s": 9.0,
        "taken_s": 20.0,
    }


ROW = {
    "name": "1b",
    "workload": "Llama-3.2-1B:16x1024x4",
    "ours": ["delayed", "current"],
    "rivals": ["hf_bf16", "accelerate_te"],
    "target_tokens_per_s_per_gpu": 100_000,
}
