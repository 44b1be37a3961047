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
    go_on = f"Continue with --resume_from latest --output_dir {folder}."
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(out_of_memory_advice(config, mode)) from error
    except OSError as error:  # of libraries that write to their caches it names no file
        written = Path(error.filename) if isinstance(error.filename, str) else folder
        if reason := reason_not_written(error):
            raise UserError(f"{written} (--output_dir, HF_HOME or TMPDIR): {reason}. {go_on}") from error
        raise
    except RuntimeError as error:
        if not is_loss_of_a_peer(error):
            raise
        words = str(error).splitlines()[0][:200]
        raise UserError(f"another process of this run is gone, see what it said: {words}. {go_on}") from error


def out_of_memory_advice(config: Config, mode: str) -> str:
    """What would lower the memory of a run under `mode`, the effective --sharding_mode or 'single'."""
    copies, trains_all = mode in ("single", "ddp"), config.lora.lora_rank == 0
    advice = {
        f"--batch_size below {config.data.batch_size} with more --gradient_accumulation_steps": config.data.batch_size
        > 1,
        f"--max_seq_length below {config.data.max_seq_length}": config.data.batch_size == 1,
        "no --cuda_graphs": config.model.cuda_graphs,
        "--gradient_checkpointing": not config.model.gradient_checkpointing,
        "--optimizer adamw_8bit": copies and trains_all and config.optim.optimizer != "adamw_8bit",
        "--lora_rank 16": trains_all,
        "more GPUs (train_multi_gpu.py --sharding_mode fsdp_full)": mode == "single",
        "--sharding_mode fsdp_full": mode not in ("single", "fsdp_full", "fsdp_offload"),
        "more GPUs, or --sharding_mode fsdp_offload": mode == "fsdp_full",
    }
    used = f" ({torch.cuda.max_memory_allocated() / GIB:.1f} GiB at the peak)" if torch.cuda.is_available() else ""
    lower = "; ".join(words for words, helps in advice.items() if helps)
    return f"the GPU is out of memory{used}. What would lower it: {lower}. 'llm-fp8 memory' says what fits."
