"""Run records and run folders with invented metrics, for tests that compare fp8 and bf16 runs without training."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

from llm_fp8.config.parser import parse_config
from llm_fp8.tools.compare.run_record import RunRecord

NUM_STEPS = 60
PROVENANCE = {
    "time_utc": "2026-01-02T03:04:05+00:00",
    "command": ["train_fp8.py"],
    "git": {"commit": "0" * 40, "dirty": False},
    "python": "3.12.3",
    "packages": {"torch": "2.11.0", "transformer-engine": "2.20.2"},
    "cuda": "13.0",
    "cudnn": 91900,
    "driver": "580.1",
    "gpus": [{"name": "NVIDIA H200", "memory_gib": 139.8, "compute_capability": "9.0"}],
    "cpu": {"model": "a processor", "num_cores": 16},
    "os": "Linux",
    "environment": {"CUDA_VISIBLE_DEVICES": "0"},
}


def precision_of(variant: str, effective: str | None = None) -> dict[str, Any]:
    """Return the precision section of run.json for `variant`: "bf16", "no" or an fp8 scenario. If another scenario is
    given as `effective`, the section records a fallback to it.
    """
    shared = {"optimizer": "adamw_master", "parameter_dtype": "torch.bfloat16", "fallback_reason": None}
    if variant in ("bf16", "no"):
        return {**shared, "requested": variant, "effective": variant}
    fallback = None if effective in (None, variant) else f"{variant} is not available on NVIDIA H200"
    scenarios = {"requested_scenario": variant, "effective_scenario": effective or variant}
    return {**shared, "requested": "fp8", "effective": "fp8", **scenarios, "fallback_reason": fallback}


def made_up_run(
    variant: str = "bf16", seed: int = 1, rate: float = 100_000.0, loss: float = 1.0, **changes: Any
) -> RunRecord:
    """Return the record of a run with 60 steps at about `rate` tokens/s and four evaluations, the last with `loss`.
    `changes` replace the fields of the record, or the sections of its run.json, that have their names.
    """
    noise = random.Random(f"{variant} {seed}")
    steps, evaluations = [], []
    for step in range(1, NUM_STEPS + 1):
        tokens_per_s = rate * noise.uniform(0.98, 1.02) if step > 10 else rate / 4
        times = {"step_time_s": 8192 / tokens_per_s, "tokens_per_s": tokens_per_s, "peak_memory_gib": 37.0}
        steps.append({"step": step, "loss": loss + 3.0 / step, "tokens_seen": 8000 * step + seed, **times})
        if step % 15 == 0:
            evaluation = {"eval_loss": loss + (NUM_STEPS - step) / 100, "eval_num_supervised_tokens": 987}
            evaluations.append({"step": step, **evaluation})
    options = ["--mixed_precision", "bf16", "--use_te", "--seed", str(seed), "--model_name", "meta-llama/Llama-3.2-1B"]
    config = parse_config(options).to_dict()
    if variant not in ("bf16", "no"):
        config["precision"] = {**config["precision"], "mixed_precision": "fp8", "fp8_scenario": variant}
    stored = {
        "config": config,
        "precision": precision_of(variant),
        "effective": {"packing": True, "global_batch_size": 16},
        "data": {"num_tokens": 480_000},
        "model": {"location": "meta-llama/Llama-3.2-1B", "num_parameters": 10**9},
        "provenance": PROVENANCE,
    }
    fields: dict[str, Any] = {
        "stored": {name: changes.pop(name, section) for name, section in stored.items()},
        "source": f"runs/{variant}-{seed}",
        "summary": {
            "median_tokens_per_s": statistics.median(step["tokens_per_s"] for step in steps[10:]),
            "median_energy_j_per_million_tokens": 6000.0 * 100_000 / rate,
            "certificate": {"verdict": "certified", "reasons": []},
        },
        "steps": steps,
        "evaluations": evaluations,
    }
    return RunRecord(**{**fields, **changes})


def write_run_folder(folder: Path, run: RunRecord) -> Path:
    """Write to `folder` the files that training would leave for `run`. Add exact_match.json if the run has answers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run.stored))
    summary = {"steps": len(run.steps), "certificate": run.summary["certificate"], "throughput": run.summary}
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = sorted([*run.steps, *run.evaluations], key=lambda record: record["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if run.answers:
        answers = [{"problem": problem, "correct": right} for problem, right in run.answers]
        (folder / "exact_match.json").write_text(json.dumps({"answers": answers}))
    return folder
