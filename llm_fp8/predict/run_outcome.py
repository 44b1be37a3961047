"""A finished run as a scenario: which runs can be held against a prediction, and with which tokens and lengths."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from llm_fp8.config import Config
from llm_fp8.metrics import DecoderSize
from llm_fp8.optim import OptimizerKind
from llm_fp8.predict.prediction import can_predict, compare, known_gpu, measured_steps, predict
from llm_fp8.predict.scenario import MODES, RECIPES, ModelSize, Scenario
from llm_fp8.report import measured_steps as steps_of_speed
from llm_fp8.report import throughput_summary


def mean_length(size: DecoderSize, model_flops_per_token: float) -> float:
    """The token-averaged document length that gives so many model FLOPs per token: `metrics.model_flops_per_token` solved for it."""
    return (model_flops_per_token / 6 - size.num_linear_parameters) / (size.num_layers * size.attention_width)


def run_prediction(
    config: Config,
    hf_config: PretrainedConfig,
    recipe: str,
    optimizer: OptimizerKind,
    mode: str,
    num_gpus: int,
    gpu_name: str,
    metrics_path: Path,
) -> dict[str, Any] | None:
    """The entry `prediction` of a run's summary; None where there is nothing to predict it with.

    That is: a GPU without constants, a decoder that is not TE's, a sharding mode, recipe or option that no constant was fitted for, or no step.
    Tokens and lengths are those of the steps that were measured, padding included.
    """
    gpu = known_gpu(gpu_name)
    mode = "single" if num_gpus == 1 and not mode.startswith("fsdp") else mode
    options = config.parallel
    if gpu is None or not config.model.use_te or recipe not in RECIPES or not can_predict(gpu, recipe):
        return None
    if mode not in MODES or (mode == "single") != (num_gpus == 1) or options.context_parallel_size > 1 or options.fp8_params:
        return None
    if num_gpus > 1 and not gpu.calibrated:
        return None
    steps = measured_steps(metrics_path)
    throughput, measured = throughput_summary(steps), steps_of_speed(steps)
    if not measured or "peak_memory_gib" not in steps[-1]:
        return None
    micro_batches = config.optim.gradient_accumulation_steps
    tokens = statistics.mean(step["tokens_per_s"] * step["step_time_s"] for step in measured)
    flops_per_token = [step["model_tflops"] * 1e12 * num_gpus / step["tokens_per_s"] for step in measured]
    size = DecoderSize.from_config(hf_config)
    layers = size.num_layers
    precision = config.precision
    scenario = Scenario(
        model=ModelSize.from_config(hf_config),
        recipe=recipe,
        micro_batch_tokens=max(1, round(tokens / (micro_batches * num_gpus))),
        micro_batches=micro_batches,
        mean_length=max(1.0, mean_length(size, statistics.mean(flops_per_token))),
        optimizer=optimizer,
        mode=mode,
        num_gpus=num_gpus,
        sync_every_micro_batch=options.sync_every_micro_batch,
        recomputed_layers=len(range(0, layers, config.model.gradient_checkpointing_every))
        if config.model.gradient_checkpointing
        else 0,
        bf16_layers=precision.fp8_first_bf16_layers + precision.fp8_last_bf16_layers if recipe != "bf16" else 0,
    )
    peak = steps[-1].get("peak_memory_gib_max_rank", steps[-1]["peak_memory_gib"])
    return compare(predict(scenario, gpu), throughput["median_step_time_s"], peak)
