"""A run and its prediction: which runs have one, what --dry_run says of it, and the entry of summary.json."""

from __future__ import annotations

import statistics
from typing import Any

from llm_fp8.observability.metrics import DecoderSize
from llm_fp8.observability.step_stats import measured_steps, throughput_summary
from llm_fp8.tools.predict.before_run import has_times, settle, workload_of
from llm_fp8.tools.predict.prediction import Prediction, known_gpu, predict
from llm_fp8.train.prediction import Predictor, RunDescription


def mean_length(size: DecoderSize, model_flops_per_token: float) -> float:
    """The token-averaged document length of so many model FLOPs per token (`metrics.model_flops_per_token` solved)."""
    return (model_flops_per_token / 6 - size.num_linear_parameters) / (size.num_layers * size.attention_width)


def predict_run(run: RunDescription, micro_batch_tokens: int, mean_length: float) -> Prediction | None:
    """A run with micro-batches of so many positions, and documents of this token-averaged length; None where nothing
    predicts it: a GPU without constants, an optimizer on the host, or what `workload_of` does not know.
    """
    gpu, work = known_gpu(run.gpu_name), workload_of(run, micro_batch_tokens, mean_length)
    return predict(work, gpu) if gpu is not None and work is not None and has_times(work, gpu) else None


def describe_prediction(run: RunDescription, micro_batch_tokens: int, mean_length: float, num_steps: int) -> str | None:
    """What --dry_run says of `num_steps` steps, evaluation and checkpoints left out; None where nothing predicts it."""
    found = predict_run(run, micro_batch_tokens, mean_length)
    if found is None:
        return None
    line = (
        f"predicted: {found.step_time_s:.3g} s a step, {found.step_time_s * num_steps / 3600:.2g} hours for all, "
        f"{found.peak_memory_gib:.1f} of {found.gpu.memory_gib:.1f} GiB{'' if found.fits else ': DOES NOT FIT'}"
    )
    return line + "".join(f"\n  {note}" for note in found.notes)


def compare_with_prediction(run: RunDescription, steps: list[dict[str, Any]]) -> tuple[dict[str, Any], str] | None:
    """The entry `prediction` of a finished run's summary and its line for the terminal; None where nothing predicts it
    (`predict_run`) or it took no step. Tokens and lengths are those of the steps that were measured, with padding.
    """
    num_gpus = run.num_gpus
    measured = measured_steps(steps)
    if not measured or "peak_memory_gib" not in steps[-1]:
        return None
    tokens = statistics.mean(step["tokens_per_s"] * step["step_time_s"] for step in measured)
    flops_per_token = [step["model_tflops"] * 1e12 * num_gpus / step["tokens_per_s"] for step in measured]
    micro_batches = run.config.optim.gradient_accumulation_steps
    length = mean_length(DecoderSize.from_config(run.hf_config), statistics.mean(flops_per_token))
    found = predict_run(run, round(tokens / (micro_batches * num_gpus)), length)
    if found is None:
        return None
    peak = steps[-1].get("peak_memory_gib_max_rank", steps[-1]["peak_memory_gib"])
    entry = compare(found, throughput_summary(steps)["median_step_time_s"], peak)
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


PREDICTOR = Predictor(settle, describe_prediction, compare_with_prediction)
"""What the training scripts hand to a run."""
