"""Read the settings of `accelerate launch --config_file x.yaml script.py` from the script's environment variables.

The settings become options, and the variables are removed, since otherwise Accelerate would convert or shard the model.
The launcher also exports its defaults. Therefore a flag overrides an entry of `fp8_config` that has the default. It is
an error if a flag contradicts the file in another way. Names and defaults are those of Accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import yaml

from llm_fp8.config.options import Config
from llm_fp8.config.recipes import DEFAULT, RECIPES, Backend, recipe_for
from llm_fp8.utils.errors import UserError, reading
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.output import say
from llm_fp8.utils.ranks import LaunchRanks

PREFIX = "ACCELERATE_FP8_"
LAUNCH_FILE = "accelerate's launch configuration"
ENGINES = {"FSDP": "FSDP_", "DEEPSPEED": "ACCELERATE_DEEPSPEED_"}  # launcher's name -> prefix of its variables
_PREFIXES = (*ENGINES.values(), PREFIX, "ACCELERATE_GRADIENT_", "ACCELERATE_DYNAMO_", "PARALLELISM_CONFIG_")
READ, _OTHERS = yaml.load(Path(__file__).with_suffix(".yaml").read_text(), yaml.BaseLoader).values()
DEFAULTS = READ | _OTHERS
"""Variable -> the launcher's default, as text."""
RECIPE_ENTRIES: dict[str, Any] = {"fp8_format": str.upper, "amax_history_len": int, "amax_compute_algo": str.lower}
"""Option that fp8_config sets for some recipes -> function that converts the text of the entry."""


def is_on(value: str) -> bool:
    return value.lower() in ("1", "true", "yes")


def is_default(variable: str, value: str) -> bool:
    """Return True if `value` is the launcher's default for `variable`. The launcher may write true as 1."""
    default = DEFAULTS.get(variable, "")
    return value.lower() == default.lower() or (is_on(value) and is_on(default))


def _variable(option: str) -> str:
    """Return the environment variable in which `accelerate launch` passes `option`, a key of `RECIPE_ENTRIES`."""
    return PREFIX + option.removeprefix("fp8_").upper()


def _key(variable: str) -> str:
    """Return the key of accelerate's configuration file that sets the environment variable `variable`."""
    return variable.replace(PREFIX, "fp8_config.").removeprefix("ACCELERATE_").removeprefix("DEEPSPEED_").lower()


def _not_supported(setting: str) -> UserError:
    return UserError(f"{setting} of {LAUNCH_FILE} is not supported here; change it (docs/multi_gpu.md).")


def apply_launch_settings(config: Config, environ: MutableMapping[str, str], user_options: Collection[str]) -> Config:
    """Return `config` with the settings of `accelerate launch`. Remove their variables from `environ`. Raise
    `UserError` if a setting is not supported or contradicts one of `user_options` (names of options that the user set).
    """
    ranks = LaunchRanks.from_environment(environ)
    is_ddp = "ACCELERATE_DYNAMO_BACKEND" in environ and ranks.world_size > 1  # the launcher always sets it
    requests = _pop_requests(environ)
    values, flags = {**DEFAULTS, **requests}, config.options
    weak = {"fp8_params", *(name for name in RECIPE_ENTRIES if is_default(_variable(name), values[_variable(name)]))}
    ignored: list[str] = []
    with reading(LAUNCH_FILE, "of this run", "an entry"):
        launched = ({"sharding_mode": "ddp"} if is_ddp else {}) | _sharding(values)
        mode = launched.get("sharding_mode") if flags["sharding_mode"] == "auto" else flags["sharding_mode"]
        launched |= _precision(requests, mode, flags["fp8_scenario"], ignored)
    for key in ignored if ranks.rank == 0 else ():  # keys that the recipe ignores
        say(f"WARNING: {key} of {LAUNCH_FILE} has no effect on this run.")
    overridden = launched.keys() & user_options
    for name in sorted(overridden - weak):
        flag, entry = flags[name], launched[name]
        # The file switches FSDP or DeepSpeed on; the flag may choose another mode of the same engine.
        is_same_engine = name == "sharding_mode" and (entry == "ddp" or flag.split("_")[0] == entry.split("_")[0])
        if flag != entry and not is_same_engine:
            raise UserError(f"--{name} {flag} contradicts {LAUNCH_FILE}, which asks for {entry}; change one of them.")
    return config.with_options(**{name: value for name, value in launched.items() if name not in overridden})


