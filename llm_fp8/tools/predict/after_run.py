"""A finished run beside its prediction: which runs have one, of which tokens and lengths, and summary.json's entry."""

from __future__ import annotations

import statistics
from typing import Any

from llm_fp8.observability.metrics import DecoderSize
from llm_fp8.observability.step_stats import measured_steps, throughput_summary
from llm_fp8.tools.predict.calibration import MAX_GPUS, MODES
from llm_fp8.tools.predict.prediction import Prediction, can_predict, known_gpu, predict
from llm_fp8.tools.predict.workload import PREDICTED, ModelSize, StepWorkload
from llm_fp8.train.run_record import RunOutcome


def mean_length(size: DecoderSize, model_flops_per_token: float) -> float:
    """The token-averaged document length of so many model FLOPs per token (`metrics.model_flops_per_token` solved)."""
    return (model_flops_per_token / 6 - size.num_linear_parameters) / (size.num_layers * size.attention_width)


def compare_with_prediction(run: RunOutcome) -> tuple[dict[str, Any], str] | None:
    """The entry `prediction` of a finished run's summary and its line for the terminal; None where nothing predicts it:
    a GPU without constants, a decoder that is not TE's, a sharding mode, recipe or option that no constant was fitted
    for, or no step. Tokens and lengths are those of the steps that were measured, padding included.
    """
    config, options, precision = run.config, run.config.parallel, run.config.precision
    num_gpus, steps, recipe = run.num_gpus, run.steps, run.recipe
    gpu = known_gpu(run.gpu_name)
    mode = "single" if num_gpus == 1 and run.mode == "ddp" else run.mode  # nothing is exchanged
    if (
        gpu is None
        or not config.model.use_te
        or recipe not in PREDICTED
        or not can_predict(gpu, recipe)
        or precision.fp8_bf16_modules
        or mode not in MODES
        or (mode == "single") != (num_gpus == 1)
        or options.context_parallel_size > 1
        or num_gpus > MAX_GPUS
        or (num_gpus > 1 and not gpu.calibrated)
    ):
        return None
    throughput, measured = throughput_summary(steps), measured_steps(steps)
    if not measured or "peak_memory_gib" not in steps[-1]:
        return None
    micro_batches = config.optim.gradient_accumulation_steps
    tokens = statistics.mean(step["tokens_per_s"] * step["step_time_s"] for step in measured)
    flops_per_token = [step["model_tflops"] * 1e12 * num_gpus / step["tokens_per_s"] for step in measured]
    size = DecoderSize.from_config(run.hf_config)
    recomputed = range(
        0, size.num_layers if config.model.gradient_checkpointing else 0, config.model.gradient_checkpointing_every
    )
    scenario = StepWorkload(
        model=ModelSize.from_config(run.hf_config),
        recipe=recipe,
        micro_batch_tokens=max(1, round(tokens / (micro_batches * num_gpus))),
        micro_batches=micro_batches,
        mean_length=max(1.0, mean_length(size, statistics.mean(flops_per_token))),
        optimizer=run.optimizer,
        mode=mode,
        num_gpus=num_gpus,
        sync_every_micro_batch=options.sync_every_micro_batch,
        recomputed_layers=len(recomputed),
        bf16_layers=precision.fp8_first_bf16_layers + precision.fp8_last_bf16_layers if recipe != "bf16" else 0,
        fp8_lm_head=precision.fp8_lm_head,
        flash_attention_4=config.model.flash_attention_4,
        fp8_params=options.fp8_params,
    )
    peak = steps[-1].get("peak_memory_gib_max_rank", steps[-1]["peak_memory_gib"])
    entry = compare(predict(scenario, gpu), throughput["median_step_time_s"], peak)
    return entry, describe_comparison(entry)


def compare(prediction: Prediction, step_time_s: float, peak_memory_gib: float) -> dict[str, Any]:
    """The entry `prediction` of summary.json; `_error` is predicted over measured, less one."""
    work = prediction.scenario
    return {
        "gpu": prediction.gpu.name,
        "recipe": work.recipe,
        "micro_batch_tokens": work.micro_batch_tokens,
        "mean_length": work.mean_length,
        "predicted_step_time_s": prediction.step_time_s,
        "measured_step_time_s": step_time_s,
        "step_time_error": prediction.step_time_s / step_time_s - 1,
        "predicted_peak_memory_gib": prediction.peak_memory_gib,
        "measured_peak_memory_gib": peak_memory_gib,
        "peak_memory_error": prediction.peak_memory_gib / peak_memory_gib - 1,
        "notes": prediction.notes,
    }


def describe_comparison(outcome: dict[str, Any]) -> str:
    """One line for the terminal; the percentages are measured over predicted, less one."""
    took, expected = outcome["measured_step_time_s"], outcome["predicted_step_time_s"]
    held, room = outcome["measured_peak_memory_gib"], outcome["predicted_peak_memory_gib"]
    line = (
        f"predicted {expected:.3g} s a step, took {took:.3g} ({took / expected - 1:+.0%}); "
        f"predicted {room:.1f} GiB, took {held:.1f} ({held / room - 1:+.0%})"
    )
    return line + "".join(f"\n  {note}" for note in outcome["notes"])
