"""What the launcher put in the environment: how this process was started, and what `accelerate launch` asked for.

`accelerate launch --config_file x.yaml script.py` turns the file into variables. They become options of ours and are
removed: with `ACCELERATE_FP8_BACKEND` left in place Accelerate itself would convert the model, in a bf16 run too, and
with `ACCELERATE_USE_FSDP` it would shard it. The launcher also exports entries that nobody wrote, so its defaults give
way to a flag; any other flag that contradicts the file is an error. Read in Accelerate 1.15 and compared with its
launcher by tests/config/test_accelerate_launch.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from llm_fp8.config.options import Config
from llm_fp8.config.recipes import RECIPES, Backend, chosen
from llm_fp8.utils.errors import UserError, reading
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.ranks import LaunchRanks

PREFIX = "ACCELERATE_FP8_"
_FILE = "accelerate's launch configuration"
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each process."""

READ = {
    "ACCELERATE_FP8_BACKEND": "TE",
    "ACCELERATE_FP8_FORMAT": "HYBRID",
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": "1024",
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "most_recent",
    "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "False",
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "True",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
    "ACCELERATE_GRADIENT_CLIPPING": "auto",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "None",
}
"""Variables that options come from -> the launcher's default."""
IDLE = {
    "ACCELERATE_FP8_MARGIN": "0",
    "ACCELERATE_FP8_INTERVAL": "1",
    "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "False",
    "ACCELERATE_FP8_OPT_LEVEL": "O2",
    "ACCELERATE_FP8_PAD_INNER_DIM": "True",
}
"""Variables that have no effect here -> the launcher's default. A run names those that are set to something else, and
entries of fp8_config that no table knows. What else is unknown, FSDP2 does by itself.
"""
REFUSED = {
    "ACCELERATE_FP8_OVERRIDE_FPROP": "False",
    "ACCELERATE_FP8_OVERRIDE_DGRAD": "False",
    "ACCELERATE_FP8_OVERRIDE_WGRAD": "False",
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_IGNORED_MODULES": "None",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
}
"""Variables of what is not supported here -> the only value that they may have."""
DEFAULTS = {**READ, **IDLE, **REFUSED}

OF_RECIPES = {
    "fp8_format": "ACCELERATE_FP8_FORMAT",
    "amax_history_len": "ACCELERATE_FP8_AMAX_HISTORY_LEN",
    "amax_compute_algo": "ACCELERATE_FP8_AMAX_COMPUTE_ALGO",
}
"""Options that some recipes take -> variable."""


def is_on(value: str) -> bool:
    """Whether a switch in the environment is on."""
    return value.lower() in ("1", "true", "yes")


def is_default(variable: str, value: str) -> bool:
    """Whether a value is the launcher's default, which writes true as 1."""
    plain = {"1": "true"}
    default = DEFAULTS[variable].lower()
    return plain.get(value.lower(), value.lower()) == plain.get(default, default)


def _not_supported(what: str, advice: str) -> UserError:
    return UserError(f"{what} of {_FILE} is not supported here; {advice}.")


def require_single_process(environ: MutableMapping[str, str]) -> None:
    """Raise `UserError` where the launcher asks for more than the one process and device of train_fp8.py. A launcher's
    variables that are left over, so not all of them, are removed: with them Accelerate would look for a process group.
    """
    is_sharded = any(is_on(environ.get(f"ACCELERATE_USE_{name}", "")) for name in ("FSDP", "DEEPSPEED"))
    if is_sharded or LaunchRanks.from_environment(environ).world_size > 1:
        raise UserError("train_fp8.py trains in one process, and the launcher asks for more; use train_multi_gpu.py.")
    if not environ.keys() >= set(_TORCHRUN):
        for name in _TORCHRUN:
            environ.pop(name, None)


def require_launched(environ: Mapping[str, str]) -> None:
    """Raise `UserError` where variables that torchrun sets for a process of train_multi_gpu.py are missing."""
    if missing := [name for name in _TORCHRUN if name not in environ]:
        raise UserError(
            f"train_multi_gpu.py needs a launcher, which sets {', '.join(missing)}: torchrun "
            "--nproc_per_node=NUMBER_OF_GPUS train_multi_gpu.py ... (for one GPU: train_fp8.py)."
        )


def apply_launch_settings(
    config: Config, environ: MutableMapping[str, str], given: Collection[str] = frozenset()
) -> tuple[Config, list[str]]:
    """`config`, unchecked, completed by what `accelerate launch` asked for, whose variables are removed from `environ`;
    and a sentence for each entry that does nothing here.

    `given` names options that were given, even with their default. Raises `UserError` for what is not supported and
    for a flag that contradicts it.
    """
    # The launcher sets this variable always.
    is_ddp = "ACCELERATE_DYNAMO_BACKEND" in environ and LaunchRanks.from_environment(environ).world_size > 1
    found, idle = _take(environ)
    flags = {key: value for part in vars(config).values() for key, value in vars(part).items()}
    unset = {key: value for part in vars(Config()).values() for key, value in vars(part).items()}
    weak = {"fp8_params", *(name for name, each in OF_RECIPES.items() if is_default(each, found.get(each, "")))}
    with reading(_FILE, "of this run", "an entry"):
        settings = _sharding(found)
        if is_ddp and "sharding_mode" not in settings:
            settings["sharding_mode"] = "ddp"
            weak.add("sharding_mode")
        mode = settings.get("sharding_mode") if flags["sharding_mode"] == "auto" else flags["sharding_mode"]
        settings |= _precision(found, mode, flags["fp8_scenario"], idle)
    for name, asked in list(settings.items()):
        if name in given or flags[name] != unset[name]:
            del settings[name]
            agrees = flags[name] == asked or (name == "gradient_checkpointing" and flags[name] > 0)
            # The file switches FSDP or DeepSpeed on, the flag may say which form of it.
            agrees |= name == "sharding_mode" and flags[name].split("_")[0] == asked.split("_")[0]
            if not agrees and name not in weak:
                raise UserError(f"--{name} {flags[name]} contradicts {_FILE}, which asks for {asked}; change one.")
    sections = {
        name: dataclasses.replace(section, **{key: settings[key] for key in vars(section) if key in settings})
        for name, section in vars(config).items()
    }
    return Config(**sections), [f"{key} of {_FILE} does nothing here." for key in idle]


