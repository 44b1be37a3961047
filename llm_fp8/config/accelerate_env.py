"""What the launcher put in the environment: how this process was started, and what `accelerate launch` asked for.

`accelerate launch --config_file x.yaml script.py` turns the file into variables. They become options of ours and are
removed: with `ACCELERATE_FP8_BACKEND` left in place Accelerate itself would convert the model, in a bf16 run too, and
with `ACCELERATE_USE_FSDP` it would shard it.

    FSDP                fsdp_full; fsdp_grad with reshard_after_forward: false (version 1: SHARD_GRAD_OP); fsdp_offload
                        with offload_params; ddp with version 1's NO_SHARD; fsdp_hybrid with its HYBRID_SHARD
    DEEPSPEED           deepspeed_1, _2 or _3 from zero_stage, or from the DeepSpeed file
    parallelism_config  fsdp_hybrid with dp_replicate_size, --context_parallel_size with cp_size
    fp8_config          `FP8_KEYS`

Three tables say what becomes of an entry: `FP8_KEYS`, `_SHARDING_ENTRIES` and `DROPPED`. An entry that none of them
knows is an error, in fp8_config a warning. The launcher also exports entries that nobody wrote, so its defaults count
as not given. A flag that contradicts the file is an error; plain MULTI_GPU means `--sharding_mode ddp` only where that
flag is not given. Read in Accelerate 1.15 and Transformer Engine 2.20, and compared with Accelerate's code by
`tests/config/test_accelerate_fp8_keys.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from llm_fp8.config.options import FP8_GATHER_MODES, Config
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.ranks import LaunchRanks

PREFIX = "ACCELERATE_FP8_"
_SOURCE = "accelerate's launch configuration"

Section = TypeVar("Section")

# ---- how an entry's text is read ----


def _truth(value: str) -> bool:
    if value.lower() in ("1", "true", "yes", "on", "y", "t"):
        return True
    if value.lower() in ("0", "false", "no", "off", "n", "f", ""):
        return False
    raise ValueError(value)


def _text(value: str) -> str:
    return "" if value in ("none", "None") else value


def _not_decoder_layers(value: str) -> str:
    """The class names in a list that are not those of decoder layers."""
    classes = (_text(part.strip()) for part in value.split(","))
    return ", ".join(each for each in classes if each and not each.endswith(("DecoderLayer", "TransformerLayer")))


_WRONG = {_truth: "neither true nor false", int: "not a whole number", float: "not a number"}


def _parsed(read: Callable[[str], Any], value: str, name: str) -> Any:
    """What `read` makes of the `value` of the entry `name`; `UserError` where it cannot."""
    try:
        return read(value)
    except ValueError:
        raise UserError(f"{_SOURCE} sets {name} to '{value}', which is {_WRONG[read]}.") from None


def is_on(value: str, name: str) -> bool:
    return bool(_parsed(_truth, value, name))


_FSDP1_MODES = {
    "FULL_SHARD": "fsdp_full",
    "SHARD_GRAD_OP": "fsdp_grad",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "fsdp_hybrid",
    "HYBRID_SHARD_ZERO2": None,
}
"""In the order of torch's enumeration, whose numbers, from 1, the launcher takes too; None: refused."""


def _strategy(value: str) -> str:
    numbered = {str(number): strategy for number, strategy in enumerate(_FSDP1_MODES, start=1)}
    return numbered.get(value, value.upper())


# ---- tables of entries ----


@dataclass(frozen=True)
class Fp8Key:
    """A key of fp8_config that Accelerate's launcher or recipes know."""

    name: str
    default: str | None
    """What the launcher exports where the file does not name the key; None: nothing."""
    idle_with_te: str | None = None
    """Why the scripts do nothing with it under backend TE; None where they act on it or refuse it."""
    idle_with_torchao: str | None = None
    """The same under backend AO."""
    option: str | None = None
    """Field of `PrecisionConfig` that it becomes with backend TE. A recipe of Transformer Engine has it as `name`."""
    read: Callable[[str], Any] = int
    te_only: bool = False
    """With backend AO an error unless it has the launcher's default; a switch without a default must be off."""
    parts: tuple[str, ...] = ()
    """What its variables are called behind the prefix, where it becomes several."""

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(PREFIX + part for part in self.parts or (self.name.removeprefix("fp8_").upper(),))


