"""A reporter and what is handed to it."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator

from llm_fp8.config.options import Config
from llm_fp8.config.parser import parse_config
from llm_fp8.observability.reporter import RunReporter

RUN_SECTIONS = {
    "precision": {
        "requested": "fp8",
        "effective": "fp8",
        "requested_scenario": "mxfp8",
        "effective_scenario": "delayed",
        "optimizer": "adamw_master",
        "coverage": {"converted": {"layers.*.mlp": 2}},
    },
    "effective": {"sharding_mode": "fsdp_full", "num_processes": 4, "tokens_per_step": 4096},
    "model": {"location": "here", "num_parameters": 1234},
    "data": {"num_rows": 10},
}

PROVENANCE = {
    "gpus": [{"name": "NVIDIA H200"}],
    "git": {"commit": "abc"},
    "packages": {"torch": "2.11.0", "transformer-engine": "2.20.2"},
}

TOTAL_STEPS = 40


def a_step(step: int) -> dict[str, float]:
    return {
        "step": step,
        "loss": 3.0 / step,
        "grad_norm": 1.5,
        "learning_rate": 1e-3 * step,
        "step_time_s": 0.25,
        "tokens_per_s": 1000.0 + step,
        "model_tflops": 0.5,
        "tokens_seen": 256 * step,
    }


def a_config(folder: Path, *arguments: str) -> Config:
    return parse_config(["--output_dir", str(folder), *arguments])


def a_reporter(config: Config, resume_step: int = 0) -> RunReporter:
    accelerator = Accelerator(cpu=True)
    reporter = RunReporter(accelerator, config, TOTAL_STEPS, resume_step, resume_step >= TOTAL_STEPS)
    reporter.start_wandb({"config": config.to_dict(), **RUN_SECTIONS, "provenance": PROVENANCE})
    return reporter