def _take(environ: MutableMapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """What was asked for, removed from `environ`: the precision, the engines, and the variables that they use; and the
    names of entries without effect.
    """
    found = {"precision": environ.pop("ACCELERATE_MIXED_PRECISION", "no").lower()}
    for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if is_on(environ.pop(f"ACCELERATE_USE_{engine}", "")):
            found[engine] = "true"
    for engine in ("MEGATRON_LM", "PARALLELISM_CONFIG"):
        if engine in found:
            raise _not_supported(engine.lower(), "use --sharding_mode and --context_parallel_size")
    environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)  # names of entries, for Accelerate's own checks
    used = {
        PREFIX: found["precision"] == "fp8",
        "FSDP_": "FSDP" in found,
        "ACCELERATE_DEEPSPEED_": "DEEPSPEED" in found,
        "ACCELERATE_GRADIENT_": True,
        "ACCELERATE_DYNAMO_BACKEND": True,
        "ACCELERATE_DYNAMO_": False,
        "PARALLELISM_CONFIG_": False,
    }
    idle = []
    for prefix, is_used in used.items():
        for variable in [name for name in environ if name.startswith(prefix)]:
            value, key = environ.pop(variable), _key(variable)
            if not is_used:
                continue
            if variable in READ:
                found[variable] = value
            elif variable in DEFAULTS and is_default(variable, value):
                continue
            elif variable in REFUSED:
                raise _not_supported(f"{key} {value}", f"remove it, or set it to {REFUSED[variable]}")
            elif prefix == PREFIX:
                idle.append(key)
    return found, idle


def _key(variable: str) -> str:
    """What a variable is called in the file."""
    return variable.replace(PREFIX, "fp8_config.").removeprefix("ACCELERATE_").removeprefix("DEEPSPEED_").lower()


def _precision(found: Mapping[str, str], mode: str | None, scenario: str, idle: list[str]) -> dict[str, Any]:
    """Options of precision; `mode` and `scenario` are those of the run. Entries without effect are added to `idle`."""
    values = {**READ, **found}
    if values["precision"] != "fp8":
        return {} if values["precision"] == "no" else {"mixed_precision": values["precision"]}
    settings: dict[str, Any] = {"mixed_precision": "fp8"}
    backend: Backend = "te"
    asked = values["ACCELERATE_FP8_BACKEND"].upper()
    if asked == "AO":
        settings["fp8_backend"] = backend = "torchao"
        if mode in ("fsdp_full", "fsdp_grad") and scenario in ("default", "tensorwise"):
            settings["fp8_params"] = is_on(values["ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"])
    elif asked != "TE":
        raise _not_supported(f"fp8_config.backend {asked}", "set TE or AO (torchao)")
    elif is_on(values["ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING"]):
        settings["fp8_scenario"] = scenario = "mxfp8"
    recipe = RECIPES[chosen(scenario, backend)]
    convert: dict[str, Callable[[str], Any]] = {
        "fp8_format": str.upper,
        "amax_history_len": int,
        "amax_compute_algo": str.lower,
    }
    for name, variable in OF_RECIPES.items():
        is_written = not is_default(variable, values[variable])
        if name not in recipe.options:
            idle += [_key(variable)] * is_written
        elif variable in found and (is_written or recipe.name == "delayed"):  # whose defaults the launcher's are
            settings[name] = convert[name](values[variable])
    return settings


def _sharding(found: Mapping[str, str]) -> dict[str, Any]:
    """Options of sharding, accumulation and clipping."""
    values = {**READ, **found}
    settings: dict[str, Any] = {}
    if "FSDP" in found:
        reshards, offloads = is_on(values["FSDP_RESHARD_AFTER_FORWARD"]), is_on(values["FSDP_OFFLOAD_PARAMS"])
        if offloads and not reshards:
            raise _not_supported("fsdp_offload_params alone", "set fsdp_reshard_after_forward: true with it")
        settings["sharding_mode"] = "fsdp_offload" if offloads else "fsdp_full" if reshards else "fsdp_grad"
        if is_on(values["FSDP_ACTIVATION_CHECKPOINTING"]):
            settings["gradient_checkpointing"] = 1
    if "DEEPSPEED" in found:
        stage: Any = int(values["ACCELERATE_DEEPSPEED_ZERO_STAGE"])
        file = values["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
        if file != "None":
            settings["deepspeed_config"] = file
            stage = (read_json(Path(file)).get("zero_optimization") or {}).get("stage")
        if stage not in (1, 2, 3):
            raise _not_supported(f"ZeRO stage {stage}", "set a stage from 1 to 3")
        settings["sharding_mode"] = f"deepspeed_{stage}"
    if (steps := values["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"]) != "auto":
        settings["gradient_accumulation_steps"] = int(steps)
    if (norm := values["ACCELERATE_GRADIENT_CLIPPING"]) != "auto":
        settings["max_grad_norm"] = float(norm)
    return settings