_OF_TE, _OF_AO, _OF_MSAMP = (f"it belongs to backend {name}" for name in ("TE", "AO", "MSAMP"))
_OVERRIDE = ("OVERRIDE_FPROP", "OVERRIDE_DGRAD", "OVERRIDE_WGRAD")
_EVALUATION = "evaluation runs in the precision of training in any case"
_PADDING = "layers whose sizes would need padding stay in bf16 in any case"

FP8_KEYS = (
    Fp8Key("backend", None),
    Fp8Key("fp8_format", "HYBRID", option="fp8_format", read=str.upper, te_only=True),
    Fp8Key("amax_history_len", "1024", option="amax_history_len", te_only=True),
    Fp8Key("amax_compute_algo", "most_recent", option="amax_compute_algo", read=str.lower, te_only=True),
    Fp8Key("margin", "0", "scales have no further headroom here", _OF_TE),
    Fp8Key("interval", "1", "Transformer Engine no longer has it", _OF_TE),
    Fp8Key("override_linear_precision", "False", parts=_OVERRIDE, te_only=True),
    Fp8Key("use_autocast_during_eval", "False", _EVALUATION, _EVALUATION),
    Fp8Key("use_mxfp8_block_scaling", None, te_only=True),
    Fp8Key("opt_level", "O2", _OF_MSAMP, _OF_MSAMP),
    Fp8Key("pad_inner_dim", "1", _OF_AO, _PADDING),
    Fp8Key("enable_fsdp_float8_all_gather", "1", _OF_AO),
)
_FP8_KEY_OF = {variable: key for key in FP8_KEYS for variable in key.variables}
_FP8_DEFAULTS = {key.option: key.read(key.default or "") for key in FP8_KEYS if key.option}
"""Option -> what it would be by what the launcher exports where the file is silent."""


_BY_LAYER = "these scripts always shard by decoder layer; remove it"
_ON_GPU = "DeepSpeed keeps everything on the GPU here; remove it, or use FSDP with fsdp_offload_params: true"
_RECOMPUTED = "these scripts recompute on the GPU (--gradient_checkpointing); remove it"
_RING = "Transformer Engine passes keys and values round a ring; remove it"

_SHARDING_ENTRIES: dict[str, tuple[Callable[[str], Any], Any, str | None]] = {
    "FSDP_VERSION": (int, 1, None),
    "FSDP_SHARDING_STRATEGY": (_strategy, "FULL_SHARD", None),
    "FSDP_RESHARD_AFTER_FORWARD": (_truth, True, None),
    "FSDP_OFFLOAD_PARAMS": (_truth, False, None),
    "FSDP_ACTIVATION_CHECKPOINTING": (_truth, False, None),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (_truth, False, _RECOMPUTED),
    "FSDP_AUTO_WRAP_POLICY": (str.upper, "TRANSFORMER_BASED_WRAP", _BY_LAYER),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": (_not_decoder_layers, "", _BY_LAYER),
    "FSDP_IGNORED_MODULES": (_text, "", "these scripts shard every parameter; remove it"),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": (int, 2, None),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": (_text, "", None),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (_text, "", _ON_GPU),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (_text, "", _ON_GPU),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": (_text, "", "these scripts train dense models only; remove it"),
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": (int, 1, None),
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": (int, 1, None),
    "PARALLELISM_CONFIG_CP_SIZE": (int, 1, None),
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": (_text, "allgather", _RING),
    "PARALLELISM_CONFIG_TP_SIZE": (int, 1, "these scripts have no tensor parallelism; set it to 1"),
    "PARALLELISM_CONFIG_SP_SIZE": (int, 1, "these scripts have no sequence parallelism of DeepSpeed's; set it to 1"),
}
"""Variable -> how it is read, Accelerate's default and, where another value is refused, why, and what to do."""

DROPPED = {
    "FSDP_MIN_NUM_PARAMS": "belongs to size-based wrapping, which is refused",
    "FSDP_BACKWARD_PREFETCH": "FSDP2 prefetches by itself",
    "FSDP_FORWARD_PREFETCH": "FSDP2 prefetches by itself",
    "FSDP_USE_ORIG_PARAMS": "FSDP2 always does",
    "FSDP_SYNC_MODULE_STATES": "each rank reads its own share of the weights",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "each rank reads its own share of the weights",
    "FSDP_STATE_DICT_TYPE": "checkpoints are always sharded, the exported model never is",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "weights are loaded whole, in bf16 to each GPU, and split afterwards",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "the model is exported in any case",
    "PARALLELISM_CONFIG_CP_BACKEND": "context parallelism is Transformer Engine's",
    "PARALLELISM_CONFIG_SP_BACKEND": "sequence parallelism is refused",
}
"""Variables about sharding that need nothing done, and why."""

