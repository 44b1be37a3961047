"""What to say when the GPU's memory is not enough: where it went and what would fit."""

from __future__ import annotations

from dataclasses import dataclass

from llm_fp8.config import Config
from llm_fp8.metrics import GIB
from llm_fp8.optim import OptimizerKind, bytes_per_parameter

_RESERVE_GIB = 3.0
"""Left to CUDA's context, libraries' workspaces and gaps between blocks."""


@dataclass(frozen=True)
class MemoryUse:
    """The GPU's memory at the time of the failure."""

    total_gib: float
    peak_gib: float
    """Most that tensors held."""
    resident_gib: float
    """What they held before the step: weights and, after the first step, optimizer state. 0 where training had not begun."""


def out_of_memory_advice(config: Config, kind: OptimizerKind, num_parameters: int, use: MemoryUse) -> str:
    """A sentence or two for a `UserError`: what takes the memory, and options that would fit, as far as the failure tells."""
    standing_gib = num_parameters * bytes_per_parameter(kind).total / GIB
    lean_gib = num_parameters * bytes_per_parameter("adamw_8bit").total / GIB
    advice = _smaller_batch(config, kind, num_parameters, use, standing_gib)
    if not config.model.gradient_checkpointing and use.resident_gib:
        advice.append("--gradient_checkpointing")
    if kind != "adamw_8bit" and lean_gib + _RESERVE_GIB < use.total_gib:
        advice.append(f"--optimizer adamw_8bit ({lean_gib:.1f} GiB in place of {standing_gib:.1f})")
    advice.append("a smaller model, or a GPU with more memory")
    return (
        f"the GPU is out of memory: weights, gradients and optimizer state of {num_parameters / 1e9:.2f} billion parameters take "
        f"{standing_gib:.1f} GiB with --optimizer {kind}, and {use.peak_gib:.1f} of {use.total_gib:.1f} GiB were in use at the peak. "
        f"What would lower it: {'; '.join(advice)}."
    )


def _smaller_batch(config: Config, kind: OptimizerKind, num_parameters: int, use: MemoryUse, standing_gib: float) -> list[str]:
    """The largest --batch_size that may fit, at the same global batch; empty where none is known to.

    The step failed before it had all it wanted, so what a row takes is at least its share of what the step had got.
    """
    rows_asked = config.data.batch_size
    gradients_gib = num_parameters * bytes_per_parameter(kind).gradient / GIB
    activations_gib = use.peak_gib - use.resident_gib - gradients_gib
    room_gib = use.total_gib - standing_gib - _RESERVE_GIB
    if not use.resident_gib or room_gib <= 0:
        return []
    fitting = rows_asked - 1
    if activations_gib > 0:
        fitting = min(fitting, int(room_gib / activations_gib * rows_asked))
    global_rows = rows_asked * config.optim.gradient_accumulation_steps
    rows = next((rows for rows in range(fitting, 0, -1) if global_rows % rows == 0), 0)
    if rows == 0:
        return [f"a --max_seq_length below {config.data.max_seq_length}"]
    return [f"--batch_size {rows} --gradient_accumulation_steps {global_rows // rows} (the same global batch)"]
