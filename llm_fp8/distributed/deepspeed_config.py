"""The DeepSpeed file of a run: read, checked against the run's options, completed. Needs no GPU and no process group.

The file of --deepspeed_config says how ZeRO communicates and stores (bucket sizes, overlap, thresholds). Batch,
precision, optimizer, schedule and clipping come from the scripts' options: an entry that repeats them, or "auto", is
accepted; one that contradicts them or has no effect is refused. Elsewhere "auto" is DeepSpeed's default.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from llm_fp8.config.options import Config
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.packages import DEEPSPEED, SHIPPED

AUTO = "auto"
_ZERO = "zero_optimization"

_DTYPE_NAMES = {"fp32": ("fp32", "float32", "torch.float32"), "bf16": ("bf16", "bfloat16", "torch.bfloat16")}
"""How DeepSpeed's file may spell the dtypes in which a run computes."""

_SECTIONS = (_ZERO, "bf16", "fp16", "data_types")
_PASSED_ON = (
    *_SECTIONS,
    *(
        "communication_data_type prescale_gradients gradient_predivide_factor train_batch_size gradient_clipping "
        "train_micro_batch_size_per_gpu gradient_accumulation_steps zero_allow_untested_optimizer checkpoint "
        "comms_logger flops_profiler wall_clock_breakdown memory_breakdown dump_state steps_per_print"
    ).split(),
)
"""Accepted top-level keys."""

_SET_ELSEWHERE = {
    "fp8": "fp8 is Transformer Engine's here, from --mixed_precision fp8 and --fp8_scenario",
    "msamp": "MS-AMP is not used here; fp8 comes from --mixed_precision fp8",
    "amp": "precision comes from --mixed_precision",
    "torch_autocast": "precision comes from --mixed_precision",
    "optimizer": "the optimizer is AdamW from --learning_rate, --weight_decay and --adam_beta2",
    "scheduler": "the schedule comes from --lr_scheduler and --num_warmup_steps",
    "activation_checkpointing": "recomputation comes from --gradient_checkpointing",
    "tensorboard": "W&B comes from --use_wandb",
    "wandb": "W&B comes from --use_wandb",
}
"""Why other keys are refused."""

_ROUNDED_AWAY = "small updates would be rounded away without fp32 master weights"
_COMPILED = "it needs operators that DeepSpeed compiles"
_REFUSED = {
    "bf16.bf16_master_weights_and_grads": (True, _ROUNDED_AWAY),
    "bf16.bf16_optimizer_states": (True, _ROUNDED_AWAY),
    f"{_ZERO}.load_from_fp32_weights": (False, "a resumed run would lose what bf16 weights cannot hold"),
    f"{_ZERO}.compute_grad_norm": (False, "every step reports the gradient norm"),
    f"{_ZERO}.zero_quantized_weights": (True, _COMPILED),
    f"{_ZERO}.zero_quantized_nontrainable_weights": (True, _COMPILED),
    f"{_ZERO}.zero_quantized_gradients": (True, _COMPILED),
}
"""Refused values, and why."""

_OFFLOADING = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "zenflow")


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
    path = file_of(config.parallel.deepspeed_config, mode)
    settings = read_file(path)
    batch_size, steps = config.data.batch_size, config.optim.gradient_accumulation_steps
    all_of_them = "--batch_size, --gradient_accumulation_steps and the number of processes"
    wanted = {
        "train_micro_batch_size_per_gpu": (batch_size, "--batch_size"),
        "gradient_accumulation_steps": (steps, "--gradient_accumulation_steps"),
        "train_batch_size": (batch_size * steps * num_processes, all_of_them),
        "gradient_clipping": (config.optim.max_grad_norm, "--max_grad_norm"),
    }
    for key, why in file_problems(settings, wanted, mode, compute_name):
        raise UserError(f"--deepspeed_config {path}, {key}: {why}.")
    settings = _without_auto(settings) | {key: value for key, (value, _) in wanted.items()}
    settings[_ZERO] = {**settings[_ZERO], "stage": zero_stage(mode)}
    if zero_stage(mode) < 3:
        # Weights become views of one tensor; kernels load 16 bytes at a time.
        settings[_ZERO].setdefault("parameter_alignment", True)
    for key, why in zero_section_problems(settings[_ZERO]):
        raise UserError(f"--deepspeed_config {path}, {key}: {why}.")
    # Looking for overflow costs a host synchronisation and a reduction in every step; the loop checks its loss anyway.
    settings["bf16"] = {"check_grad_overflow": False, **settings.get("bf16", {}), "enabled": compute_name == "bf16"}
    settings["fp16"] = {"enabled": False}
    settings["zero_allow_untested_optimizer"] = True
    # DeepSpeed's own clock waits for the GPU in every micro-batch.
    settings["timers"] = {"throughput": {"enabled": False}}
    return settings


