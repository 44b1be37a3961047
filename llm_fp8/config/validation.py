"""Check the options before torch is imported. `llm_fp8.settle` later checks them against the machine."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from llm_fp8.config import options
from llm_fp8.config.options import ALL_LINEAR, EXPERTS, Config, names_in
from llm_fp8.config.recipes import DEFAULT, FP8_SIZE_MULTIPLE, RECIPE_OPTIONS, RECIPES, recipe_for, recipe_names
from llm_fp8.utils.errors import UserError, did_you_mean, reading


def check_declared(config: Config, mode: str | None = None) -> None:
    """Raise `UserError` if a condition in an option's `needs` is not met, or one in its `excludes` is. `mode` is the
    run's sharding mode. If it is None and --sharding_mode is 'auto', `needs` about the mode are not checked.
    """
    values = {**config.options, "packing": config.packing, "sharding_mode": mode or config.parallel.sharding_mode}
    values["use_wandb"] = bool(config.run.trackers)  # W&B's options apply to every tracker

    def is_met(condition: str) -> bool:
        if " or " in condition:
            return any(map(is_met, condition.split(" or ")))
        if " and " in condition:
            return all(map(is_met, condition.split(" and ")))
        name, _, allowed = condition.partition("=")
        patterns = allowed.split("|")
        return any(fnmatchcase(str(values[name]), pattern) for pattern in patterns) if allowed else bool(values[name])

    for name, field in options.FIELDS.items():
        value = values[name]
        if value is False or value == field.default:
            continue
        flag = f"--{name}" if value is True else f"--{name} {value}"
        for condition in field.metadata["needs"]:
            is_open = condition.startswith("sharding_mode") and values["sharding_mode"] == "auto"
            if not (is_open or is_met(condition)):
                raise UserError(f"{flag} needs {_flags(condition, name)}; add it or drop --{name}.")
        for condition, reason in field.metadata["excludes"].items():
            if is_met(condition):
                other = _flags(condition, name)
                raise UserError(f"{flag} cannot be combined with {other}: {reason}; drop one of them.")


def refusal(config: Config, mode: str | None = None) -> str | None:
    """Return why the options exclude each other (see `check_declared`) or the fp8 recipe, or None if they do not."""
    try:
        check_declared(config, mode)
        _check_recipe(config)
    except UserError as error:
        return str(error).partition(";")[0]
    return None


def _flags(condition: str, name: str) -> str:
    """Write `condition` as flags: 'a=x|y or b' becomes '--a x or y or --b'. Leave out parts about the option `name`."""
    parts = [f"--{part}" for part in condition.split(" and ") if not part.startswith(f"{name}=")]
    flags = " and ".join(parts).replace(" or ", " or --").replace("=", " ").replace("|", " or ")
    return flags.replace("--sharding_mode single or", "one GPU or --sharding_mode")


def check_options(config: Config) -> None:
    """Raise `UserError` for options that cannot run on any machine."""
    check_declared(config)
    _check_recipe(config)
    _check_names(config)
    run, max_tokens, size = config.run, config.data.max_seq_length, config.parallel.context_parallel_size
    if size > 1 and max_tokens % (2 * size) != 0:
        raise UserError(f"--context_parallel_size {size} needs a --max_seq_length that is a multiple of {2 * size}.")
    if config.precision.mixed_precision == "fp8" or config.packing:
        check_tokens(config, FP8_SIZE_MULTIPLE, "fp8 kernels and packed sequences")
    if config.data.streaming and "epoch" in (run.save_every, run.eval_every):
        raise UserError("--save_every and --eval_every take no epoch with --streaming: its length is unknown.")
    if run.output_dir == "":
        raise UserError("--output_dir is empty; give a folder, or drop it.")
    if run.resume_from == "latest" and run.output_dir is None:
        raise UserError("--resume_from latest needs --output_dir, the folder of the run to continue.")


def _check_recipe(config: Config) -> None:
    """Check that the back end has the chosen recipe, and that the recipe accepts the options that are set."""
    precision, scenario = config.precision, config.precision.fp8_scenario
    if (backend := precision.fp8_backend) == "auto":  # the machine may allow both for the default recipe
        backend = "te" if scenario == DEFAULT or config.model.use_te else RECIPES[scenario].backend
    if scenario not in (DEFAULT, *recipe_names(backend)):
        available = " or ".join(recipe_names(backend))
        raise UserError(f"--fp8_scenario {scenario} is not available with --fp8_backend {backend}; use {available}.")
    recipe_name = recipe_for(scenario, backend)
    recipe = RECIPES[recipe_name]
    for name in RECIPE_OPTIONS:
        if getattr(precision, name) is not None and name not in recipe.options:
            raise UserError(f"--{name} has no effect with --fp8_scenario {recipe_name}; drop one of them.")
    if config.parallel.fp8_params:
        if not recipe.one_scale_per_weight:
            supported = ", ".join(name for name, row in RECIPES.items() if row.one_scale_per_weight)
            raise UserError(f"--fp8_params does not support --fp8_scenario {recipe_name}, only {supported}.")
        if config.trains_adapters and config.draws_weights and config.run.export:
            raise UserError("--fp8_params keeps a frozen model's random weights only in fp8; add --no_export.")


def _check_names(config: Config) -> None:
    """Check the options whose values are comma-separated names or numbers."""
    data, targets = config.data, config.lora.targets
    if not targets or (ALL_LINEAR in targets and not {*targets} <= {ALL_LINEAR, EXPERTS}):
        raise UserError(f"--lora_targets must name layers, as in q_proj,v_proj, or be {ALL_LINEAR}[,{EXPERTS}].")
    with reading("--dataset_weights", data.dataset_weights, "numbers", "Give shares, as in 0.7,0.3."):
        weights = data.weights or []
    if not all(0 < weight < math.inf for weight in weights):
        raise UserError(f"--dataset_weights {data.dataset_weights} must be above 0, as in 0.7,0.3.")
    dataset_columns = set(data.column_names.values())
    if data.columns is not None and ("" in dataset_columns or len(dataset_columns) != len(data.columns.split(","))):
        raise UserError(f"--columns '{data.columns}' must be pairs, as in problem=question,generated_solution=answer.")
    settings = dict.fromkeys([*options.SETTINGS, *options.SETTINGS.values()])
    for flag, names, choices in (
        ("--columns", data.column_names, options.COLUMN_NAMES),
        ("--allow_changed", names_in(config.run.allow_changed), settings),
    ):
        if unknown := [name for name in names if name not in choices]:
            hint = did_you_mean(unknown[0], choices)
            raise UserError(f"{flag}: '{unknown[0]}' is not among {', '.join(choices)}{hint}.")


def check_tokens(config: Config, multiple: int, purpose: str) -> None:
    """Raise `UserError`, with `purpose` as the reason, unless `multiple` divides a GPU's tokens per micro-batch."""
    data, size = config.data, config.parallel.context_parallel_size
    if data.batch_size * data.max_seq_length % (size * multiple) != 0:
        raise UserError(f"--batch_size times --max_seq_length must be a multiple of {size * multiple} for {purpose}.")
