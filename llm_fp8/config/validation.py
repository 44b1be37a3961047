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

from llm_fp8.config.options import ALL_LINEAR, COLUMN_NAMES, DECODER_LINEARS, SECTIONS, TRAINING_OPTIONS, Config
from llm_fp8.config.recipes import DEFAULT, FP8_SIZE_MULTIPLE, RECIPES, chosen, recipe_names, token_multiple
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
        for condition in each.metadata["excludes"]:
            if holds(condition):
                other, is_listed, _ = condition.partition("=")
                found = f"--{other} {values[other]}" if is_listed or values[other] is not True else f"--{other}"
                raise UserError(f"{given} cannot go with {found}; drop one of them.")


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
    if config.precision.may_be_fp8 or config.packing:
        _check_tokens(config, FP8_SIZE_MULTIPLE, "fp8 kernels and packed sequences need")
    if size > 1 and data.max_seq_length % (2 * size) != 0:
        raise UserError(f"--context_parallel_size {size} needs a --max_seq_length that is a multiple of {2 * size}.")
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
        able = ", ".join(recipe_names(backend))
        raise UserError(f"--fp8_scenario {scenario} is not of --fp8_backend {backend}; use one of {able}.")
    recipe = RECIPES[chosen(scenario, backend)]
    for name in ("fp8_format", "amax_history_len", "amax_compute_algo"):
        if getattr(options, name) is not None and name not in recipe.options:
            able = ", ".join(each.name for each in RECIPES.values() if name in each.options)
            raise UserError(f"--{name} has no effect with --fp8_scenario {recipe.name}, only with {able}; drop one.")
    if config.parallel.fp8_params:
        _check_fp8_params(recipe.name)
        if not (config.model.use_te or backend == "torchao"):
            raise UserError("--fp8_params has no effect without --use_te or --fp8_backend torchao; add one.")


def _check_fp8_params(scenario: str | None) -> None:
    able = [name for name, recipe in RECIPES.items() if recipe.one_scale_per_weight]
    if scenario not in able:
        raise UserError(f"--fp8_params cannot go with --fp8_scenario {scenario}, only with {', '.join(able)}.")


def _check_names(config: Config) -> None:
    """Lists of names and numbers that are written with commas."""
    data, lora = config.data, config.lora
    if not all(0 < weight < math.inf for weight in data.weights or []):
        raise UserError(f"--dataset_weights {data.dataset_weights} must be numbers above 0, as in 0.7,0.3.")
    theirs = set(data.column_names.values())
    if data.columns is not None and ("" in theirs or len(theirs) != len(data.columns.split(","))):
        raise UserError(f"--columns '{data.columns}' must be pairs, as in problem=question,generated_solution=answer.")
    layers = (*DECODER_LINEARS, ALL_LINEAR) if config.model.use_te else ()  # else the model's own, seen later
    for flag, names, known in (
        ("--columns", data.column_names, COLUMN_NAMES),
        ("--allow_changed", config.allowed_changes, TRAINING_OPTIONS),
        ("--lora_targets", lora.targets, layers),
    ):
        if unknown := [name for name in names if known and name not in known]:
            raise UserError(f"{flag}: '{unknown[0]}' is not among {', '.join(known)}.")
    if not lora.targets or (ALL_LINEAR in lora.targets and len(lora.targets) > 1):
        raise UserError(f"--lora_targets '{lora.lora_targets}' must name layers (q_proj,v_proj), or be {ALL_LINEAR}.")


def _check_mode(config: Config, mode: str) -> None:
    """What single values of options cannot go with the sharding mode of the run, 'single' on one GPU."""
    kind, has = config.optim.optimizer, "one GPU" if mode == "single" else f"--sharding_mode {mode}"
    is_whole = mode in ("single", "ddp")
    if config.precision.mixed_precision == "fp16" and not is_whole:
        raise UserError(f"--mixed_precision fp16 cannot go with {has}; use bf16.")
    if (kind == "adamw_8bit" and not is_whole) or (kind == "adamw_master" and mode.startswith("deepspeed")):
        raise UserError(f"--optimizer {kind} cannot go with {has}; use --optimizer auto, or --sharding_mode ddp.")
    by_torchao = config.precision.fp8_backend == "torchao"
    if config.parallel.fp8_params and by_torchao and mode not in ("fsdp_full", "fsdp_grad"):
        raise UserError(f"--fp8_params with --fp8_backend torchao cannot go with {has}; use fsdp_full or fsdp_grad.")


def _check_tokens(config: Config, multiple: int, whose: str) -> None:
    data, size = config.data, config.parallel.context_parallel_size
    if data.batch_size * data.max_seq_length % (size * multiple) != 0:
        raise UserError(
            f"--batch_size {data.batch_size} times --max_seq_length {data.max_seq_length} must be a multiple of "
            f"{size * multiple}, as {whose}; choose a --max_seq_length that is one."
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
    kind, size = config.optim.optimizer, config.parallel.context_parallel_size
    offloads_auto = config.optim.offload_optimizer > 0 and kind == "auto"
    if config.model.use_te and not on_gpu:
        raise UserError("--use_te needs an NVIDIA GPU, and none is found; --use_te=false trains on the CPU.")
    if config.run.certify and not on_gpu:
        raise UserError("--certify records the kernels of an NVIDIA GPU and this run has none; drop it.")
    if offloads_auto and not on_gpu:
        raise UserError("--offload_optimizer needs --optimizer adamw_master, which auto takes on a GPU alone; name it.")
    in_bf16 = {
        f"--optimizer {kind}": kind in ("adamw_master", "adamw_8bit"),
        "--cuda_graphs": config.model.cuda_graphs,
        "--context_parallel_size": size > 1 and compute == "fp32",
        "--offload_optimizer with --optimizer auto": offloads_auto,
    }
    for flag, is_asked in in_bf16.items():
        if is_asked and compute != "bf16":
            raise UserError(f"{flag} needs a run that computes in bf16: use --mixed_precision bf16 or fp8, or drop it.")
    _check_tokens(config, token_multiple(scenario), f"--fp8_scenario {scenario} needs")
    if ranks.world_size % size != 0:
        raise UserError(f"--context_parallel_size {size} does not divide the {ranks.world_size} processes; change it.")
    if mode == "fsdp_hybrid" and ranks.local_world_size >= ranks.world_size:
        raise UserError("--sharding_mode fsdp_hybrid replicates over hosts, and there is one; use fsdp_full.")


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
    if config.parallel.context_parallel_size > 1 and any(window is not None for window in windows):
        raise UserError("--context_parallel_size cannot go with sliding-window attention (config.json); drop it.")
    if config.model.cuda_graphs and attention_dropout > 0:
        raise UserError("--cuda_graphs would repeat the random numbers of attention_dropout (config.json); drop it.")
    if config.parallel.fp8_params:
        _check_fp8_params(scenario)  # it may be one that was fallen back to
        if rows := [rows for rows, _ in weights if rows % num_shards != 0]:
            raise UserError(f"--fp8_params cannot split {rows[0]} rows of a weight over {num_shards} GPUs; drop it.")
