"""What the options must satisfy.

`check_options` looks at the options alone, before torch is imported: at what each declares on its field, then at the
few rules that are not between two options. `check_machine` and `check_decoder` look at the machine and the model.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import fields
from fnmatch import fnmatchcase

from llm_fp8.config.options import (
    ALL_LINEAR,
    COLUMN_NAMES,
    DECODER_LINEARS,
    SECTIONS,
    TRAINING_OPTIONS,
    Config,
)
from llm_fp8.config.recipes import (
    DEFAULT,
    FP8_SIZE_MULTIPLE,
    RECIPES,
    Backend,
    chosen,
    recipe_names,
    taking,
    token_multiple,
)
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks

_BOUNDS = {"at_least": operator.ge, "at_most": operator.le, "above": operator.gt, "below": operator.lt}


def check_declared(config: Config, mode: str | None = None) -> None:
    """Raise `UserError` for an option that its field's `needs`, `excludes` or bounds do not allow.

    `mode` is the sharding mode that 'auto' came to, 'single' on one GPU; until it is known, what depends on it passes.
    """
    declared = {each.name: each for section in SECTIONS.values() for each in fields(section)}
    values = {name: value for section in config.to_dict().values() for name, value in section.items()}
    values |= {"packing": config.packing, "sharding_mode": mode or config.parallel.sharding_mode}

    def holds(condition: str) -> bool:
        name, _, allowed = condition.partition("=")
        value = str(values[name])
        return any(fnmatchcase(value, each) for each in allowed.split("|")) if allowed else bool(values[name])

    for name, each in declared.items():
        value = values[name]
        for bound, limit in each.metadata["bounds"].items():
            if value is not None and not (math.isfinite(value) and _BOUNDS[bound](value, limit)):
                raise UserError(f"--{name} must be {bound.replace('_', ' ')} {limit}, not {value}.")
        if value == each.default:
            continue
        given = f"--{name}" if value is True else f"--{name} {value}"
        for condition in each.metadata["needs"]:
            is_known = not condition.startswith("sharding_mode") or values["sharding_mode"] != "auto"
            if is_known and not holds(condition):
                raise UserError(f"{given} has no effect without {_flag(condition)}; add it or drop --{name}.")
        for condition, why in each.metadata["excludes"].items():
            if holds(condition):
                other, is_listed, _ = condition.partition("=")
                found = f"--{other} {values[other]}" if is_listed or values[other] is not True else f"--{other}"
                raise UserError(f"{given} cannot go with {found}: {why}; drop one of them.")


def _flag(condition: str) -> str:
    """What to give on the command line for a condition to hold."""
    name, _, allowed = condition.partition("=")
    words = " or ".join(allowed.split("|"))
    return f"--{name} {words}".rstrip().replace("--sharding_mode single or", "one GPU or --sharding_mode")


def check_options(config: Config) -> None:
    """Raise `UserError` for options that no machine could run with."""
    check_declared(config)
    _check_recipe(config)
    _check_names(config)
    data, run, size = config.data, config.run, config.parallel.context_parallel_size
    tokens = data.batch_size * data.max_seq_length
    if (config.precision.may_be_fp8 or config.packing) and tokens % FP8_SIZE_MULTIPLE != 0:
        _refuse_tokens(config, FP8_SIZE_MULTIPLE, "fp8 kernels and packed sequences need")
    if data.max_seq_length % (2 * size) != 0 and size > 1:
        raise UserError(
            f"--context_parallel_size {size} cuts sequences into {2 * size} equal chunks; choose a --max_seq_length "
            f"that is a multiple of that, not {data.max_seq_length}."
        )
    if data.streaming and config.optim.max_steps is None:
        raise UserError("--streaming does not know how many rows there are; add --max_steps.")
    if run.output_dir == "":
        raise UserError("--output_dir is empty; give a folder ('.' for the current one), or drop it.")
    if run.resume_from == "latest" and run.output_dir is None:
        raise UserError("--resume_from latest needs --output_dir, the folder of the run to continue.")
    if config.parallel.sharding_mode != "auto":
        _check_mode(config, config.parallel.sharding_mode)


def _check_recipe(config: Config) -> None:
    """What --fp8_scenario must be for the backend, and which options it takes."""
    options = config.precision
    backend, scenario = options.fp8_backend, options.fp8_scenario
    if scenario not in (DEFAULT, *recipe_names(backend)):
        raise UserError(
            f"--fp8_scenario {scenario} is no recipe of --fp8_backend {backend}, whose are "
            f"{', '.join(recipe_names(backend))}; change one of them."
        )
    recipe = RECIPES[chosen(scenario, backend)]
    for name in ("fp8_format", "amax_history_len", "amax_compute_algo"):
        if getattr(options, name) is not None and name not in recipe.options:
            raise UserError(
                f"--{name} has no effect with --fp8_scenario {recipe.name}, only with {', '.join(taking(name))}; drop "
                "one of them."
            )
    if config.parallel.fp8_params and not recipe.one_scale_per_weight:
        _refuse_scales(recipe.name, backend)
    if config.parallel.fp8_params and not (config.model.use_te or backend == "torchao"):
        raise UserError("--fp8_params has no effect without --use_te or --fp8_backend torchao; add one or drop it.")


def fp8_params_recipes(backend: Backend = "te") -> list[str]:
    """Recipes with one scale per weight, which --fp8_params needs."""
    return [name for name in recipe_names(backend) if RECIPES[name].one_scale_per_weight]


def _refuse_scales(scenario: str | None, backend: Backend) -> None:
    able = " or ".join(fp8_params_recipes(backend))
    raise UserError(f"--fp8_params needs one scale per weight, which --fp8_scenario {scenario} has not; use {able}.")


def _check_names(config: Config) -> None:
    """Lists of names and numbers that are written with commas."""
    data, lora = config.data, config.lora
    if not all(0 < weight < math.inf for weight in data.weights or []):
        raise UserError(f"--dataset_weights {data.dataset_weights} must be numbers above 0, as in 0.7,0.3.")
    theirs = set(data.column_names.values())
    if data.columns is not None and ("" in theirs or len(theirs) != len(data.columns.split(","))):
        raise UserError(
            f"--columns '{data.columns}' must be pairs of our name and the dataset's, each once, as in "
            "problem=question,generated_solution=answer."
        )
    layers = (*DECODER_LINEARS, ALL_LINEAR) if config.model.use_te else ()  # else the model's own, seen later
    for flag, names, known in (
        ("--columns", data.column_names, COLUMN_NAMES),
        ("--allow_changed", config.allowed_changes, TRAINING_OPTIONS),
        ("--lora_targets", lora.targets, layers),
    ):
        if unknown := [name for name in names if known and name not in known]:
            raise UserError(f"{flag}: '{unknown[0]}' is not among {', '.join(known)}.")
    if len(set(lora.targets)) < max(1, len(lora.targets)) or (ALL_LINEAR in lora.targets and len(lora.targets) > 1):
        raise UserError(
            f"--lora_targets '{lora.lora_targets}' must name layers, each once, such as q_proj,v_proj, or {ALL_LINEAR} "
            "alone."
        )


def _check_mode(config: Config, mode: str) -> None:
    """What single values of options cannot go with the sharding mode of the run, 'single' on one GPU."""
    kind, has = config.optim.optimizer, "one GPU" if mode == "single" else f"--sharding_mode {mode}"
    deepspeed, whole = mode.startswith("deepspeed"), mode in ("single", "ddp")
    if config.precision.mixed_precision == "fp16" and not whole:
        raise UserError(
            f"--mixed_precision fp16 cannot go with {has}, which shards what its scaler must see; use bf16."
        )
    if (kind == "adamw_8bit" and not whole) or (kind == "adamw_master" and deepspeed):
        raise UserError(f"--optimizer {kind} cannot go with {has}; use --optimizer auto, or --sharding_mode ddp.")
    torchao = config.precision.fp8_backend == "torchao"
    if config.parallel.fp8_params and torchao and mode not in ("fsdp_full", "fsdp_grad"):
        raise UserError(f"--fp8_params with --fp8_backend torchao cannot go with {has}; use fsdp_full or fsdp_grad.")


def _refuse_tokens(config: Config, multiple: int, whose: str) -> None:
    data, size = config.data, config.parallel.context_parallel_size
    shared = f" on each of the {size} GPUs that share a sequence" if size > 1 else ""
    raise UserError(
        f"--batch_size {data.batch_size} times --max_seq_length {data.max_seq_length} must be a multiple of {multiple} "
        f"tokens{shared}, as {whose}; choose a --max_seq_length that is a multiple of {multiple * size}."
    )


def check_machine(
    config: Config,
    *,
    on_gpu: bool,
    mode: str,
    compute: str = "bf16",
    scenario: str | None = None,
    ranks: LaunchRanks | None = None,
) -> None:
    """Raise `UserError` where options cannot take effect on this machine or in this launch.

    Args:
        config: passed `check_options`.
        on_gpu: whether the processes train on NVIDIA GPUs.
        mode: the sharding mode, 'single' for one process; 'auto' is decided by now.
        compute: what layers outside fp8 compute in: fp32, bf16 or fp16.
        scenario: the fp8 recipe that runs; None outside fp8.
        ranks: this process among those of the launch; None for one.
    """
    check_declared(config, mode)
    _check_mode(config, mode)
    ranks = ranks or LaunchRanks()
    kind, data, size = config.optim.optimizer, config.data, config.parallel.context_parallel_size
    if config.model.use_te and not on_gpu:
        raise UserError("--use_te needs an NVIDIA GPU, and none is found; --use_te=false trains on the CPU.")
    if config.run.certify and not on_gpu:
        raise UserError("--certify records the kernels of an NVIDIA GPU and this run has none; drop it.")
    in_bf16 = {
        f"--optimizer {kind}": kind in ("adamw_master", "adamw_8bit"),
        "--cuda_graphs": config.model.cuda_graphs,
        "--context_parallel_size": size > 1 and compute == "fp32",
        "--offload_optimizer with --optimizer auto": kind == "auto" and config.optim.offload_optimizer > 0,
    }
    for flag, is_asked in in_bf16.items():
        if is_asked and compute != "bf16":
            raise UserError(f"{flag} needs a run that computes in bf16: use --mixed_precision bf16 or fp8, or drop it.")
    if config.optim.offload_optimizer > 0 and kind == "auto" and not on_gpu:
        raise UserError("--offload_optimizer needs --optimizer adamw_master, which auto takes on a GPU alone; name it.")
    multiple = token_multiple(scenario)
    if data.batch_size * data.max_seq_length % (size * multiple) != 0:
        _refuse_tokens(config, multiple, f"--fp8_scenario {scenario} needs")
    if ranks.world_size % size != 0:
        raise UserError(f"--context_parallel_size {size} does not divide the {ranks.world_size} processes; change it.")
    if mode == "fsdp_hybrid" and not 1 <= ranks.local_world_size < ranks.world_size:
        raise UserError(
            f"--sharding_mode fsdp_hybrid shards over the {ranks.local_world_size} GPUs of a host and replicates over "
            f"hosts, and there are {ranks.world_size} GPUs in all; use fsdp_full."
        )


def check_decoder(
    config: Config,
    *,
    scenario: str | None,
    windows: Iterable[int | None],
    attention_dropout: float,
    weights: Iterable[tuple[int, int]],
    num_shards: int,
) -> None:
    """Raise `UserError` where options cannot take effect with a TE decoder of these sliding `windows` (in tokens, None
    where a layer has none), this dropout and these `weights` [rows, columns] of a layer, split over `num_shards` GPUs.
    """
    size = config.parallel.context_parallel_size
    if size > 1 and any(window is not None for window in windows):
        raise UserError(
            f"--context_parallel_size {size} cannot go with sliding-window attention (sliding_window in the model's "
            "config.json), which the ring that passes keys and values does not have; drop it."
        )
    if config.model.cuda_graphs and attention_dropout > 0:
        raise UserError(
            f"--cuda_graphs repeats the random numbers of attention dropout, and the model's config.json has "
            f"attention_dropout {attention_dropout}; drop it."
        )
    if not config.parallel.fp8_params:
        return
    if scenario not in fp8_params_recipes():  # one that it fell back to
        _refuse_scales(scenario, "te")
    if rows := [rows for rows, _ in weights if rows % num_shards != 0]:
        raise UserError(
            f"--fp8_params splits the rows of weights evenly, and {rows[0]} rows cannot be split over {num_shards} "
            "GPUs; use a number of GPUs that divides them, or drop it."
        )
