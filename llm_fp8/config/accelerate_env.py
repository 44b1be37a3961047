"""What the launcher put in the environment: how this process was started, and what `accelerate launch` asked for.

`accelerate launch --config_file x.yaml script.py` turns the file into variables. They become the same settings as our
flags here, and are then removed: with `ACCELERATE_FP8_BACKEND` left in place Accelerate itself would convert the model,
in a bf16 run too, and with `ACCELERATE_USE_FSDP` it would shard it. `llm_fp8.config.accelerate_sharding` reads what
concerns sharding.

A flag that contradicts the file is an error. What the launcher sets when nobody asked for anything counts as nothing
said: precision `no`, and plain MULTI_GPU, which means `--sharding_mode ddp` only where that flag is not given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from llm_fp8.config.accelerate_fp8_keys import PREFIX as _FP8
from llm_fp8.config.accelerate_fp8_keys import launcher_default, te_only_values
from llm_fp8.config.accelerate_sharding import is_on, take_sharding_settings, whole_number
from llm_fp8.config.options import FP8_GATHER_MODES, SECTIONS, Config
from llm_fp8.utils.errors import UserError

_PRECISION = "ACCELERATE_MIXED_PRECISION"
_DYNAMO = "ACCELERATE_DYNAMO_"
_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_RECIPE_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    f"{_FP8}FORMAT": ("fp8_format", str.upper),
    f"{_FP8}AMAX_HISTORY_LEN": ("amax_history_len", lambda value: whole_number(value, "amax_history_len")),
    f"{_FP8}AMAX_COMPUTE_ALGO": ("amax_compute_algo", str.lower),
    f"{_FP8}MARGIN": ("fp8_margin", lambda value: whole_number(value, "margin")),
}
"""What the launcher exports of a recipe -> our option, and how its value is read."""

Section = TypeVar("Section")


def require_single_process(environ: Mapping[str, str]) -> None:
    """Raise `UserError` where the launcher asks for more than the one process and device of train_fp8.py."""
    num_processes = int(environ.get("WORLD_SIZE", "1"))
    if num_processes > 1:
        raise UserError(
            f"train_fp8.py trains in one process, and the launcher started {num_processes}; start train_multi_gpu.py "
            "in the same way, or train_fp8.py with python or --num_processes 1."
        )
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if is_on(environ.get(f"ACCELERATE_USE_{name}", "false"), f"use_{name.lower()}"):
            raise UserError(
                f"accelerate's launch configuration asks for {name}, and train_fp8.py trains on one device; take it "
                "out of the configuration, or start train_multi_gpu.py."
            )


def require_launched(environ: Mapping[str, str]) -> None:
    """Raise `UserError` where no launcher started this process of train_multi_gpu.py, or one that left out what
    torchrun says.
    """
    missing = [name for name in _TORCHRUN_VARIABLES if name not in environ]
    if not missing:
        return
    command = "torchrun --nproc_per_node=NUMBER_OF_GPUS train_multi_gpu.py ..."
    if "WORLD_SIZE" in missing:
        raise UserError(
            f"train_multi_gpu.py runs in several processes, which a launcher starts: {command} (for one process: "
            "train_fp8.py)."
        )
    raise UserError(
        f"WORLD_SIZE is set in the environment, but {', '.join(missing)}, which a launcher sets with it, is not; "
        f"unset it and let the launcher set all of them: {command}"
    )


def apply_launch_settings(config: Config, environ: MutableMapping[str, str]) -> Config:
    """`config` completed by what `accelerate launch` asked for, whose variables are removed from `environ`.

    Without `accelerate launch` this is `config` itself. Check the result with `check_options`. Raises
    `UserError` for what cannot be honoured and for a flag that contradicts the launch configuration.
    """
    is_multi_gpu = f"{_DYNAMO}BACKEND" in environ and int(environ.get("WORLD_SIZE", "1")) > 1
    settings = {**take_sharding_settings(environ), **take_launch_settings(environ)}
    if is_multi_gpu and "sharding_mode" not in settings and config.parallel.sharding_mode == "auto":
        settings["sharding_mode"] = "ddp"
    if config.precision.fp8_scenario not in ("default", "delayed"):
        settings = _without_delayed_defaults(settings)
    if settings.get("fp8_all_gather") and not _can_gather_in_fp8(config, settings):
        del settings["fp8_all_gather"]
    sections = {}
    for name, section in SECTIONS.items():
        own = {field.name: settings[field.name] for field in dataclasses.fields(section) if field.name in settings}
        if own:
            sections[name] = merge_launch_settings(getattr(config, name), own)
    return dataclasses.replace(config, **sections) if sections else config


def _can_gather_in_fp8(config: Config, settings: Mapping[str, Any]) -> bool:
    """Whether the launcher's default for torchao, to gather weights in fp8, means anything beside the mode and the
    recipe of this run.
    """
    mode = settings.get("sharding_mode", config.parallel.sharding_mode)
    return mode in FP8_GATHER_MODES and config.precision.fp8_scenario in ("default", "tensorwise")


def _without_delayed_defaults(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` without the defaults of delayed scaling, which mean nothing where a flag chose another recipe."""
    defaults = {option: {read(launcher_default(name))} for name, (option, read) in _RECIPE_READERS.items()}
    defaults["amax_compute_algo"].add("max")  # our own default, which the files of configs/ name
    return {name: value for name, value in settings.items() if value not in defaults.get(name, ())}


