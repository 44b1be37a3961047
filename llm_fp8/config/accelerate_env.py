"""What the launcher put in the environment: how this process was started, and what `accelerate launch` asked for.

`accelerate launch --config_file x.yaml script.py` turns the file into variables. They become options of ours and are
removed: with `ACCELERATE_FP8_BACKEND` left in place Accelerate itself would convert the model, in a bf16 run too, and
with `ACCELERATE_USE_FSDP` it would shard it. `ENTRIES` says what becomes of each variable: an option, an error where
it asks for what these scripts do not do, or nothing, which a run says. The launcher also exports entries that nobody
wrote, so its defaults give way to a flag; any other flag that contradicts the file is an error. Read in Accelerate 1.15
and compared with its launcher by tests/config/test_accelerate_launch.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_fp8.config.options import Config
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.ranks import LaunchRanks

PREFIX = "ACCELERATE_FP8_"
_FILE = "accelerate's launch configuration"
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each process."""


def is_on(value: str) -> bool:
    """Whether a switch in the environment is on; ValueError for what is no switch."""
    if value.lower() not in ("1", "true", "yes", "0", "false", "no", ""):
        raise ValueError(value)
    return value.lower() in ("1", "true", "yes")


@dataclass(frozen=True)
class Entry:
    """What becomes of a variable of `accelerate launch`."""

    default: str | None = None
    """What the launcher exports where the file is silent; None: any value needs nothing done."""
    option: str | None = None
    """The option that it becomes as it is."""
    read: Callable[[str], Any] = str
    idle: str = ""
    """Why another value than the default does nothing here."""
    refused: str = ""
    """Why another value than the default is an error, and what to do."""
    te_only: bool = False
    """With fp8_config.backend AO it does nothing."""


_OVERRIDE = Entry("False", refused="Transformer Engine no longer has it; keep layers in bf16 with --fp8_bf16_modules")
_ON_GPU = Entry("none", refused="DeepSpeed keeps all on the GPU here; remove it, or use FSDP with fsdp_offload_params")
_SIZE = Entry("1", read=int)
_NOTHING_TO_DO = (
    "FSDP_MIN_NUM_PARAMS FSDP_TRANSFORMER_CLS_TO_WRAP FSDP_BACKWARD_PREFETCH FSDP_FORWARD_PREFETCH "
    "FSDP_STATE_DICT_TYPE FSDP_USE_ORIG_PARAMS FSDP_SYNC_MODULE_STATES FSDP_CPU_RAM_EFFICIENT_LOADING "
    "ACCELERATE_DEEPSPEED_ZERO3_INIT "
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL PARALLELISM_CONFIG_CP_BACKEND PARALLELISM_CONFIG_SP_BACKEND"
).split()
"""FSDP2 shards decoder layers and prefetches by itself; ranks read their shares; only checkpoints are sharded."""

