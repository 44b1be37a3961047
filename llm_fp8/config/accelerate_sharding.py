"""What `accelerate launch` asked for in sharding, as options of ours. Taken from the environment, so that Accelerate
itself does none of it.

    FSDP                fsdp_full; fsdp_grad with reshard_after_forward: false (version 1: SHARD_GRAD_OP); fsdp_offload
                        with offload_params; ddp with version 1's NO_SHARD; fsdp_hybrid with its HYBRID_SHARD
    DEEPSPEED           deepspeed_1, _2 or _3 from zero_stage, or from the DeepSpeed file
    parallelism_config  fsdp_hybrid with dp_replicate_size, --context_parallel_size with cp_size

The launcher exports most entries also when nobody wrote them, so its defaults count as nothing said; version 1 is one
of them, and what it says of sharding is done by FSDP2. Entries about how Accelerate does things (prefetching, loading,
the form of its checkpoints) are dropped: `DROPPED` says why. The rest is an error that names the entry as the
configuration file has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from llm_fp8.utils.errors import UserError

_SOURCE = "accelerate's launch configuration"
_TRUE = ("1", "true", "yes", "on", "y", "t")
_FALSE = ("0", "false", "no", "off", "n", "f", "")
_NOTHING = ("", "none", "None")

_ENGINES = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
_FSDP1_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""In the order of torch's enumeration, whose numbers, from 1, the launcher takes too."""
_FSDP1_MODES = {
    "FULL_SHARD": "fsdp_full",
    "SHARD_GRAD_OP": "fsdp_grad",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "fsdp_hybrid",
}
_LAYER_ENDINGS = ("DecoderLayer", "TransformerLayer")
_ZERO_STAGES = (1, 2, 3)
_DEFAULT_ZERO_STAGE = "2"
"""Accelerate's, where neither the file nor a flag of the launcher says one."""

DROPPED = {
    "FSDP_MIN_NUM_PARAMS": "belongs to size-based wrapping, which is refused",
    "FSDP_BACKWARD_PREFETCH": "FSDP2 prefetches by itself",
    "FSDP_FORWARD_PREFETCH": "FSDP2 prefetches by itself",
    "FSDP_USE_ORIG_PARAMS": "FSDP2 always does",
    "FSDP_SYNC_MODULE_STATES": "each rank reads its own share of the weights",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "each rank reads its own share of the weights",
    "FSDP_STATE_DICT_TYPE": "checkpoints are always sharded, the exported model always whole",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "weights are loaded whole, in bf16 to each GPU, and split afterwards",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "the model is exported in any case",
    "ACCELERATE_CONFIG_DS_FIELDS": "lists entries of the file for Accelerate's own checks",
    "PARALLELISM_CONFIG_CP_BACKEND": "context parallelism is Transformer Engine's",
    "PARALLELISM_CONFIG_SP_BACKEND": "sequence parallelism is refused",
}
"""Variables that need nothing done, and why."""


def is_on(value: str, name: str) -> bool:
    """A yes-or-no value of the launcher's; `name` is the entry's, for the error."""
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise UserError(f"{_SOURCE} sets {name} to '{value}', which is neither true nor false.")


def whole_number(value: str, name: str) -> int:
    """An integer of the launcher's; `name` is the entry's, for the error."""
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{_SOURCE} sets {name} to '{value}', which is not a whole number.") from None


def take_sharding_settings(environ: MutableMapping[str, str]) -> dict[str, Any]:
    """Remove Accelerate's variables about sharding from `environ` and return them as options (of any section of
    `Config`).

    Empty where nothing was asked for. Raises `UserError` for what cannot be honoured; the variables are gone then too.
    """
    asked = {
        engine
        for engine in _ENGINES
        if is_on(environ.pop(f"ACCELERATE_USE_{engine}", "false"), f"use_{engine.lower()}")
    }
    fsdp = _take(environ, "FSDP_")
    deepspeed = _take(environ, "ACCELERATE_DEEPSPEED_")
    parallelism = _take(environ, "PARALLELISM_CONFIG_")
    _take(environ, "MEGATRON_LM_")
    environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    accumulation = environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    clipping = environ.pop("ACCELERATE_GRADIENT_CLIPPING", "auto")
    if "MEGATRON_LM" in asked:
        raise UserError(
            f"{_SOURCE} asks for Megatron-LM, which these scripts do not use; take FSDP, DEEPSPEED or MULTI_GPU as "
            "distributed_type."
        )
    if {"FSDP", "DEEPSPEED"} <= asked:
        raise UserError(f"{_SOURCE} asks for FSDP and DeepSpeed at once; choose one.")
    settings: dict[str, Any] = {}
    if "FSDP" in asked:
        settings.update(_fsdp_settings(fsdp))
    if "DEEPSPEED" in asked:
        settings.update(_deepspeed_settings(deepspeed))
    if "PARALLELISM_CONFIG" in asked:
        settings.update(_mesh_settings(parallelism, settings.get("sharding_mode"), int(environ.get("WORLD_SIZE", "1"))))
    if accumulation != "auto":
        settings["gradient_accumulation_steps"] = whole_number(accumulation, "gradient_accumulation_steps")
    if clipping != "auto":
        settings["max_grad_norm"] = _real_number(clipping, "gradient_clipping")
    return settings


