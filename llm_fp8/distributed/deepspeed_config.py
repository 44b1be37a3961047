"""The DeepSpeed file of a run: read, checked against the run's options, completed.

The file of --deepspeed_config says how ZeRO communicates and stores (bucket sizes, overlap, thresholds). Batch,
precision, optimizer, schedule and clipping come from the scripts' options: an entry that repeats them, or "auto", is
accepted; one that contradicts them or has no effect is refused. Elsewhere "auto" is DeepSpeed's default.

Reading and checking need no GPU and no process group.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from llm_fp8.config.options import Config
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import DEEPSPEED, REPOSITORY

AUTO = "auto"
_ZERO = "zero_optimization"

_DTYPE_NAMES = {"fp32": ("fp32", "float32", "torch.float32"), "bf16": ("bf16", "bfloat16", "torch.bfloat16")}
"""How DeepSpeed's file may spell the dtypes in which a run computes."""

_PASSED_ON = {
    _ZERO,
    "bf16",
    "fp16",
    "communication_data_type",
    "data_types",
    "prescale_gradients",
    "gradient_predivide_factor",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_allow_untested_optimizer",
    "checkpoint",
    "comms_logger",
    "flops_profiler",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "steps_per_print",
}
"""Accepted top-level keys."""

_REMEDIES = {
    "fp8": "fp8 is Transformer Engine's here; remove the section and use --mixed_precision fp8 and --fp8_scenario",
    "msamp": "MS-AMP is not used here; remove the section and use --mixed_precision fp8",
    "amp": "precision comes from --mixed_precision; remove the section",
    "torch_autocast": "precision comes from --mixed_precision; remove the section",
    "optimizer": "the optimizer is AdamW from --learning_rate, --weight_decay, --adam_beta1, --adam_beta2 and "
    "--adam_epsilon; remove the section",
    "scheduler": "the schedule comes from --lr_scheduler and --num_warmup_steps; remove the section",
    "activation_checkpointing": "recomputation comes from --gradient_checkpointing; remove the section",
    "tensorboard": "trackers come from --report_to; remove the section",
    "wandb": "trackers come from --report_to; remove the section",
}
"""What to do about other keys."""

_COMPILED = "it needs operators that DeepSpeed compiles; remove it"
_ZERO_REFUSED = {
    "load_from_fp32_weights": (False, "a resumed run would lose what bf16 weights cannot hold; remove it"),
    "compute_grad_norm": (False, "every step reports the gradient norm; remove it"),
    "zero_quantized_weights": (True, _COMPILED),
    "zero_quantized_nontrainable_weights": (True, _COMPILED),
    "zero_quantized_gradients": (True, _COMPILED),
}
"""Refused values of the section zero_optimization, and why."""

_FLAGS = {
    "train_micro_batch_size_per_gpu": "--batch_size",
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "train_batch_size": "--batch_size, --gradient_accumulation_steps and the number of processes",
    "gradient_clipping": "--max_grad_norm",
}

_OFFLOADING = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "zenflow")


def file_of(named: str | None, mode: str) -> Path:
    """The file `named` by --deepspeed_config; without one the mode's own."""
    return Path(named) if named else REPOSITORY / "configs" / f"ds_z{zero_stage(mode)}.json"


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
    """What DeepSpeed is given: the checked file with the run's own values filled in.

    Args:
        compute_name: the dtype of everything that is not fp8: fp32 or bf16.
        num_processes: of all hosts.

    Raises:
        UserError: DeepSpeed or the file is missing, or the file is no JSON, contradicts the run or has an entry without
            effect.
    """
    load_deepspeed()
    path = file_of(config.parallel.deepspeed_config, mode)
    settings = read_file(path)
    batch_size, steps = config.data.batch_size, config.optim.gradient_accumulation_steps
    wanted = {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_accumulation_steps": steps,
        "train_batch_size": batch_size * steps * num_processes,
        "gradient_clipping": config.optim.max_grad_norm,
    }
    for key, why in file_problems(settings, wanted, mode, compute_name):
        raise UserError(f"--deepspeed_config {path}, {key}: {why}.")
    settings = _without_auto(settings) | wanted
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
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--deepspeed_config {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"--deepspeed_config {path} is not valid JSON: {error}.") from error
    if not isinstance(values, dict) or not isinstance(values.get(_ZERO), dict):
        raise UserError(
            f'--deepspeed_config {path} has no section "{_ZERO}"; the smallest file is {{"{_ZERO}": {{"stage": 1}}}}.'
        )
    return values