_ENGINES = {
    "FSDP": "FSDP_",
    "DEEPSPEED": "ACCELERATE_DEEPSPEED_",
    "PARALLELISM_CONFIG": "PARALLELISM_CONFIG_",
    "MEGATRON_LM": "MEGATRON_LM_",
}
"""What ACCELERATE_USE_... switches on -> the prefix of its variables."""

# ---- how this process was started ----


def launch_ranks(environ: Mapping[str, str]) -> LaunchRanks:
    """What a launcher's variables say; `UserError` where they are not of one."""
    numbers = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    wrong = [f"{name}={environ[name]}" for name in numbers if not environ.get(name, "0").isdecimal()]
    if not wrong and int(environ.get("MASTER_PORT", "0")) > 65535:
        wrong = [f"MASTER_PORT={environ['MASTER_PORT']}"]
    ranks = None if wrong else LaunchRanks.from_environment(environ)
    if ranks is None or ranks.rank >= ranks.world_size or int(environ.get("LOCAL_RANK", "0")) >= ranks.world_size:
        found = wrong or [f"{name}={environ[name]}" for name in numbers if name in environ]
        raise UserError(
            f"no launcher sets these environment variables: {', '.join(found)}; unset them, or start with torchrun."
        )
    return ranks


_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each process."""


def require_single_process(environ: MutableMapping[str, str]) -> None:
    """Raise `UserError` where the launcher asks for more than the one process and device of train_fp8.py. A launcher's
    variables that are left over, so not all of them, are removed: with them Accelerate would look for a process group.
    """
    num_processes = launch_ranks(environ).world_size
    if num_processes > 1:
        raise UserError(
            f"train_fp8.py trains in one process, and the launcher started {num_processes}; start train_multi_gpu.py, "
            "or train_fp8.py with --num_processes 1."
        )
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if is_on(environ.get(f"ACCELERATE_USE_{name}", "false"), f"use_{name.lower()}"):
            raise UserError(f"{_SOURCE} asks for {name}; take it out for train_fp8.py, or start train_multi_gpu.py.")
    if not environ.keys() >= set(_LAUNCHED):
        for name in _LAUNCHED:
            environ.pop(name, None)


def require_launched(environ: Mapping[str, str]) -> None:
    """Raise `UserError` where variables that torchrun sets for a process of train_multi_gpu.py are missing."""
    missing = [name for name in _LAUNCHED if name not in environ]
    command = "torchrun --nproc_per_node=NUMBER_OF_GPUS train_multi_gpu.py ..."
    launch_ranks(environ)
    if "WORLD_SIZE" in missing:
        raise UserError(
            f"train_multi_gpu.py needs a launcher, which starts its processes: {command} (for one: train_fp8.py)."
        )
    if missing:
        raise UserError(f"WORLD_SIZE is set without {', '.join(missing)}; let a launcher set them all: {command}")


# ---- what `accelerate launch` asked for ----


def apply_launch_settings(
    config: Config, environ: MutableMapping[str, str], given: Collection[str] = frozenset()
) -> Config:
    """`config`, unchecked, completed by what `accelerate launch` asked for, whose variables are removed from `environ`.
    `given` names options that were given, even with their default. Raises `UserError` for what cannot be honoured and
    for a flag that contradicts it.
    """
    is_multi_gpu = "ACCELERATE_DYNAMO_BACKEND" in environ and launch_ranks(environ).world_size > 1
    settings = {**take_sharding_settings(environ), **take_precision_settings(environ)}
    has_mode = "sharding_mode" in {*settings, *given} or config.parallel.sharding_mode != "auto"
    if is_multi_gpu and not has_mode:
        settings["sharding_mode"] = "ddp"
    scenario, mode = config.precision.fp8_scenario, settings.get("sharding_mode", config.parallel.sharding_mode)
    if scenario not in ("default", "delayed"):
        settings = _without_delayed_defaults(settings)
    for option in _FP8_DEFAULTS.keys() & given:
        if settings.get(option) == _FP8_DEFAULTS[option]:
            del settings[option]
    # The launcher's default for torchao; with another mode or recipe it means nothing.
    if "fp8_params" in given or mode not in FP8_GATHER_MODES or scenario not in ("default", "tensorwise"):
        settings.pop("fp8_params", None)
    sections = {}
    for name, section in vars(config).items():
        own = {option: settings[option] for option in vars(section) if option in settings}
        sections[name] = merge_launch_settings(section, own, given)
    return Config(**sections)


def merge_launch_settings(flags: Section, launch: dict[str, Any], given: Collection[str] = frozenset()) -> Section:
    """A section of the options, completed by what the launcher asked for in it. `UserError` where a flag contradicts
    it that is not the default or is named in `given`, and for a value that the option does not have.
    """
    unset: Any = type(flags)()
    hints = get_type_hints(type(flags))
    for name, asked in launch.items():
        choices = _choices(hints[name])
        if choices and asked not in choices:
            raise UserError(f"{_SOURCE} asks for {name} {asked}, and --{name} knows {', '.join(choices)} only.")
        flag = getattr(flags, name)
        if flag != asked and (name in given or flag != getattr(unset, name)):
            raise UserError(f"--{name} {flag} contradicts {_SOURCE}, which asks for {asked}; change one of them.")
    return dataclasses.replace(flags, **launch)  # type: ignore[type-var]


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values that a field of this type can have, where they are listed; else empty."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for member in get_args(hint) for choice in _choices(member))


def _without_delayed_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` without the defaults of delayed scaling, which mean nothing where a flag chose another recipe."""
    ours = {"amax_compute_algo": "max"}  # which the files of configs/ name
    return {
        name: value
        for name, value in settings.items()
        if name not in _FP8_DEFAULTS or value not in (_FP8_DEFAULTS[name], ours.get(name))
    }