ENTRIES = {
    "ACCELERATE_FP8_BACKEND": Entry("TE", read=str.upper),
    "ACCELERATE_FP8_FORMAT": Entry("HYBRID", "fp8_format", str.upper, te_only=True),
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": Entry("1024", "amax_history_len", int, te_only=True),
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": Entry("most_recent", "amax_compute_algo", str.lower, te_only=True),
    "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": Entry("False", read=is_on, te_only=True),
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": Entry("True", read=is_on),
    "ACCELERATE_FP8_MARGIN": Entry("0", idle="scales have no further headroom here"),
    "ACCELERATE_FP8_INTERVAL": Entry("1", idle="Transformer Engine no longer has it"),
    "ACCELERATE_FP8_OVERRIDE_FPROP": _OVERRIDE,
    "ACCELERATE_FP8_OVERRIDE_DGRAD": _OVERRIDE,
    "ACCELERATE_FP8_OVERRIDE_WGRAD": _OVERRIDE,
    "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": Entry("False", idle="evaluation runs in the precision of training"),
    "ACCELERATE_FP8_OPT_LEVEL": Entry("O2", idle="it belongs to backend MSAMP"),
    "ACCELERATE_FP8_PAD_INNER_DIM": Entry("True", idle="layers whose sizes would need padding stay in bf16"),
    "ACCELERATE_DYNAMO_BACKEND": Entry("no", refused="torch.compile comes with --fp8_backend torchao alone; remove it"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": Entry("auto", "gradient_accumulation_steps", int),
    "ACCELERATE_GRADIENT_CLIPPING": Entry("auto", "max_grad_norm", float),
    "FSDP_VERSION": Entry("2", refused="these scripts shard as version 2 does; set fsdp_version: 2"),
    "FSDP_SHARDING_STRATEGY": Entry("FULL_SHARD", refused="it is version 1's; set fsdp_reshard_after_forward"),
    "FSDP_RESHARD_AFTER_FORWARD": Entry("true", read=is_on),
    "FSDP_OFFLOAD_PARAMS": Entry("false", read=is_on),
    "FSDP_ACTIVATION_CHECKPOINTING": Entry("false", read=is_on),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": Entry("false", refused="recomputation is on the GPU; remove it"),
    "FSDP_AUTO_WRAP_POLICY": Entry("TRANSFORMER_BASED_WRAP", refused="decoder layers are sharded; remove it"),
    "FSDP_IGNORED_MODULES": Entry("None", refused="these scripts shard every parameter; remove it"),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": Entry("2", read=int),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": Entry("None"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": _ON_GPU,
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": _ON_GPU,
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": _SIZE,
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": _SIZE,
    "PARALLELISM_CONFIG_CP_SIZE": _SIZE,
    "PARALLELISM_CONFIG_TP_SIZE": Entry("1", refused="these scripts have no tensor parallelism; set it to 1"),
    "PARALLELISM_CONFIG_SP_SIZE": Entry("1", refused="these scripts have no sequence parallelism; set it to 1"),
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": Entry("allgather", idle="Transformer Engine passes keys round a ring"),
    **dict.fromkeys(_NOTHING_TO_DO, Entry()),
}
_PREFIXES = {"FSDP": "FSDP_", "DEEPSPEED": "ACCELERATE_DEEPSPEED_", "PARALLELISM_CONFIG": "PARALLELISM_CONFIG_"}
"""What ACCELERATE_USE_... switches on -> the prefix of its variables."""


def launch_ranks(environ: Mapping[str, str]) -> LaunchRanks:
    """What a launcher's variables say; `UserError` where they are not of one."""
    try:
        ranks = LaunchRanks.from_environment(environ)
        if not 0 <= ranks.rank < ranks.world_size:
            raise ValueError(f"RANK={ranks.rank}, WORLD_SIZE={ranks.world_size}")
    except ValueError as error:
        raise UserError(f"no launcher sets WORLD_SIZE, RANK and their like so ({error}); unset them.") from error
    return ranks


def require_single_process(environ: MutableMapping[str, str]) -> None:
    """Raise `UserError` where the launcher asks for more than the one process and device of train_fp8.py. A launcher's
    variables that are left over, so not all of them, are removed: with them Accelerate would look for a process group.
    """
    asked = [name for name in ("FSDP", "DEEPSPEED") if is_on(environ.get(f"ACCELERATE_USE_{name}", ""))]
    if launch_ranks(environ).world_size > 1 or asked:
        what = " ".join(asked) or f"{environ['WORLD_SIZE']} processes"
        raise UserError(
            f"train_fp8.py trains in one process, and the launcher asks for {what}; use train_multi_gpu.py."
        )
    if not environ.keys() >= set(_TORCHRUN):
        for name in _TORCHRUN:
            environ.pop(name, None)


def require_launched(environ: Mapping[str, str]) -> None:
    """Raise `UserError` where variables that torchrun sets for a process of train_multi_gpu.py are missing."""
    if missing := [name for name in _TORCHRUN if name not in environ]:
        raise UserError(
            f"train_multi_gpu.py needs a launcher, which starts its processes and sets {', '.join(missing)}: torchrun "
            "--nproc_per_node=NUMBER_OF_GPUS train_multi_gpu.py ... (for one GPU: train_fp8.py)."
        )


def apply_launch_settings(
    config: Config, environ: MutableMapping[str, str], given: Collection[str] = frozenset()
) -> tuple[Config, list[str]]:
    """`config`, unchecked, completed by what `accelerate launch` asked for, whose variables are removed from `environ`;
    and a sentence for each entry that does nothing here.

    `given` names options that were given, even with their default. Raises `UserError` for what cannot be honoured and
    for a flag that contradicts it.
    """
    ranks = launch_ranks(environ)
    is_multi_gpu = "ACCELERATE_DYNAMO_BACKEND" in environ and ranks.world_size > 1
    found, idle = _take(environ)
    flags, unset = ({key: value for part in vars(each).values() for key, value in vars(part).items()}
                    for each in (config, Config()))  # fmt: skip
    settings = _sharding(found, ranks)
    weak = {entry.option for name, entry in ENTRIES.items() if is_default(name, found.get(name))} | {"fp8_params"}
    if is_multi_gpu and "sharding_mode" not in settings:
        settings["sharding_mode"] = "ddp"
        weak.add("sharding_mode")
    mode = settings.get("sharding_mode") if flags["sharding_mode"] == "auto" else flags["sharding_mode"]
    settings |= _precision(found, mode, flags["fp8_scenario"])
    for name, asked in list(settings.items()):
        if name in given or flags[name] != unset[name]:
            del settings[name]
            agrees = flags[name] == asked or (name == "gradient_checkpointing" and flags[name] > 0)
            if not agrees and name not in weak:
                raise UserError(f"--{name} {flags[name]} contradicts {_FILE}, which asks for {asked}; change one.")
    sections = {
        name: dataclasses.replace(section, **{key: settings[key] for key in vars(section) if key in settings})
        for name, section in vars(config).items()
    }
    return Config(**sections), idle


def _take(environ: MutableMapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What was asked for: `ENTRIES` of what is switched on, the engines, and the precision; and what is said of entries
    without effect. Everything is removed from `environ`.
    """
    found = {"precision": environ.pop("ACCELERATE_MIXED_PRECISION", "no").lower()}
    switched = {name: is_on(environ.pop(f"ACCELERATE_USE_{name}", "")) for name in (*_PREFIXES, "MEGATRON_LM")}
    prefixes = {PREFIX: found["precision"] == "fp8", "ACCELERATE_DYNAMO_BACKEND": True, "ACCELERATE_GRADIENT_": True}
    prefixes |= {prefix: switched[name] for name, prefix in _PREFIXES.items()}
    if switched["MEGATRON_LM"] or (switched["FSDP"] and switched["DEEPSPEED"]):
        raise UserError(f"{_FILE} asks for Megatron-LM, or for FSDP and DeepSpeed at once; take one of the latter.")
    environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)  # entries of the file, for Accelerate's own checks
    idle = []
    by_torchao = environ.get("ACCELERATE_FP8_BACKEND", "").upper() == "AO"
    for variable in [name for name in environ if name.startswith((*prefixes, "ACCELERATE_DYNAMO_"))]:
        value, entry, key = environ.pop(variable), ENTRIES.get(variable), _key(variable)
        if not any(variable.startswith(prefix) and is_used for prefix, is_used in prefixes.items()):
            continue
        found[variable] = value
        if entry is None:
            idle.append(f"{key} does nothing here: these scripts do not know it.")
        elif not is_default(variable, value) and entry.refused:
            raise UserError(f"{_FILE} sets {key} to {value}: {entry.refused}.")
        elif not is_default(variable, value) and (entry.idle or (entry.te_only and by_torchao)):
            idle.append(f"{key} does nothing here: {entry.idle or 'it belongs to backend TE'}.")
    return found | {name: "true" for name, is_used in switched.items() if is_used}, idle


def is_default(variable: str, value: str | None) -> bool:
    """Whether a value is the launcher's default, which writes true as 1 and the file's as True."""
    plain, default = {"1": "true"}, ENTRIES[variable].default
    if value is None or default is None:
        return True
    return plain.get(value.lower(), value.lower()) == plain.get(default.lower(), default.lower())


def _key(variable: str) -> str:
    """What a variable is called in the file."""
    return variable.replace(PREFIX, "fp8_config.").removeprefix("ACCELERATE_").removeprefix("DEEPSPEED_").lower()


def _read(found: Mapping[str, str], variable: str) -> Any:
    """An entry's value, the launcher's default where it is not set; `UserError` where it cannot be read."""
    value = found.get(variable, str(ENTRIES[variable].default))
    try:
        return ENTRIES[variable].read(value)
    except ValueError:
        raise UserError(f"{_FILE} sets {_key(variable)} to '{value}', which cannot be read.") from None


def _precision(found: Mapping[str, str], mode: str | None, scenario: str) -> dict[str, Any]:
    """Options of precision; `mode` and `scenario` are those of the run."""
    if found["precision"] != "fp8":
        return {} if found["precision"] == "no" else {"mixed_precision": found["precision"]}
    backend = _read(found, "ACCELERATE_FP8_BACKEND")
    settings: dict[str, Any] = {"mixed_precision": "fp8"}
    if backend == "AO":
        settings["fp8_backend"] = "torchao"
        if mode in ("fsdp_full", "fsdp_grad") and scenario in ("default", "tensorwise"):
            settings["fp8_params"] = _read(found, "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER")
        return settings
    if backend != "TE":
        raise UserError(f"{_FILE} sets fp8_config.backend to {backend}; set TE or AO (torchao).")
    if _read(found, "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"):
        settings["fp8_scenario"] = scenario = "mxfp8"
    for variable, entry in ENTRIES.items():
        # The launcher's defaults for delayed scaling, and "max" of configs/, mean nothing with another recipe.
        is_chosen = not is_default(variable, found.get(variable)) and found[variable] != "max"
        if entry.te_only and entry.option and variable in found and (is_chosen or scenario in ("default", "delayed")):
            settings[entry.option] = _read(found, variable)
    return settings


def _sharding(found: Mapping[str, str], ranks: LaunchRanks) -> dict[str, Any]:
    """Options of sharding, accumulation and clipping."""
    settings: dict[str, Any] = {}
    if "FSDP" in found:
        reshards, offloads = _read(found, "FSDP_RESHARD_AFTER_FORWARD"), _read(found, "FSDP_OFFLOAD_PARAMS")
        if offloads and not reshards:
            raise UserError(f"{_FILE} sets fsdp_offload_params, which needs fsdp_reshard_after_forward: true.")
        settings["sharding_mode"] = "fsdp_offload" if offloads else "fsdp_full" if reshards else "fsdp_grad"
        if _read(found, "FSDP_ACTIVATION_CHECKPOINTING"):
            settings["gradient_checkpointing"] = 1
    if "DEEPSPEED" in found:
        file, stage = _read(found, "ACCELERATE_DEEPSPEED_CONFIG_FILE"), _read(found, "ACCELERATE_DEEPSPEED_ZERO_STAGE")
        if file != "None":
            settings["deepspeed_config"] = file
            stage = (read_json(Path(file)).get("zero_optimization") or {}).get("stage")
        if stage not in (1, 2, 3):
            raise UserError(f"{_FILE if file == 'None' else file} sets ZeRO stage {stage}; the stages here are 1 to 3.")
        settings["sharding_mode"] = f"deepspeed_{stage}"
    if "PARALLELISM_CONFIG" in found:
        settings |= _mesh(found, settings.get("sharding_mode"), ranks)
    for variable in ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "ACCELERATE_GRADIENT_CLIPPING"):
        if found.get(variable, "auto") != "auto":
            settings[str(ENTRIES[variable].option)] = _read(found, variable)
    return settings


def _mesh(found: Mapping[str, str], mode: str | None, ranks: LaunchRanks) -> dict[str, Any]:
    """Options from the sizes of parallelism_config; `mode` is what the rest of the file asks for."""
    names = ("dp_replicate_size", "dp_shard_size", "cp_size")
    replicate, shard, context = sizes = [_read(found, f"PARALLELISM_CONFIG_{name.upper()}") for name in names]
    if mode is None and shard == context == 1:
        return {"sharding_mode": "ddp"} if replicate > 1 else {}
    if sizes == [1, 1, 1]:
        return {}
    replicates_over_hosts = replicate == 1 or (mode == "fsdp_full" and shard * context == ranks.local_world_size)
    if not str(mode).startswith("fsdp") or replicate * shard * context != ranks.world_size or not replicates_over_hosts:
        raise UserError(
            f"{_FILE} has parallelism_config {dict(zip(names, sizes, strict=True))}; its sizes must multiply to the "
            f"{ranks.world_size} processes and need distributed_type: FSDP, and dp_replicate_size above 1 copies the "
            f"model over hosts of {ranks.local_world_size} GPUs, fully sharded in each."
        )
    return {"sharding_mode": "fsdp_hybrid" if replicate > 1 else mode} | (
        {"context_parallel_size": context} if context > 1 else {}
    )