def take_launch_settings(environ: MutableMapping[str, str]) -> dict[str, Any]:
    """Remove Accelerate's variables about precision and torch.compile from `environ` and return them as fields of
    `PrecisionConfig`.

    Empty where nothing was asked for. Raises `UserError` on a backend or value that cannot be honoured.
    """
    dynamo = {name: environ.pop(name) for name in sorted(environ) if name.startswith(_DYNAMO)}
    precision = environ.pop(_PRECISION, "no").lower()
    fp8 = {key: environ.pop(key) for key in sorted(environ) if key.startswith(_FP8)}
    backend = dynamo.get(f"{_DYNAMO}BACKEND", "no")
    if backend.lower() != "no":
        raise UserError(
            f"accelerate's launch configuration asks for torch.compile (dynamo backend {backend}), which these "
            "scripts use with --fp8_backend torchao only, and then by themselves; remove dynamo_config."
        )
    if precision == "no":
        return {}
    if precision != "fp8":
        return {"mixed_precision": precision}
    backend = fp8.get(f"{_FP8}BACKEND", "TE").upper()
    if backend == "AO":
        return _torchao_settings(fp8)
    if backend != "TE":
        raise UserError(
            f"accelerate's fp8_config asks for backend {backend}, and these scripts train fp8 with backend TE "
            "(Transformer Engine) or AO (torchao); set one of these."
        )
    if any(
        is_on(fp8.get(f"{_FP8}OVERRIDE_{gemm}", "false"), "override_linear_precision")
        for gemm in ("FPROP", "DGRAD", "WGRAD")
    ):
        raise UserError(
            "accelerate's fp8_config sets override_linear_precision, which Transformer Engine no longer has; set it "
            "to [false, false, false], or keep layers in bf16 with --fp8_first_bf16_layers and --fp8_last_bf16_layers."
        )
    settings: dict[str, Any] = {"mixed_precision": "fp8"}
    if is_on(fp8.get(f"{_FP8}USE_MXFP8_BLOCK_SCALING", "false"), "use_mxfp8_block_scaling"):
        settings["fp8_scenario"] = "mxfp8"
    for key, (name, read) in _RECIPE_READERS.items():
        # With MXFP8 the launcher still exports its defaults for delayed scaling, which mean nothing there.
        if key in fp8 and not (settings.get("fp8_scenario") == "mxfp8" and name != "fp8_format"):
            settings[name] = read(fp8[key])
    return settings


def _torchao_settings(fp8: Mapping[str, str]) -> dict[str, Any]:
    """Accelerate's variables for its backend AO as fields of our options.

    pad_inner_dim changes nothing here: layers and micro-batches whose sizes would need padding are left out or refused.
    """
    for name, value in te_only_values(fp8).items():
        raise UserError(
            f"accelerate's fp8_config sets {name} to {value}, which belongs to backend TE and has no effect with "
            "backend AO; remove it."
        )
    gathers = is_on(fp8.get(f"{_FP8}ENABLE_FSDP_FLOAT8_ALL_GATHER", "false"), "enable_fsdp_float8_all_gather")
    return {"mixed_precision": "fp8", "fp8_backend": "torchao", **({"fp8_all_gather": True} if gathers else {})}


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values that a field of this type can have, where they are listed; else empty."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return (
        tuple(choice for member in get_args(hint) for choice in _choices(member))
        if get_origin(hint) is not None
        else ()
    )


def merge_launch_settings(flags: Section, launch: dict[str, Any]) -> Section:
    """A section of the options, completed by what the launcher asked for in it.

    A flag that has its default's value cannot be told from one that is not given. Raises `UserError` where a flag and
    the launcher differ, and for a value that the option does not have.
    """
    unset: Any = type(flags)()
    hints = get_type_hints(type(flags))
    for name, asked in launch.items():
        choices = _choices(hints[name])
        if choices and asked not in choices:
            raise UserError(
                f"accelerate's launch configuration asks for {name} {asked}, and --{name} knows {', '.join(choices)} "
                "only."
            )
        flag = getattr(flags, name)
        if flag != getattr(unset, name) and flag != asked:
            raise UserError(
                f"--{name} {flag} contradicts accelerate's launch configuration, which asks for {asked}; drop the "
                "flag or change the file."
            )
    return dataclasses.replace(flags, **launch)  # type: ignore[type-var]
