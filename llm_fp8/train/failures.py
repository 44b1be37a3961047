"""Failures of the machine (GPU memory, disk, a lost process) as one sentence with a remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from llm_fp8.config.options import Config
from llm_fp8.distributed.process_group import is_loss_of_a_peer
from llm_fp8.observability.metrics import GIB
from llm_fp8.utils.errors import UserError, reason_not_written


@contextlib.contextmanager
def explained_failures(config: Config, folder: Path, mode: str) -> Iterator[None]:
    """Turn running out of GPU memory or disk, or losing another process, into a `UserError`.

    `folder` is the run's; `mode` is the effective sharding mode.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(out_of_memory_advice(config, mode)) from error
    except OSError as error:
        # Libraries that write to caches of their own name no file.
        written = Path(error.filename) if isinstance(error.filename, str) else folder
        reason = reason_not_written(error, written)
        if reason is None:
            raise
        where = "--output_dir" if error.filename else "--output_dir, HF_HOME, HF_DATASETS_CACHE or TMPDIR"
        raise UserError(
            f"{written}: {reason} ({where}). Checkpoints saved before are intact; continue with --resume_from."
        ) from error
    except RuntimeError as error:
        if not is_loss_of_a_peer(error):
            raise
        raise UserError(
            "another process of this run is gone (killed, out of memory, or ended by an error of its own, said "
            f"above), so it cannot go on: {str(error).splitlines()[0][:200]}. Complete checkpoints under "
            f"{folder / 'checkpoints'} are intact; continue with --resume_from latest."
        ) from error


def out_of_memory_advice(config: Config, mode: str) -> str:
    """What would lower the memory of a run under `mode`, the effective --sharding_mode or 'single'."""
    batch_size, per_step = config.data.batch_size, config.optim.gradient_accumulation_steps
    smaller = next((size for size in range(batch_size // 2, 0, -1) if batch_size % size == 0), None)
    fewer = None if smaller is None else per_step * batch_size // smaller
    sharded, trains_all = mode not in ("single", "ddp"), config.lora.lora_rank == 0
    optimizer = config.optim.optimizer
    advice = {
        f"--batch_size {smaller} --gradient_accumulation_steps {fewer} (the same global batch)": smaller is not None,
        f"a --max_seq_length below {config.data.max_seq_length}": smaller is None,
        "a run without --cuda_graphs": config.model.cuda_graphs,
        "--gradient_checkpointing": not config.model.gradient_checkpointing,
        "--optimizer adamw_8bit": not sharded and trains_all and optimizer != "adamw_8bit",
        "--offload_optimizer 1": not sharded and trains_all and optimizer in ("auto", "adamw_master"),
        "--lora_rank 16": trains_all,
        "several GPUs (train_multi_gpu.py --sharding_mode fsdp_full)": mode == "single",
        "--sharding_mode fsdp_full": mode not in ("single", "fsdp_full", "fsdp_offload"),
        "more GPUs, or --sharding_mode fsdp_offload": mode == "fsdp_full",
    }
    peak_gib, total_gib = 0.0, 0.0
    if torch.cuda.is_available():
        peak_gib = torch.cuda.max_memory_allocated() / GIB
        total_gib = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory / GIB
    return (
        f"the GPU is out of memory: {peak_gib:.1f} of {total_gib:.1f} GiB were in use at the peak. What would lower "
        f"it: {'; '.join(words for words, helps in advice.items() if helps)}. 'llm-fp8 memory' says what fits."
    )