def _take(environ: MutableMapping[str, str], prefix: str) -> dict[str, str]:
    """Remove the variables with `prefix`; returned by full name."""
    return {name: environ.pop(name) for name in sorted(environ) if name.startswith(prefix)}


def _refuse(wrong: Mapping[str, bool]) -> None:
    """Raise `UserError` with the first sentence that is true of the launch configuration."""
    for sentence, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(f"{_SOURCE} {sentence}.")


# ---- precision ----


def take_precision_settings(environ: MutableMapping[str, str]) -> dict[str, Any]:
    """As `take_sharding_settings`, of the variables about precision and torch.compile."""
    compiler = _take(environ, "ACCELERATE_DYNAMO_").get("ACCELERATE_DYNAMO_BACKEND", "no")
    precision = environ.pop("ACCELERATE_MIXED_PRECISION", "no").lower()
    fp8 = _take(environ, PREFIX)
    backend = fp8.get(f"{PREFIX}BACKEND", "TE").upper()

    def switched_on(name: str) -> bool:
        return is_on(fp8.get(PREFIX + name.upper(), "false"), name)

    if compiler.lower() != "no":
        raise UserError(
            f"{_SOURCE} asks for torch.compile (dynamo backend {compiler}), which these scripts use with --fp8_backend "
            "torchao only, and then by themselves; remove dynamo_config."
        )
    if precision != "fp8":
        return {} if precision == "no" else {"mixed_precision": precision}
    if backend not in ("TE", "AO"):
        raise UserError(f"accelerate's fp8_config asks for backend {backend}; set TE or AO (torchao).")
    settings: dict[str, Any] = {"mixed_precision": "fp8"}
    if backend == "AO":
        for variable, value in chosen_values(fp8).items():
            if (key := _FP8_KEY_OF.get(variable)) and key.te_only:
                raise UserError(
                    f"accelerate's fp8_config sets {key.name} to {value}, which has no effect with backend AO; drop it."
                )
        gathers = switched_on("enable_fsdp_float8_all_gather")
        return {**settings, "fp8_backend": "torchao", **({"fp8_params": True} if gathers else {})}
    if any(switched_on(name.lower()) for name in _OVERRIDE):
        raise UserError(
            "accelerate's fp8_config sets override_linear_precision, which Transformer Engine no longer has; remove "
            "it, or keep layers in bf16 with --fp8_bf16_modules."
        )
    if mxfp8 := switched_on("use_mxfp8_block_scaling"):
        settings["fp8_scenario"] = "mxfp8"
    for variable, key in _FP8_KEY_OF.items():
        # With MXFP8 the launcher still exports its defaults for delayed scaling, which mean nothing there.
        if key.option and variable in fp8 and (key.option == "fp8_format" or not mxfp8):
            settings[key.option] = _parsed(key.read, fp8[variable], key.name)
    return settings