def file_problems(
    settings: dict[str, Any], wanted: dict[str, Any], mode: str, compute_name: str
) -> Iterator[tuple[str, str]]:
    """The refused entries of a file's `settings`, as they are written there, each with the reason and what to do.

    `wanted`: top-level entries whose values are the run's.
    """
    for key, value in settings.items():
        if key not in _PASSED_ON:
            yield f'"{key}"', _REMEDIES.get(key, "it has no effect on this training; remove it")
        if key in wanted and value not in (AUTO, wanted[key]):
            yield (
                f'"{key}": {json.dumps(value)}',
                f'this run has {wanted[key]}, from {_FLAGS[key]}; remove the entry or make it "{AUTO}"',
            )
    no_sections = [
        name for name in (_ZERO, "bf16", "fp16", "data_types") if not isinstance(settings.get(name, {}), dict)
    ]
    for name in no_sections:
        yield f'"{name}"', f"it must be a section, like {{...}}, and is {json.dumps(settings[name])}"
    settings = {key: value for key, value in settings.items() if key not in no_sections}
    yield from _dtype_problems(settings, zero_stage(mode), compute_name)
    zero = settings.get(_ZERO, {})
    stage = zero.get("stage", AUTO)
    if stage not in (AUTO, zero_stage(mode)):
        yield (
            f'"{_ZERO}.stage": {json.dumps(stage)}',
            f"the run has --sharding_mode {mode}; use --sharding_mode deepspeed_{stage} or change the file",
        )
    for key in _OFFLOADING:
        value = zero.get(key)
        device = value.get("device", "none") if isinstance(value, dict) and key != "zenflow" else value
        if device not in (None, False, "none", AUTO):
            yield (
                f'"{_ZERO}.{key}"',
                "it needs an optimizer that DeepSpeed compiles; remove it and use --sharding_mode fsdp_offload instead",
            )
    for key, (value, why) in _ZERO_REFUSED.items():
        if zero.get(key) is value:
            yield f'"{_ZERO}.{key}": {json.dumps(value)}', why


def _dtype_problems(settings: dict[str, Any], stage: int, compute_name: str) -> Iterator[tuple[str, str]]:
    """Everything in the file that names a dtype."""
    asked = f"the run computes in {compute_name}, from --mixed_precision"
    for name in ("bf16", "fp16"):
        enabled = settings.get(name, {}).get("enabled", AUTO)
        if enabled not in (AUTO, name == compute_name):
            yield f'"{name}.enabled": {json.dumps(enabled)}', f'{asked}; remove the entry or make it "{AUTO}"'
    for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if settings.get("bf16", {}).get(key) is True:
            yield f'"bf16.{key}": true', "small updates would be rounded away without fp32 master weights; remove it"
    computed, fp32 = _DTYPE_NAMES[compute_name], _DTYPE_NAMES["fp32"]
    data_types = settings.get("data_types", {})
    accumulation = (
        "with stage 1 DeepSpeed keeps unsharded fp32 gradients on every GPU under another optimizer; remove the entry, "
        "or use --sharding_mode deepspeed_2, which keeps its shard only"
        if stage == 1
        else f"gradients are accumulated in {compute_name} or fp32; remove the entry"
    )
    for key, value, accepted, why in (
        (
            "communication_data_type",
            settings.get("communication_data_type"),
            computed,
            f"gradients are reduced in {compute_name} (fp32 would double bf16's traffic); remove the entry",
        ),
        ("data_types.param_dtype", data_types.get("param_dtype"), computed, f"{asked}; remove the entry"),
        (
            "data_types.grad_accum_dtype",
            data_types.get("grad_accum_dtype"),
            computed if stage == 1 else (*computed, *fp32),
            accumulation,
        ),
    ):
        if value not in (AUTO, None, *accepted):
            yield f'"{key}": {json.dumps(value)}', why


def _without_auto(value: Any) -> Any:
    """`value` without the entries that are "auto", at any depth."""
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
