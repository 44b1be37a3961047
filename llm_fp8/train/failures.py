"""Failures of the machine (GPU memory, disk, a lost process) as one sentence with a remedy."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from llm_fp8.config.options import Config
from llm_fp8.distributed.process_group import is_loss_of_a_peer
from llm_fp8.distributed.sharding_mode import keeps_unsharded_gradients, state_bytes
from llm_fp8.observability.metrics import GIB
from llm_fp8.optim.optimizers import OptimizerKind, bytes_per_parameter
from llm_fp8.utils.errors import UserError, existing_part, reason_not_written


@contextlib.contextmanager
def explained_failures(
    folder: Path, out_of_memory_advice: Callable[[], str], caches: Sequence[Path] = ()
) -> Iterator[None]:
    """Turn running out of GPU memory or disk, or losing another process, into a `UserError`.

    `folder` is the run's; `caches` are folders that libraries write to besides, whose errors name no file.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(out_of_memory_advice()) from error
    except OSError as error:
        written = Path(error.filename) if isinstance(error.filename, str) else _fullest(folder, *caches)
        reason = reason_not_written(error, written)
        if reason is None:
            raise
        ours = written.is_relative_to(folder)
        chosen_by = "--output_dir" if ours else "HF_HOME, HF_DATASETS_CACHE or TMPDIR"
        raise UserError(
            f"{written}: {reason} ({chosen_by}). Checkpoints saved before are intact; continue with --resume_from."
        ) from error
    except RuntimeError as error:
        if not is_loss_of_a_peer(error):
            raise
        raise UserError(
            "another process of this run is gone (killed, out of memory, or ended by an error of its own, said "
            f"above), so it cannot go on: {str(error).splitlines()[0][:200]}. Complete checkpoints under "
            f"{folder / 'checkpoints'} are intact; continue with --resume_from latest."
        ) from error


def _fullest(*folders: Path) -> Path:
    """The folder on the disk with the least room; the first of several on one disk."""
    return min(folders, key=lambda folder: shutil.disk_usage(existing_part(folder)).free)


_RESERVE_GIB = 3.0
"""Reserved for the CUDA context, library workspaces and fragmentation."""


@dataclass(frozen=True)
class MemoryUse:
    """GPU memory at the time of the failure."""

    total_gib: float
    peak_gib: float
    """Peak allocated."""
    resident_gib: float
    """Allocated before the step: weights and, after the first step, optimizer state; 0 before training."""


def out_of_memory_advice(
    config: Config, kind: OptimizerKind, num_parameters: int, use: MemoryUse, mode: str = "single", num_shards: int = 1
) -> str:
    """What takes the memory, and options that would fit; `mode` is the effective --sharding_mode, or 'single'."""
    standing_gib = num_parameters * state_bytes(mode, kind, num_shards, config) / GIB
    lean_gib = num_parameters * bytes_per_parameter("adamw_8bit").total / GIB
    advice = _smaller_batch(config, kind, num_parameters, use, standing_gib)
    sharded = mode not in ("single", "ddp")
    if config.model.cuda_graphs:
        advice.append("a run without --cuda_graphs, whose graphs keep memory for a micro-batch of their own")
    elif not config.model.gradient_checkpointing and use.resident_gib:
        advice.append("--gradient_checkpointing")
    if keeps_unsharded_gradients(mode, config):
        advice.append("--sync_every_micro_batch")
    if not sharded and not config.lora.lora_rank:
        if kind != "adamw_8bit" and lean_gib + _RESERVE_GIB < use.total_gib:
            advice.append(f"--optimizer adamw_8bit ({lean_gib:.1f} GiB in place of {standing_gib:.1f})")
        state_gib = num_parameters * bytes_per_parameter(kind).state / GIB
        left_gib = standing_gib - (1 - config.optim.offload_optimizer) * state_gib
        if kind == "adamw_master" and left_gib + _RESERVE_GIB < use.total_gib and left_gib < standing_gib:
            advice.append(f"--offload_optimizer 1 ({left_gib:.1f} GiB, and {state_gib:.1f} in host memory)")
    if mode == "single":
        advice.append("several GPUs (train_multi_gpu.py --sharding_mode fsdp_full)")
    elif mode not in ("fsdp_full", "fsdp_offload"):
        advice.append("--sharding_mode fsdp_full")
    elif mode == "fsdp_full":
        advice.append("more GPUs, --sharding_mode fsdp_offload")
    advice.append("a smaller model, or a GPU with more memory")
    where = "" if mode == "single" else f" per GPU under --sharding_mode {mode}"
    return (
        f"the GPU is out of memory: weights, gradients and optimizer state of {num_parameters / 1e9:.2f} billion "
        f"parameters take {standing_gib:.1f} GiB{where} with --optimizer {kind}, and {use.peak_gib:.1f} of "
        f"{use.total_gib:.1f} GiB were in use at the peak. What would lower it: {'; '.join(advice)}."
    )


def _smaller_batch(
    config: Config, kind: OptimizerKind, num_parameters: int, use: MemoryUse, standing_gib: float
) -> list[str]:
    """The largest --batch_size that may fit at the same global batch; empty where none is known to.

    The step failed before it had all it needed, so a sequence takes at least its share of what was allocated.
    """
    asked = config.data.batch_size
    gradients_gib = 0.0 if config.lora.lora_rank else num_parameters * bytes_per_parameter(kind).gradient / GIB
    activations_gib = use.peak_gib - use.resident_gib - gradients_gib
    room_gib = use.total_gib - standing_gib - _RESERVE_GIB
    if not use.resident_gib or room_gib <= 0:
        return []
    fitting = asked - 1
    if activations_gib > 0:
        fitting = min(fitting, int(room_gib / activations_gib * asked))
    in_step = asked * config.optim.gradient_accumulation_steps
    batch_size = next((size for size in range(fitting, 0, -1) if in_step % size == 0), 0)
    if batch_size == 0:
        return [f"a --max_seq_length below {config.data.max_seq_length}"]
    return [f"--batch_size {batch_size} --gradient_accumulation_steps {in_step // batch_size} (the same global batch)"]