def _pop_requests(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Remove the launcher's variables. Return those that set options. Raise `UserError` if one is not supported."""
    environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)  # a list of keys, for Accelerate's own checks
    requests = {"precision": environ.pop("ACCELERATE_MIXED_PRECISION", "no").lower()}
    for engine in ("MEGATRON_LM", "PARALLELISM_CONFIG"):
        if is_on(environ.pop(f"ACCELERATE_USE_{engine}", "")):
            raise _not_supported(engine.lower())
    requests |= {engine: environ.pop(f"ACCELERATE_USE_{engine}", "") for engine in ENGINES}
    unused = tuple(prefix for engine, prefix in ENGINES.items() if not is_on(requests[engine]))
    unused += () if requests["precision"] == "fp8" else (PREFIX,)
    for variable in [name for name in environ if name.startswith(_PREFIXES)]:
        value = environ.pop(variable)  # variables that are not in `DEFAULTS` do not matter to FSDP2
        if variable in READ:
            requests[variable] = value
        elif variable.startswith(unused) or is_default(variable, value):
            continue
        elif variable in DEFAULTS or variable.startswith(PREFIX):
            raise _not_supported(f"{_key(variable)} {value}")
    return requests


def te_recipe(environ: Mapping[str, str]) -> str:
    """Return the recipe that Accelerate uses with Transformer Engine if it reads the variables in `environ`."""
    return "mxfp8" if is_on(environ.get("ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", "")) else recipe_for(DEFAULT, "te")


def _precision(requests: Mapping[str, str], mode: str | None, scenario: str, ignored: list[str]) -> dict[str, Any]:
    """Return the precision options that `requests` set. Append to `ignored` the keys that the recipe does not use."""
    values = {**DEFAULTS, **requests}
    if values["precision"] != "fp8":
        return {} if values["precision"] == "no" else {"mixed_precision": values["precision"]}
    settings: dict[str, Any] = {"mixed_precision": "fp8"}
    backend: Backend = "te"
    launched = values["ACCELERATE_FP8_BACKEND"].upper()
    if launched == "AO":
        settings["fp8_backend"] = backend = "torchao"
        if mode in ("fsdp_full", "fsdp_grad") and RECIPES[recipe_for(scenario, backend)].one_scale_per_weight:
            settings["fp8_params"] = is_on(values["ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER"])
    elif launched != "TE":
        raise _not_supported(f"fp8_config.backend {launched}")
    elif te_recipe(values) != recipe_for(DEFAULT, "te"):
        settings["fp8_scenario"] = scenario = te_recipe(values)
    recipe = RECIPES[recipe_for(scenario, backend)]
    for name, convert in RECIPE_ENTRIES.items():
        variable = _variable(name)
        is_written = not is_default(variable, values[variable])
        if name not in recipe.options:
            ignored += [_key(variable)] * is_written
        elif variable in requests and (is_written or recipe.scales_lag):  # defaults are for delayed scaling
            settings[name] = convert(values[variable])
    return settings


def _sharding(values: Mapping[str, str]) -> dict[str, Any]:
    """Return the options for sharding, gradient accumulation and clipping that the launcher's variables set."""
    settings: dict[str, Any] = {}
    if is_on(values["FSDP"]):
        reshards, offloads = is_on(values["FSDP_RESHARD_AFTER_FORWARD"]), is_on(values["FSDP_OFFLOAD_PARAMS"])
        if offloads and not reshards:
            raise _not_supported("fsdp_offload_params without fsdp_reshard_after_forward")
        settings["sharding_mode"] = "fsdp_offload" if offloads else "fsdp_full" if reshards else "fsdp_grad"
        if is_on(values["FSDP_ACTIVATION_CHECKPOINTING"]):
            settings["gradient_checkpointing"] = 1
    if is_on(values["DEEPSPEED"]):
        stage: Any = int(values["ACCELERATE_DEEPSPEED_ZERO_STAGE"])
        if (file := values["ACCELERATE_DEEPSPEED_CONFIG_FILE"]) != "None":
            settings["deepspeed_config"] = file
            stage = (read_json(Path(file)).get("zero_optimization") or {}).get("stage")
        if stage not in (1, 2, 3):
            raise _not_supported(f"ZeRO stage {stage}")
        settings["sharding_mode"] = f"deepspeed_{stage}"
    if (num_steps := values["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"]) != "auto":
        settings["gradient_accumulation_steps"] = int(num_steps)
    if (norm := values["ACCELERATE_GRADIENT_CLIPPING"]) != "auto":
        settings["max_grad_norm"] = float(norm)
    return settings