def chosen_values(environ: Mapping[str, str]) -> dict[str, str]:
    """`ACCELERATE_FP8_*` -> value of those that are not the launcher's defaults, nor a switch that is off."""
    chosen = {}
    for name, value in sorted(environ.items()):
        default = key.default or "False" if (key := _FP8_KEY_OF.get(name)) else None
        # The launcher writes its own true as 1 and the file's as True.
        plain = "1" if value.lower() == "true" else value.lower()
        if name.startswith(PREFIX) and (default is None or plain != default.lower()):
            chosen[name] = value
    return chosen


def idle_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """Keys of fp8_config that the file sets to another value than the default, and why they have no effect here."""
    backend = environ.get(f"{PREFIX}BACKEND", "TE").upper()
    if environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() != "fp8" or backend not in ("TE", "AO"):
        return {}
    idle = {}
    for name in chosen_values(environ):
        key = _FP8_KEY_OF.get(name)
        if key is None:
            idle[name.removeprefix(PREFIX).lower()] = "neither accelerate nor these scripts know it"
        elif why := key.idle_with_te if backend == "TE" else key.idle_with_torchao:
            idle[key.name] = why
    return idle


def backend_elsewhere(environ: Mapping[str, str]) -> str | None:
    """What Accelerate's own path (a Trainer) does with the file's backend, where that is not what these scripts do."""
    backend = environ.get(f"{PREFIX}BACKEND")
    if environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() != "fp8" or backend in ("TE", "AO"):
        return None
    if backend is None:
        return (
            "fp8_config.backend is left out: these scripts then take TE, and Accelerate's own path (a Trainer) "
            "torchao first, where it is installed; write backend: TE"
        )
    if backend.upper() in ("TE", "AO"):
        return (
            f"fp8_config.backend {backend} is in small letters: these scripts take it, and Accelerate's own path (a "
            f"Trainer) ends in a ValueError; write backend: {backend.upper()}"
        )
    return None


# ---- sharding ----


def take_sharding_settings(environ: MutableMapping[str, str]) -> dict[str, Any]:
    """Remove the variables about sharding from `environ` and return them as options; `UserError` for what cannot be
    honoured, after removing them.
    """
    entries: dict[str, str] = {}
    asked = set()
    for engine, prefix in _ENGINES.items():
        own = _take(environ, prefix)
        if is_on(environ.pop(f"ACCELERATE_USE_{engine}", "false"), f"use_{engine.lower()}"):
            asked.add(engine)
            entries.update(own)
    environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)  # entries of the file, for Accelerate's own checks
    accumulation = environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    clipping = environ.pop("ACCELERATE_GRADIENT_CLIPPING", "auto")
    _refuse(
        {
            "asks for Megatron-LM, which these scripts do not use; take FSDP, DEEPSPEED or MULTI_GPU as "
            "distributed_type": "MEGATRON_LM" in asked,
            "asks for FSDP and DeepSpeed at once; choose one": {"FSDP", "DEEPSPEED"} <= asked,
        }
    )
    values = _read_entries(entries)
    settings: dict[str, Any] = {}
    if "FSDP" in asked:
        settings["sharding_mode"] = _fsdp_mode(values)
        if values["FSDP_ACTIVATION_CHECKPOINTING"]:
            settings["gradient_checkpointing"] = 1
    if "DEEPSPEED" in asked:
        settings.update(_deepspeed_settings(values))
    if "PARALLELISM_CONFIG" in asked:
        settings.update(_mesh_settings(values, settings.get("sharding_mode"), launch_ranks(environ)))
    if accumulation != "auto":
        settings["gradient_accumulation_steps"] = _parsed(int, accumulation, "gradient_accumulation_steps")
    if clipping != "auto":
        settings["max_grad_norm"] = _parsed(float, clipping, "gradient_clipping")
    return settings


def _read_entries(entries: Mapping[str, str]) -> dict[str, Any]:
    """What every variable of `_SHARDING_ENTRIES` says, its default where it is not among `entries`."""
    values = {}
    for variable, (read, default, refused) in _SHARDING_ENTRIES.items():
        # The name in the configuration file.
        name = variable.removeprefix("ACCELERATE_DEEPSPEED_").replace("CLS_TO_WRAP", "LAYER_CLS_TO_WRAP").lower()
        values[variable] = _parsed(read, entries[variable], name) if variable in entries else default
        if refused and values[variable] != default:
            raise UserError(f"{_SOURCE} sets {name} to {values[variable]}, and {refused}.")
    for variable in entries.keys() - values - DROPPED.keys():
        raise UserError(f"{_SOURCE} sets {variable}, which these scripts do not know; remove the entry.")
    return values


