"""The DeepSpeed file of a run, completed by the run's options. Needs no GPU and no process group.

The file of --deepspeed_config says how ZeRO communicates and stores (bucket sizes, overlap, thresholds). Batch,
precision, optimizer, schedule and clipping come from the scripts' options: an entry that repeats them, or "auto", is
accepted, and one that contradicts them is refused. Elsewhere "auto" is DeepSpeed's default.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from llm_fp8.config.options import Config
from llm_fp8.utils.errors import UserError, reading
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.packages import DEEPSPEED, SHIPPED

_SET_ELSEWHERE = {
    "fp8": "fp8 is Transformer Engine's here, from --mixed_precision fp8 and --fp8_scenario",
    "communication_data_type": "gradients are reduced in the dtype that the run computes in; fp32 would double that",
    "optimizer": "the optimizer is AdamW, from --learning_rate and --weight_decay",
    "scheduler": "the schedule comes from --lr_scheduler and --num_warmup_steps",
}
"""Entries that would have no effect or a bad one, and why."""


def file_of(named: str | None, mode: str) -> Path:
    """The file `named` by --deepspeed_config; without one the mode's own."""
    return Path(named) if named else (SHIPPED / "configs").resolve() / f"ds_z{zero_stage(mode)}.json"


def zero_stage(mode: str) -> int:
    return int(mode.removeprefix("deepspeed_"))


def load_deepspeed(flag: str = "A deepspeed mode") -> None:
    """Import DeepSpeed for the device at hand; `UserError` that starts with `flag` where that fails."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    DEEPSPEED.require(flag)
    import deepspeed.ops

    # The one operator that DeepSpeed would compile unasked: faster collectives on CPUs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch 2.13 renames collectives that DeepSpeed calls by their old names, and says so at every parameter.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def deepspeed_settings(config: Config, mode: str, compute_name: str, num_processes: int) -> dict[str, Any]:
    """What DeepSpeed is given: the checked file with the run's own values filled in; UserError where it cannot be.
    `compute_name`: the dtype of everything that is not fp8, "fp32" or "bf16".
    """
    load_deepspeed()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    path, stage = file_of(config.parallel.deepspeed_config, mode), zero_stage(mode)
    batch_size, steps = config.data.batch_size, config.optim.gradient_accumulation_steps
    own = {
        "train_micro_batch_size_per_gpu": (batch_size, "--batch_size"),
        "gradient_accumulation_steps": (steps, "--gradient_accumulation_steps"),
        "train_batch_size": (batch_size * steps * num_processes, "--batch_size and --gradient_accumulation_steps"),
        "gradient_clipping": (config.optim.max_grad_norm, "--max_grad_norm"),
        "zero_optimization.stage": (stage, "--sharding_mode"),
        "bf16.enabled": (compute_name == "bf16", "--mixed_precision"),
        "fp16.enabled": (False, "--mixed_precision"),
    }
    with reading("--deepspeed_config", path):
        settings = without_auto(read_json(path))
        for key, why in _SET_ELSEWHERE.items():
            if key in settings:
                raise UserError(f'--deepspeed_config {path}, "{key}": {why}; remove the entry.')
        for key, (value, flag) in own.items():
            section, _, name = key.rpartition(".")
            found = (settings.get(section, {}) if section else settings).get(name, value)
            if found != value:
                raise UserError(
                    f'--deepspeed_config {path}, "{key}": {json.dumps(found)}: this run has {json.dumps(value)}, from '
                    f'{flag}; remove the entry or make it "auto".'
                )
        zero = {**settings.get("zero_optimization", {}), "stage": stage}
        if stage < 3:
            # Weights become views of one tensor; kernels load 16 bytes at a time.
            zero.setdefault("parameter_alignment", True)
        DeepSpeedZeroConfig(**zero)
    return {
        **settings,
        **{key: value for key, (value, _) in own.items() if "." not in key},
        "zero_optimization": zero,
        # Looking for overflow costs a synchronisation and a reduction in every step; the loop checks its loss anyway.
        "bf16": {"check_grad_overflow": False, **settings.get("bf16", {}), "enabled": compute_name == "bf16"},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own clock waits for the GPU in every micro-batch.
        "timers": {"throughput": {"enabled": False}},
    }


def without_auto(value: Any) -> Any:
    """`value` without the entries, at any depth, that are "auto"."""
    if not isinstance(value, dict):
        return value
    return {key: without_auto(entry) for key, entry in value.items() if entry != "auto"}