def read_file(path: Path) -> dict[str, Any]:
    """The contents of a DeepSpeed file; `UserError` where it is none."""
    values = read_json(path)
    if not isinstance(values.get(_ZERO), dict):
        raise UserError(
            f'--deepspeed_config {path} has no section "{_ZERO}"; the smallest file is {{"{_ZERO}": {{"stage": 1}}}}.'
        )
    return values


def file_problems(
    settings: dict[str, Any], wanted: dict[str, tuple[Any, str]], mode: str, compute_name: str
) -> Iterator[tuple[str, str]]:
    """The refused entries of a file's `settings`, as written there, each with the reason and what to do. `wanted`: the
    run's own values of top-level entries, and the flags that they come from.
    """
    entries = dict(settings)
    for key, value in settings.items():
        if key not in _PASSED_ON:
            yield f'"{key}"', f"{_SET_ELSEWHERE.get(key, 'it has no effect on this training')}; remove it"
        if key in _SECTIONS and not isinstance(value, dict):
            yield f'"{key}"', f"it must be a section, like {{...}}, and is {json.dumps(value)}"
        elif key in _SECTIONS:
            entries |= {f"{key}.{name}": entry for name, entry in value.items()}

    stage, stage_entry = zero_stage(mode), entries.get(f"{_ZERO}.stage")
    computed, fp32 = (None, *_DTYPE_NAMES[compute_name]), _DTYPE_NAMES["fp32"]
    doubled = ", and fp32 would double that traffic" if compute_name == "bf16" else ""
    accumulated = (
        ([*computed, *fp32], f"gradients are accumulated in {compute_name} or fp32; remove the entry")
        if stage > 1
        else (
            computed,
            "with stage 1 DeepSpeed keeps unsharded gradients in another dtype; remove the entry, or use "
            "--sharding_mode deepspeed_2 with fp32",
        )
    )
    computes = f"the run computes in {compute_name}, from --mixed_precision; remove the entry"
    accepted: dict[str, tuple[Sequence[Any], str]] = {
        key: ([value], f'this run has {value}, from {flag}; remove the entry or make it "{AUTO}"')
        for key, (value, flag) in wanted.items()
    } | {
        "bf16.enabled": ([compute_name == "bf16"], computes),
        "fp16.enabled": ([False], computes),
        "data_types.param_dtype": (computed, computes),
        "communication_data_type": (computed, f"gradients are reduced in {compute_name}{doubled}; remove the entry"),
        "data_types.grad_accum_dtype": accumulated,
        f"{_ZERO}.stage": (
            [stage],
            f"the run has --sharding_mode {mode}; use --sharding_mode deepspeed_{stage_entry} or change the file",
        ),
    }
    for key, (values, why) in accepted.items():
        if key in entries and entries[key] not in (AUTO, *values):
            yield f'"{key}": {json.dumps(entries[key])}', why
    for key, (refused, why) in _REFUSED.items():
        if entries.get(key) == refused:
            yield f'"{key}": {json.dumps(refused)}', f"{why}; remove it"
    for key in _OFFLOADING:
        value = entries.get(f"{_ZERO}.{key}")
        device = value.get("device", "none") if isinstance(value, dict) and key != "zenflow" else value
        if device not in (None, False, "none", AUTO):
            yield (
                f'"{_ZERO}.{key}"',
                "it needs an optimizer that DeepSpeed compiles; remove it and use --sharding_mode fsdp_offload instead",
            )


def _without_auto(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_auto(entry) for key, entry in value.items() if entry != AUTO}


def zero_section_problems(section: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What DeepSpeed itself refuses in the section zero_optimization, as `file_problems`."""
    load_deepspeed()
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**section)
    except ValueError as error:  # pydantic's, which lists what is wrong
        for found in error.errors():  # type: ignore[attr-defined]
            yield f'"{".".join(map(str, (_ZERO, *found["loc"])))}"', f"DeepSpeed refuses it ({found['msg']})"
