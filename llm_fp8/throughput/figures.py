"""What the step times of a measurement come to, and its kernels in words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llm_fp8.metrics import DecoderSize, StepTokens, step_flops

if TYPE_CHECKING:
    from llm_fp8.throughput.workload import Workload


def speed(
    work: Workload,
    times_s: Sequence[float],
    num_gpus: int = 1,
    context_size: int = 1,
    num_adapter_parameters: int = 0,
    step_tokens: Mapping[str, int] | None = None,
) -> dict[str, float]:
    """What step times (seconds, at least one) come to; `num_adapter_parameters` is that of an arm with LoRA, `step_tokens` the `StepTokens` of an arm
    on real documents.

    Returns:
        tokens_per_s: the positions of all GPUs over the median step; _slowest and _fastest: over the longest and the shortest one; _p10 and _p90:
        between them lie the middle eight tenths of the steps. On real documents also real_tokens_per_s and so on, without padding.
        model_tflops: model TFLOP/s of one GPU at the median step.
    """
    if step_tokens is not None:
        tokens = StepTokens(**step_tokens)
    else:
        total = work.tokens_per_step * num_gpus // context_size
        tokens = StepTokens(total, total, total, total * work.seq_length)
    size = DecoderSize.from_config(work.hf_config(), num_adapter_parameters)
    median = statistics.median(times_s)
    tenths = statistics.quantiles(times_s, n=10, method="inclusive") if len(times_s) > 1 else list(times_s)
    seconds = {"": median, "_slowest": max(times_s), "_p10": tenths[-1], "_p90": tenths[0], "_fastest": min(times_s)}
    found = {f"tokens_per_s{end}": tokens.num_tokens / taken for end, taken in seconds.items()}
    if step_tokens is not None:
        found.update({f"real_tokens_per_s{end}": tokens.num_real_tokens / taken for end, taken in seconds.items()})
    return {**found, "model_tflops": step_flops(size, tokens) / median / num_gpus / 1e12}


def describe_gemms(gemm_kernels: dict[str, dict[str, float]]) -> str:
    """The `gemm_kernels` of a measurement in words."""
    return ", ".join(f"{kind} {found['count']} ({found['share']:.0%})" for kind, found in gemm_kernels.items()) or "none"