def _fsdp_mode(values: Mapping[str, Any]) -> str:
    """The mode that version, strategy, resharding and offloading stand for."""
    version, strategy = values["FSDP_VERSION"], values["FSDP_SHARDING_STRATEGY"]
    reshards, offloads = values["FSDP_RESHARD_AFTER_FORWARD"], values["FSDP_OFFLOAD_PARAMS"]
    mode = _FSDP1_MODES.get(strategy) if reshards else "fsdp_grad"
    known = ", ".join(name for name, its_mode in _FSDP1_MODES.items() if its_mode)
    _refuse(
        {
            f"sets fsdp_version to {version}; these scripts know 1 and 2": version not in (1, 2),
            f"sets fsdp_sharding_strategy to {strategy}, which belongs to fsdp_version 1; with version 2 set "
            "fsdp_reshard_after_forward": version == 2 and strategy != "FULL_SHARD",
            "sets fsdp_reshard_after_forward: false, which belongs to fsdp_version 2; set that version, or "
            "fsdp_sharding_strategy: SHARD_GRAD_OP": version == 1 and not reshards,
            f"sets fsdp_sharding_strategy to {strategy}; choose one of {known}": mode is None,
            f"sets fsdp_offload_params with what is {mode} here; set fsdp_reshard_after_forward: true (version 1: "
            "FULL_SHARD), or turn offloading off": offloads and mode != "fsdp_full",
        }
    )
    return "fsdp_offload" if offloads else str(mode)


def _deepspeed_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """The ZeRO stage, which is the DeepSpeed file's where there is one, and that file."""
    file, stage = values["ACCELERATE_DEEPSPEED_CONFIG_FILE"], values["ACCELERATE_DEEPSPEED_ZERO_STAGE"]
    if file:
        stage = read_json(Path(file), {"zero_optimization.stage": int})["zero_optimization"]["stage"]
    if stage not in (1, 2, 3):
        raise UserError(
            f"{file or _SOURCE} sets ZeRO stage {stage}, and the deepspeed modes are stages 1 to 3; for stage 0, which "
            "shards nothing, use distributed_type: MULTI_GPU."
        )
    return {"sharding_mode": f"deepspeed_{stage}", **({"deepspeed_config": file} if file else {})}


def _mesh_settings(values: Mapping[str, Any], mode: str | None, ranks: LaunchRanks) -> dict[str, Any]:
    """Options from the sizes of parallelism_config; `mode` is what the rest of the file asks for."""
    num_processes = ranks.world_size
    names = ("dp_replicate_size", "dp_shard_size", "cp_size")
    replicate, shard, context = sizes = [values[f"PARALLELISM_CONFIG_{name.upper()}"] for name in names]
    total = math.prod(sizes)
    if total == 1:
        return {}
    told = "has parallelism_config " + ", ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    if mode is None and replicate == total == num_processes:
        return {"sharding_mode": "ddp"}
    _refuse(
        {
            f"{told}, {total} processes together, and {num_processes} were started": total != num_processes,
            f"{told}, which needs distributed_type: FSDP with fsdp_version: 2": not str(mode).startswith("fsdp"),
            f"{told}, which leaves FSDP nothing to shard over; raise dp_shard_size, or set dp_replicate_size to 1": (
                replicate > 1 and shard == 1
            ),
            f"{told} with what is {mode} here; set fsdp_reshard_after_forward: true and fsdp_offload_params: false": (
                replicate > 1 and mode not in ("fsdp_full", "fsdp_hybrid")
            ),
            f"{told}, and fsdp_hybrid shards over the {ranks.local_world_size} GPUs of a host; set dp_replicate_size "
            "to the number of hosts": replicate > 1 and shard * context != ranks.local_world_size,
        }
    )
    settings: dict[str, Any] = {"context_parallel_size": context} if context > 1 else {}
    if replicate > 1:
        # Accelerate, too, shards over the product of the two dimensions.
        settings.update(sharding_mode="fsdp_hybrid")
    return settings