def _take(environ: MutableMapping[str, str], prefix: str) -> dict[str, str]:
    """Remove the variables with `prefix`; returned by full name, without those of `DROPPED`."""
    taken = {name: environ.pop(name) for name in sorted(environ) if name.startswith(prefix)}
    return {name: value for name, value in taken.items() if name not in DROPPED}


def _refuse_rest(rest: dict[str, str]) -> None:
    for name, value in rest.items():
        raise UserError(f"{_SOURCE} sets {name} to '{value}', which these scripts do not know; remove the entry.")


def _real_number(value: str, name: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise UserError(f"{_SOURCE} sets {name} to '{value}', which is not a number.") from None


def _fsdp_settings(entries: dict[str, str]) -> dict[str, Any]:
    mode = _fsdp_mode(entries)
    wrap = entries.pop("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    if wrap.upper() != "TRANSFORMER_BASED_WRAP":
        raise UserError(
            f"{_SOURCE} sets fsdp_auto_wrap_policy to {wrap}, and these scripts always shard by decoder layer; remove "
            "it, or set TRANSFORMER_BASED_WRAP."
        )
    for name in entries.pop("FSDP_TRANSFORMER_CLS_TO_WRAP", "").split(","):
        if name.strip() not in _NOTHING and not name.strip().endswith(_LAYER_ENDINGS):
            raise UserError(
                f"{_SOURCE} names {name.strip()} in fsdp_transformer_layer_cls_to_wrap, and these scripts shard by "
                "decoder layer and nothing else; remove it."
            )
    if is_on(entries.pop("FSDP_OFFLOAD_PARAMS", "false"), "fsdp_offload_params"):
        if mode != "fsdp_full":
            raise UserError(
                f"{_SOURCE} sets fsdp_offload_params together with what is {mode} here, and offloading goes with "
                "fully sharded parameters only; set fsdp_reshard_after_forward: true (version 1: FULL_SHARD), or turn "
                "offloading off."
            )
        mode = "fsdp_offload"
    if is_on(entries.pop("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "false"), "fsdp_activation_checkpointing_offload"):
        raise UserError(
            f"{_SOURCE} sets fsdp_activation_checkpointing_offload, which these scripts do not have; set it to false "
            "(--gradient_checkpointing recomputes activations on the GPU)."
        )
    settings: dict[str, Any] = {"sharding_mode": mode}
    if is_on(entries.pop("FSDP_ACTIVATION_CHECKPOINTING", "false"), "fsdp_activation_checkpointing"):
        settings["gradient_checkpointing"] = True
    if entries.pop("FSDP_IGNORED_MODULES", "None") not in _NOTHING:
        raise UserError(f"{_SOURCE} sets fsdp_ignored_modules, and these scripts shard every parameter; remove it.")
    _refuse_rest(entries)
    return settings


def _fsdp_mode(entries: dict[str, str]) -> str:
    """The mode that version, strategy and resharding stand for; takes them out of `entries`."""
    version = whole_number(entries.pop("FSDP_VERSION", "1"), "fsdp_version")
    strategy = entries.pop("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    if strategy.isdigit() and 1 <= int(strategy) <= len(_FSDP1_STRATEGIES):
        strategy = _FSDP1_STRATEGIES[int(strategy) - 1]
    reshards = is_on(entries.pop("FSDP_RESHARD_AFTER_FORWARD", "true"), "fsdp_reshard_after_forward")
    if version == 2:
        if strategy != "FULL_SHARD":
            raise UserError(
                f"{_SOURCE} sets fsdp_sharding_strategy to {strategy}, which belongs to fsdp_version 1; with version "
                "2 fsdp_reshard_after_forward says whether parameters are sharded too (true) or gradients and "
                "optimizer only (false)."
            )
        return "fsdp_full" if reshards else "fsdp_grad"
    if version != 1:
        raise UserError(f"{_SOURCE} sets fsdp_version to {version}; these scripts know 1 and 2.")
    if not reshards:
        raise UserError(
            f"{_SOURCE} sets fsdp_reshard_after_forward: false, which belongs to fsdp_version 2; add 'fsdp_version: "
            "2', or use fsdp_sharding_strategy: SHARD_GRAD_OP."
        )
    if strategy not in _FSDP1_MODES:
        raise UserError(
            f"{_SOURCE} sets fsdp_sharding_strategy to {strategy}, which these scripts do not have; choose one of "
            f"{', '.join(_FSDP1_MODES)}."
        )
    return _FSDP1_MODES[strategy]


def _deepspeed_settings(entries: dict[str, str]) -> dict[str, Any]:
    """Options from the ACCELERATE_DEEPSPEED_ variables; with a DeepSpeed file the stage is the file's."""
    entries = {name.removeprefix("ACCELERATE_DEEPSPEED_"): value for name, value in entries.items()}
    for name in [name for name in entries if name.startswith("OFFLOAD_")]:
        value = entries.pop(name)
        if value not in _NOTHING:
            raise UserError(
                f"{_SOURCE} sets {name.lower()} to {value}, and the deepspeed modes keep everything on the GPU; "
                "remove it, or use distributed_type: FSDP with fsdp_offload_params: true."
            )
    if entries.pop("MOE_LAYER_CLS_NAMES", "None") not in _NOTHING:
        raise UserError(
            f"{_SOURCE} sets deepspeed_moe_layer_cls_names, and these scripts train dense models only; remove it."
        )
    settings: dict[str, Any] = {}
    stage = whole_number(entries.pop("ZERO_STAGE", _DEFAULT_ZERO_STAGE), "zero_stage")
    file = entries.pop("CONFIG_FILE", "none")
    if file not in _NOTHING:
        settings["deepspeed_config"] = file
        stage = _zero_stage_of_file(file)
    if stage not in _ZERO_STAGES:
        raise UserError(
            f"{file if settings else _SOURCE} sets ZeRO stage {stage}, and the deepspeed modes are stages 1 to 3; for "
            "stage 0, which shards nothing, use distributed_type: MULTI_GPU."
        )
    _refuse_rest(entries)
    return {**settings, "sharding_mode": f"deepspeed_{stage}"}


def _zero_stage_of_file(path: str) -> int:
    """`zero_optimization.stage` of a DeepSpeed file, whose other entries the engine checks."""
    try:
        return int(json.loads(Path(path).read_text(encoding="utf-8"))["zero_optimization"]["stage"])
    except OSError as error:
        raise UserError(
            f"{_SOURCE} names deepspeed_config_file {path}, which cannot be read: {error.strerror}."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{_SOURCE} names deepspeed_config_file {path}, which must be JSON whose zero_optimization.stage is 1, 2 "
            "or 3."
        ) from error


def _mesh_settings(entries: dict[str, str], mode: str | None, num_processes: int) -> dict[str, Any]:
    """Options from the PARALLELISM_CONFIG_ variables; `mode` is what the rest of the file asks for."""
    sizes = {
        name: whole_number(entries.pop(f"PARALLELISM_CONFIG_{name.upper()}", "1"), f"parallelism_config_{name}")
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
    }
    replicate, shard, context = sizes["dp_replicate_size"], sizes["dp_shard_size"], sizes["cp_size"]
    for name, what in (("tp_size", "tensor"), ("sp_size", "DeepSpeed's sequence")):
        if sizes[name] != 1:
            raise UserError(
                f"{_SOURCE} sets parallelism_config_{name} to {sizes[name]}, and these scripts have no {what} "
                "parallelism; set it to 1."
            )
    strategy = entries.pop("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "allgather")
    if context > 1 and strategy != "allgather":
        raise UserError(
            f"{_SOURCE} sets parallelism_config_cp_comm_strategy to {strategy}, and context parallelism here "
            "exchanges keys and values in Transformer Engine's way; remove it."
        )
    entries = {name: value for name, value in entries.items() if not name.startswith("PARALLELISM_CONFIG_SP_")}
    _refuse_rest(entries)
    total = math.prod(sizes.values())
    if total == 1:
        return {}
    told = ", ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
    if total != num_processes:
        raise UserError(
            f"{_SOURCE} has parallelism_config {told}, {total} processes together, and {num_processes} were started."
        )
    if mode is None and replicate == total:
        return {"sharding_mode": "ddp"}
    if mode is None or not mode.startswith("fsdp"):
        raise UserError(
            f"{_SOURCE} has parallelism_config {told}, which needs distributed_type: FSDP with fsdp_version: 2."
        )
    settings: dict[str, Any] = {"context_parallel_size": context} if context > 1 else {}
    if replicate > 1:
        if shard == 1:
            raise UserError(
                f"{_SOURCE} has parallelism_config {told}, which leaves FSDP nothing to shard over; raise "
                "dp_shard_size, or set dp_replicate_size to 1."
            )
        if mode not in ("fsdp_full", "fsdp_hybrid"):
            raise UserError(
                f"{_SOURCE} has parallelism_config dp_replicate_size {replicate} together with what is {mode} here, "
                "and replication goes with fully sharded parameters on the GPU only; set fsdp_reshard_after_forward: "
                "true and fsdp_offload_params: false."
            )
        # Accelerate, too, shards over the product of the two dimensions.
        settings.update(sharding_mode="fsdp_hybrid", hybrid_shard_size=shard * context)
    return settings
