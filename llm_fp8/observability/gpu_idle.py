"""How much of a step the GPU is idle: launch-bound, or waiting for other GPUs.

A layer launches dozens of kernels, in fp8 more than in bf16. With small micro-batches the GPU finishes them before the
host has launched the next; the step then takes the host's time and fp8 gains nothing. How small depends on the host.
"""

from __future__ import annotations

from typing import Any

from llm_fp8.observability.step_profile import StepProfile
from llm_fp8.observability.step_stats import throughput_summary

WORTH_A_WORD = 0.2
"""Share of a step from which on a run reports it."""


def gpu_idle(profile: StepProfile, steps: list[dict[str, Any]]) -> dict[str, float] | None:
    """The entry `gpu_waiting` of a summary for a run's `steps`; None without a recorded kernel or a measured step.

    work_s: kernels of the recorded step other than communication, on the GPU with most of them. step_time_s: median of
    the measured steps, since recording slows the host. share: of the step in which no such kernel runs.
    """
    step_time_s = throughput_summary(steps).get("median_step_time_s")
    work_s = max(profile.work_s_by_rank, default=0.0)
    if not work_s or not step_time_s:
        return None
    return {"work_s": work_s, "step_time_s": step_time_s, "share": max(0.0, 1 - work_s / step_time_s)}


def describe_gpu_idle(idle: dict[str, Any] | None, num_ranks: int) -> str | None:
    """What a run reports of it, with what helps; None where it is small or unknown."""
    if idle is None or idle["share"] < WORTH_A_WORD:
        return None
    why, less = "launch-bound", ""
    if num_ranks > 1:
        why = "launch-bound, or waiting for other GPUs"
        less = "; or a --sharding_mode that communicates less: fsdp_grad, or ddp where it fits"
    return (
        f"the GPU is idle during {idle['share']:.0%} of a step ({why}), which fp8 cannot shorten: give each "
        f"micro-batch more tokens (--batch_size, --max_seq_length), recompute less (--gradient_checkpointing){less}"
    )
