"""How much of its steps a run's GPU waits: for the host that launches kernels, or for other GPUs.

A layer launches dozens of kernels, in fp8 more than in bf16. Where a micro-batch is small the GPU is done with them
sooner than the host is with launching, and a step takes what the host takes: fp8 then gains nothing. How small that is
depends on the host.
"""

from __future__ import annotations

from typing import Any

from llm_fp8.observability.step_profile import StepProfile
from llm_fp8.observability.step_stats import throughput_summary

WORTH_A_WORD = 0.2
"""Share of a step from which on a run says so."""


def gpu_idle(profile: StepProfile, steps: list[dict[str, Any]]) -> dict[str, float] | None:
    """The entry `gpu_waiting` of a run's summary, `steps` being its own; None where no kernel was recorded or no step
    was measured.

    Kernels are those of the recorded step: recording slows the host down and leaves them as long as they are. The step
    is the median of those that were measured, which nothing recorded.

    Returns: work_s, in which kernels other than communication run on the GPU that has most of them; step_time_s; share,
        of the step, in which none does.
    """
    step_time_s = throughput_summary(steps).get("median_step_time_s")
    work_s = max(profile.work_s_by_rank, default=0.0)
    if not work_s or not step_time_s:
        return None
    return {"work_s": work_s, "step_time_s": step_time_s, "share": max(0.0, 1 - work_s / step_time_s)}


def describe_gpu_idle(waiting: dict[str, Any] | None, num_ranks: int) -> str | None:
    """What a run says of it, with what helps; None where it is not worth a word, or not known."""
    if waiting is None or waiting["share"] < WORTH_A_WORD:
        return None
    on_what, less = "its host to launch kernels", ""
    if num_ranks > 1:
        on_what, less = (
            "its host or other GPUs",
            "; or a --sharding_mode that exchanges less: fsdp_grad, or ddp where it fits",
        )
    return (
        f"the GPU waits for {on_what} during {waiting['share']:.0%} of a step, which fp8 cannot shorten: give each "
        f"micro-batch more tokens (--batch_size, --max_seq_length), recompute less (--gradient_checkpointing){less}"
    )
