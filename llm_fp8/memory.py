"""What to say when the GPU's memory is not enough: where it went and what would fit."""

from __future__ import annotations

import torch

from llm_fp8.config import Config
from llm_fp8.metrics import GIB


def out_of_memory_advice(config: Config, device: torch.device) -> str:
    """One sentence or two for a `UserError`, from the allocator's own figures at the time of the failure."""
    total = torch.cuda.get_device_properties(device).total_memory / GIB
    held = torch.cuda.memory_allocated(device) / GIB
    peak = torch.cuda.max_memory_allocated(device) / GIB
    advice = []
    if config.data.batch_size > 1:
        # What a row takes is at least its share of what was asked for beyond the standing weights and optimizer state.
        rows = config.data.batch_size // 2
        steps = config.optim.gradient_accumulation_steps * config.data.batch_size // rows
        advice.append(f"--batch_size {rows} --gradient_accumulation_steps {steps} (the same global batch)")
    if not config.model.gradient_checkpointing:
        advice.append("--gradient_checkpointing")
    if config.optim.optimizer != "adamw_8bit":
        advice.append("--optimizer adamw_8bit (6 bytes per parameter)")
    advice.append("several GPUs with train_multi_gpu.py")
    return f"the GPU is out of memory: {peak:.1f} GiB were in use at the peak, {held:.1f} GiB now, of {total:.1f} GiB. What lowers it: {'; '.join(advice)}."
