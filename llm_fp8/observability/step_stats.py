"""The speed of a run: which of its steps are measured, and their medians."""

from __future__ import annotations

import statistics

from llm_fp8.observability.metrics import METRICS, RECORDED_STEP

WARMUP_STEPS = 10
"""Steps at the start of a process that medians leave out (compilation, autotuning, allocator); at most half of all."""

MEDIANS = tuple(key for key, metric in METRICS.items() if metric.of_step is not None)
"""Figures whose median over the measured steps is in summary.json and on W&B as `median_<key>`."""


INTERVAL_MEDIANS = ("energy_j_per_million_tokens", "gpu_power_w")
"""The same for figures that only some steps have."""


def measured_steps(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """The `steps` (of one process, in order) that speed is measured on: not the first and not the recorded one."""
    return [record for record in steps[min(WARMUP_STEPS, len(steps) // 2) :] if RECORDED_STEP not in record]


def throughput_summary(steps: list[dict[str, float]]) -> dict[str, float]:
    """`num_steps_measured`, `num_steps_left_out`, and `median_<key>` over the `measured_steps` that have it for each of
    `MEDIANS` and `INTERVAL_MEDIANS`.
    """
    measured = measured_steps(steps)
    summary: dict[str, float] = {"num_steps_measured": len(measured), "num_steps_left_out": len(steps) - len(measured)}
    for key in (*MEDIANS, *INTERVAL_MEDIANS):
        values = [record[key] for record in measured if key in record]
        if values:
            summary[f"median_{key}"] = statistics.median(values)
    return summary
