"""What the options must satisfy: tables of sentences, each with the condition under which it is the error.

`check_options` looks at the options alone: it refuses what no machine could run, before torch is imported.
`check_machine` compares them with the GPU, the installed packages, the launch and the model (`MachineFacts`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llm_fp8.config.options import (
    ALL_LINEAR,
    AUTO_BATCH_SIZE,
    COLUMN_NAMES,
    DECODER_LINEARS,
    FP8_GATHER_MODES,
    TRAINING_OPTIONS,
    Config,
    LoraConfig,
    PrecisionConfig,
)
from llm_fp8.config.recipes import DEFAULT, FP8_SIZE_MULTIPLE, RECIPES, chosen, recipe_names, taking, token_multiple
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks

RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "at least 1",
        lambda value: value >= 1,
        "max_seq_length num_epochs gradient_accumulation_steps log_every save_total_limit amax_history_len "
        "preprocessing_workers num_of_samples max_steps eval_batches "
        "context_parallel_size",
    ),
    (
        "a finite number that is not negative",
        lambda value: 0 <= value < math.inf,
        "learning_rate num_warmup_steps weight_decay max_grad_norm save_every eval_every "
        "early_stopping_patience save_minutes "
        "empty_cache_freq lora_rank",
    ),
    (
        "at least 0 and below 1",
        lambda value: 0 <= value < 1,
        "adam_beta2 validation_fraction lora_dropout",
    ),
    ("a finite number above 0", lambda value: 0 < value < math.inf, "lora_alpha"),
    ("from 0 to 1", lambda value: 0 <= value <= 1, "offload_optimizer"),
    ("from 0 to 2**32 - 1", lambda value: 0 <= value < 2**32, "seed"),
)
"""What a number must be, and the options that are such numbers where they are given."""
RECIPE_OPTIONS = ("fp8_format", "amax_history_len", "amax_compute_algo")
"""Options that some recipes take (`Recipe.options`)."""
HOST_RESERVE_GIB = 4.0
"""Host memory that is left to the programs themselves where --offload_optimizer takes some; a guess."""


Checks = Mapping[str, Any]
"""Sentence -> whether it is true, which makes it the error."""


def _refuse(wrong: Checks) -> None:
    """Raise `UserError` with the first sentence that is true."""
    for sentence, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(sentence)


def check_options(config: Config) -> None:
    """Raise `UserError` for options that no machine could run with."""
    for checks in (_range_checks, _data_checks, _attention_checks, _graph_checks, _precision_checks, _lora_checks):
        _refuse(checks(config))
    if config.parallel.sharding_mode != "auto":
        _refuse(_mode_checks(config, config.parallel.sharding_mode))
    run, kind = config.run, config.optim.optimizer
    _refuse(
        {
            f"--offload_optimizer moves the state of adamw_master, and --optimizer {kind} has another; use "
            "adamw_master or auto, or drop it.": config.optim.offload_optimizer > 0
            and kind not in ("auto", "adamw_master"),
            f"--wandb_project '{run.wandb_project}': W&B takes 1 to 128 characters, none of them in /\\#?%:.": (
                re.fullmatch(r"[^/\\#?%:]{1,128}", run.wandb_project) is None
            ),
            "--output_dir is empty; give a folder ('.' for the current one), or drop it.": run.output_dir == "",
            "--resume_from latest needs --output_dir, the folder of the run to continue.": (
                run.resume_from == "latest" and run.output_dir is None
            ),
            "--allow_changed has no effect without --resume_from; add it.": (
                run.allow_changed is not None and run.resume_from is None
            ),
            **{
                f"--allow_changed: '{name}' is not among {', '.join(TRAINING_OPTIONS)}.": name not in TRAINING_OPTIONS
                for name in config.allowed_changes
            },
            "--keep_best compares evaluations during training and needs --eval_every; add it.": (
                run.keep_best and run.eval_every == 0
            ),
            f"--early_stopping_patience {run.early_stopping_patience} counts evaluations during training and needs "
            "--eval_every; add it.": run.early_stopping_patience > 0 and run.eval_every == 0,
        }
    )


def refuse_auto(config: Config) -> None:
    """Raise `UserError` for an option that is `auto`, where nothing settles what it comes to."""
    auto = {
        "--batch_size": config.data.batch_size == AUTO_BATCH_SIZE,
        "--mixed_precision": config.precision.mixed_precision == "auto",
    }
    _refuse(
        {f"{flag} auto is settled by a training script on a GPU; give a value.": wrong for flag, wrong in auto.items()}
    )


def _range_checks(config: Config) -> Checks:
    options: dict[str, Any] = {name: value for section in config.to_dict().values() for name, value in section.items()}
    too_large: dict[str, Any] = {
        f"--{name} must be below 2**31.": isinstance(value, int) and value >= 2**31 and name != "seed"
        for name, value in options.items()
    }
    return too_large | {
        f"--{name} must be {wanted}, not {options[name]}.": options[name] is not None and not fits(options[name])
        for wanted, fits, names in RANGES
        for name in names.split()
    }


def _data_checks(config: Config) -> Checks:
    data, size = config.data, config.parallel.context_parallel_size
    length, tokens = data.max_seq_length, data.max_seq_length * data.batch_size
    by_multiples = config.precision.may_be_fp8 or config.packing
    columns, theirs = data.column_names, list(data.column_names.values())
    return {
        f"--validation_fraction {data.validation_fraction} has no effect with --eval_dataset_name; drop one.": (
            data.validation_fraction is not None and data.eval_dataset_name is not None
        ),
        f"--validation_fraction {data.validation_fraction} has no effect with --validation_split_name "
        f"{data.validation_split_name}; drop one.": (
            data.validation_fraction is not None
            and data.validation_split_name is not None
            and data.eval_dataset_name is None
        ),
        f"--dataset_weights {data.dataset_weights} must be numbers above 0, one for each dataset, as in 0.7,0.3.": (
            not all(weight > 0 for weight in data.weights or []) or not math.isfinite(sum(data.weights or []))
        ),
        f"--columns '{data.columns}' must be pairs of our name and the dataset's, as in "
        "problem=question,generated_solution=answer, and name no column twice.": data.columns is not None
        and (not all(columns.values()) or len(set(theirs)) != len(data.columns.split(","))),
        **{
            f"--columns {ours}=...: '{ours}' is none of our columns, which are {', '.join(COLUMN_NAMES)}.": (
                ours not in COLUMN_NAMES
            )
            for ours in columns
        },
        f"--batch_size {data.batch_size} times --max_seq_length {length} is {tokens} tokens, which is not a "
        f"multiple of {FP8_SIZE_MULTIPLE} as fp8 kernels and packed sequences need; choose a --max_seq_length that "
        "is.": by_multiples and tokens % FP8_SIZE_MULTIPLE != 0,
        f"--context_parallel_size {size} cuts every sequence into {2 * size} chunks of equal length, and "
        f"--max_seq_length {length} is not a multiple of {2 * size}; choose one that is.": (
            size > 1 and length % (2 * size) != 0
        ),
        "--streaming does not know how many rows there are; add --max_steps.": (
            data.streaming and config.optim.max_steps is None
        ),
    }


def _attention_checks(config: Config) -> Checks:
    flag, use_te = f"--attn_implementation {config.model.attn_implementation}", config.model.use_te
    return {
        f"{flag} has no effect with --use_te, whose attention is Transformer Engine's; drop one.": (
            use_te and config.model.attn_implementation != "auto"
        ),
    }


def _graph_checks(config: Config) -> Checks:
    """What --cuda_graphs cannot go with, whatever the machine."""
    model, asked = config.model, config.model.cuda_graphs
    rank = config.lora.lora_rank
    return {
        "--cuda_graphs captures the TE decoder; add --use_te.": asked and not model.use_te,
        "--cuda_graphs needs micro-batches of one shape, which packing makes; drop --no_packing, or --cuda_graphs.": (
            asked and not config.packing
        ),
        "--cuda_graphs cannot go with --gradient_checkpointing, whose recomputation reads the random state on the "
        "host; drop one of them.": asked and model.gradient_checkpointing,
        f"--cuda_graphs cannot go with --lora_rank {rank}, whose frozen weights are cast to fp8 once; drop one of "
        "them.": asked and rank > 0,
        "--cuda_graphs lets a first micro-batch's GEMMs begin the gradients anew, which they do where "
        "casts are kept; drop it, or --fp8_recast_weights.": asked and config.precision.fp8_recast_weights,
        "--cuda_graphs all-reduces gradients behind the last micro-batch; drop it, or --sync_every_micro_batch.": (
            asked and config.parallel.sync_every_micro_batch
        ),
        "--cuda_graphs is for bf16 parameters, and --optimizer adamw_fp32 keeps them in fp32; use auto, adamw_master "
        "or adamw_8bit.": asked and config.optim.optimizer == "adamw_fp32",
    }


def _precision_checks(config: Config) -> Checks:
    """--mixed_precision, and what goes with fp8, one of its backends or one of its recipes only."""
    options, unset = config.precision, PrecisionConfig()
    backend, scenario, mixed = options.fp8_backend, options.fp8_scenario, options.mixed_precision
    own, other, torchao = recipe_names(backend), "torchao" if backend == "te" else "te", backend == "torchao"
    if scenario not in (DEFAULT, *own):
        raise UserError(
            f"--fp8_scenario {scenario} is a recipe of --fp8_backend {other}, and those of --fp8_backend {backend} "
            f"are {', '.join(own)}; change one of them."
        )
    recipe = RECIPES[chosen(scenario, backend)]
    gathers = torchao and config.parallel.fp8_params
    without = "without --mixed_precision fp8" if mixed is None else f"with --mixed_precision {mixed}"
    return {
        f"--fp8_params gathers a weight with the one scale of tensorwise, and --fp8_scenario {scenario} has "
        "one per row; drop one of them.": gathers and not recipe.one_scale_per_weight,
        "--use_te builds the decoder from Transformer Engine's modules, which --fp8_backend torchao cannot "
        "convert; drop one of them.": torchao and config.model.use_te,
        "--fp8_recast_weights is of Transformer Engine's modules; torchao keeps no casts, so drop it.": (
            torchao and options.fp8_recast_weights
        ),
        **{
            f"--{name} has no effect {without}; use --mixed_precision fp8 or drop it.": (
                not options.may_be_fp8 and name != "mixed_precision" and getattr(options, name) != getattr(unset, name)
            )
            for name in vars(unset)
        },
        **{
            f"--{name} has no effect with --fp8_scenario {recipe.name}, only with {', '.join(taking(name))}; drop "
            "one of them.": getattr(options, name) is not None and name not in recipe.options
            for name in RECIPE_OPTIONS
        },
    }


def _lora_checks(config: Config) -> Checks:
    options, unset = config.lora, LoraConfig()
    if options.lora_rank == 0:
        return {
            f"--{name} {value} has no effect without --lora_rank; add it or drop --{name}.": value
            != getattr(unset, name)
            for name, value in vars(options).items()
        }
    names, flag = options.targets, f"--lora_rank {options.lora_rank}"
    unknown = [name for name in names if name not in (*DECODER_LINEARS, ALL_LINEAR)]
    mode = config.parallel.sharding_mode
    return {
        f"--lora_targets '{options.lora_targets}' names no layer; give names such as q_proj,v_proj, or "
        f"{ALL_LINEAR}.": not names,
        f"--lora_targets {options.lora_targets} names a layer twice.": len(set(names)) < len(names),
        f"--lora_targets {options.lora_targets}: {ALL_LINEAR} stands alone, since it means all of them.": (
            ALL_LINEAR in names and len(names) > 1
        ),
        f"--lora_targets {', '.join(unknown)}: with --use_te the layers are {', '.join(DECODER_LINEARS)}, or "
        f"{ALL_LINEAR}.": config.model.use_te and unknown,
        f"{flag} cannot go with --sharding_mode {mode}; use ddp or an fsdp mode.": mode.startswith("deepspeed"),
        f"{flag} cannot go with --fp8_backend torchao, whose layers compute the gradients of frozen weights too; "
        "use --fp8_backend te.": (config.precision.may_be_fp8 and config.precision.fp8_backend == "torchao"),
        f"--fp8_params gives trained weights an fp8 form, and {flag} freezes them; drop one of them.": (
            config.parallel.fp8_params
        ),
        f"--fp8_recast_weights cannot go with {flag}, whose frozen weights are cast once; drop it.": (
            config.precision.fp8_recast_weights
        ),
        f"--offload_optimizer has next to nothing to move with {flag}, whose frozen weights have no optimizer state; "
        "drop it.": config.optim.offload_optimizer > 0,
    }


def _mode_checks(config: Config, mode: str) -> Checks:
    """What cannot go with the run's sharding mode: one of `SHARDING_MODES`, or 'single'."""
    options, precision = config.parallel, config.precision
    flag = "one GPU" if mode == "single" else f"--sharding_mode {mode}"
    sharded, deepspeed = mode.startswith("fsdp"), mode.startswith("deepspeed")
    use_te, size, kind = config.model.use_te, options.context_parallel_size, config.optim.optimizer
    lacking_for_fp8_params = _lacking(
        {
            "such a mode": sharded and mode != "fsdp_offload",
            "--use_te": use_te or precision.fp8_backend == "torchao",
            "--mixed_precision fp8": precision.may_be_fp8,
        }
    )
    lacking_for_context = _lacking({"--use_te": use_te, "an fsdp mode": sharded})
    return {
        f"--cuda_graphs needs a copy of the model on each GPU, and this run has {flag}; use ddp, or drop it.": (
            config.model.cuda_graphs and mode not in ("single", "ddp")
        ),
        f"--mixed_precision fp16 cannot go with {flag}, which would shard what its gradient scaler has to see; use "
        "bf16.": precision.mixed_precision == "fp16" and mode not in ("ddp", "single"),
        f"--optimizer adamw_8bit cannot go with {flag}: its 8-bit blocks cannot be split over GPUs; use "
        "--optimizer auto, or --sharding_mode ddp.": kind == "adamw_8bit" and (sharded or deepspeed),
        f"--optimizer {kind} cannot go with {flag}, where DeepSpeed keeps fp32 master weights itself; use auto or "
        "adamw_fp32.": deepspeed and kind not in ("auto", "adamw_fp32"),
        f"--offload_optimizer cannot go with {flag}; use --sharding_mode ddp, one GPU, or fsdp_offload without it.": (
            config.optim.offload_optimizer > 0 and mode not in ("single", "ddp")
        ),
        f"--fp8_recast_weights cannot go with {flag}; use --fp8_params or fsdp_full, which keep no casts.": (
            precision.fp8_recast_weights and mode not in ("single", "ddp")
        ),
        "--fp8_params needs an fsdp mode other than fsdp_offload, --use_te and --mixed_precision fp8; this run has "
        f"{flag} and lacks {lacking_for_fp8_params}.": options.fp8_params and lacking_for_fp8_params,
        f"--fp8_params keeps fp32 master weights, which --optimizer {kind} has not; use adamw_fp32 or auto.": (
            options.fp8_params and kind not in ("auto", "adamw_fp32")
        ),
        f"--fp8_params with --fp8_backend torchao needs --sharding_mode {' or '.join(FP8_GATHER_MODES)}, and this run "
        f"has {flag}; change the mode or drop it.": (
            options.fp8_params and precision.fp8_backend == "torchao" and mode not in FP8_GATHER_MODES
        ),
        f"--fp8_backend torchao cannot go with {flag}: DeepSpeed moves parameters in and out of modules that "
        "torchao compiles; use ddp or an fsdp mode.": deepspeed and precision.fp8_backend == "torchao",
        f"--context_parallel_size {size} needs --use_te and an fsdp mode; this run has {flag} and lacks "
        f"{lacking_for_context}.": size > 1 and lacking_for_context,
        f"--deepspeed_config {options.deepspeed_config} has no effect with {flag}; use a deepspeed mode or drop "
        "it.": options.deepspeed_config is not None and not deepspeed,
        f"--async_save cannot go with {flag}, whose checkpoints DeepSpeed writes itself; drop it.": (
            options.async_save and deepspeed
        ),
        f"--sync_every_micro_batch has no effect with {flag}, which decides that itself; drop it.": (
            options.sync_every_micro_batch and (deepspeed or mode == "single")
        ),
    }


def _lacking(needed: dict[str, bool]) -> str:
    """The names of what is not there, for a sentence."""
    return ", ".join(name for name, there in needed.items() if not there)


@dataclass(frozen=True)
class ModelFacts:
    """What options depend on in a model."""

    num_layers: int
    lm_head: tuple[int, int] | None = None
    """[vocabulary, hidden size]."""
    head_dim: int | None = None
    attention_dropout: float = 0.0
    windows: tuple[int | None, ...] = ()
    """Sliding windows of the layers in tokens, None where a layer has none."""
    layer_weights: tuple[tuple[int, int], ...] = ()
    """[rows, columns] of the linear weights of a decoder layer. Known, as what stands above, of TE decoders."""


@dataclass(frozen=True)
class MachineFacts:
    """What a run finds: the machine, the launch, the model, and what the options came to there."""

    ranks: LaunchRanks = LaunchRanks()
    sharding_mode: str = "single"
    """One of `SHARDING_MODES`, or 'single'; 'auto' is decided by now."""
    device: str = "cuda"
    """torch's name of the device type."""
    capability: tuple[int, int] | None = None
    """Compute capability of the GPU; None on a CPU or where it is not known."""
    compute: str = "bf16"
    """What layers outside fp8 compute in: fp32, bf16 or fp16."""
    scenario: str | None = None
    """The fp8 recipe that runs; None outside fp8."""
    offloaded_gib: float = 0.0
    """Optimizer state that the processes of this host keep in its memory (--offload_optimizer)."""
    free_host_gib: float = math.inf
    """Memory of the host that is free; known where some is needed."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Of the packages that the run needs (`packages_needed`) those that it cannot use, with the sentence to say."""
    model: ModelFacts | None = None
    """None where it is not known."""


def packages_needed(config: Config, device: str, rank: int = 0) -> dict[str, str]:
    """The packages that a run needs beyond those it always has -> the flag that asks for it."""
    model, parallel = config.model, config.parallel
    mode = parallel.sharding_mode
    needed = {
        "transformer_engine": ("--use_te", model.use_te),
        "triton": (
            f"--optimizer {config.optim.optimizer}",
            (config.optim.optimizer in ("adamw_master", "adamw_8bit") or config.optim.offload_optimizer > 0)
            and device == "cuda",
        ),
        "peft": (f"--lora_rank {config.lora.lora_rank}", config.lora.lora_rank),
        "deepspeed": (f"--sharding_mode {mode}", mode.startswith("deepspeed")),
        # Only the first process of a launch talks to W&B.
        "wandb": ("--use_wandb", config.run.use_wandb and rank == 0),
    }
    return {package: flag for package, (flag, is_needed) in needed.items() if is_needed}


def check_machine(config: Config, facts: MachineFacts) -> None:
    """Raise `UserError` where options cannot take effect on this machine, in this launch or with this model."""
    on_gpu, kind, share = facts.device == "cuda", config.optim.optimizer, config.optim.offload_optimizer
    _refuse(
        {
            "--use_te needs an NVIDIA GPU, and none is found; --use_te=false trains on the CPU.": (
                config.model.use_te and not on_gpu
            ),
            "--certify records the kernels of an NVIDIA GPU and this run has none; drop it.": (
                config.run.certify and not on_gpu
            ),
            f"--optimizer {kind} keeps the parameters in bf16 and needs a run that computes in bf16: --mixed_precision "
            "bf16 or fp8, or use --optimizer adamw_fp32.": (
                kind not in ("auto", "adamw_fp32") and facts.compute != "bf16"
            ),
            "--cuda_graphs needs a run that computes in bf16: --mixed_precision bf16 or fp8; use one of them, or drop "
            "it.": config.model.cuda_graphs and facts.compute != "bf16",
            "--offload_optimizer moves the state of adamw_master, which --optimizer auto takes on a GPU in bf16 or fp8 "
            "alone; name it, with --mixed_precision bf16 or fp8, or drop --offload_optimizer.": (
                share > 0 and kind == "auto" and not (on_gpu and facts.compute == "bf16")
            ),
            **dict.fromkeys(facts.problems.values(), True),
        }
    )
    _refuse(_token_checks(config, facts))
    if config.parallel.sharding_mode == "auto":
        _refuse(_mode_checks(config, facts.sharding_mode))
    _refuse(_host_checks(share, facts.offloaded_gib, facts.free_host_gib))
    _refuse(_rank_checks(config, facts))
    if facts.model is not None:
        _check_model(config, facts, facts.model)


def _host_checks(share: float, needed_gib: float, free_gib: float) -> Checks:
    room_gib = free_gib - HOST_RESERVE_GIB
    fitting = math.floor(100 * share * max(0.0, room_gib) / needed_gib) / 100 if needed_gib > room_gib else share
    return {
        f"--offload_optimizer {share:g} takes {needed_gib:.1f} GiB of this host's memory, {free_gib:.1f} GiB are free, "
        f"and the programs need some {HOST_RESERVE_GIB:g} themselves; use {fitting:g} or less, or --optimizer "
        "adamw_8bit on the GPU.": needed_gib > room_gib,
    }


def _token_checks(config: Config, facts: MachineFacts) -> Checks:
    data, size, multiple = config.data, config.parallel.context_parallel_size, token_multiple(facts.scenario)
    tokens = data.batch_size * data.max_seq_length
    product = f"--batch_size {data.batch_size} times --max_seq_length {data.max_seq_length}"
    return {
        f"--fp8_scenario {facts.scenario} needs a multiple of {multiple} tokens in a micro-batch, and {product} is "
        f"{tokens}; choose a --max_seq_length that is a multiple of {multiple}.": tokens % multiple != 0,
        f"--context_parallel_size {size} leaves each GPU 1/{size} of the {tokens} tokens of {product}, which is no "
        f"multiple of {multiple} as this precision needs; choose a --max_seq_length that is a multiple of "
        f"{size * multiple}.": tokens % (size * multiple) != 0,
    }


def _rank_checks(config: Config, facts: MachineFacts) -> Checks:
    size, world_size = config.parallel.context_parallel_size, facts.ranks.world_size
    shard = facts.ranks.local_world_size
    return {
        f"--context_parallel_size {size} does not divide the {world_size} processes; choose a size that does.": (
            world_size % size != 0
        ),
        f"--context_parallel_size {size} needs attention in bf16, and this run computes in {facts.compute}; use "
        "--mixed_precision bf16 or fp8.": size > 1 and facts.compute == "fp32",
        f"--sharding_mode fsdp_hybrid shards over {shard} GPUs, those of a host, "
        f"and replicates, which {world_size} GPUs cannot be divided into; use fsdp_full.": (
            facts.sharding_mode == "fsdp_hybrid" and (world_size % shard != 0 or world_size == shard)
        ),
    }


def _check_model(config: Config, facts: MachineFacts, model: ModelFacts) -> None:
    size = config.parallel.context_parallel_size
    _refuse(
        {
            f"--context_parallel_size {size} cannot go with this model's sliding-window attention (sliding_window in "
            "its config.json), which the ring that passes keys and values between GPUs does not have; drop it.": (
                size > 1 and any(window is not None for window in model.windows)
            ),
            "--cuda_graphs repeats the random numbers of attention dropout, and this model's config.json has "
            f"attention_dropout {model.attention_dropout}; drop it.": (
                config.model.cuda_graphs and model.attention_dropout > 0
            ),
        }
    )
    if config.parallel.fp8_params and config.precision.fp8_backend == "te":
        hybrid = facts.sharding_mode == "fsdp_hybrid"
        num_shards = facts.ranks.local_world_size if hybrid else facts.ranks.world_size
        check_fp8_params(facts.scenario, model.layer_weights, num_shards)


def fp8_params_recipes() -> list[str]:
    """Recipes of Transformer Engine with one scale per weight, which --fp8_params needs."""
    return [name for name in recipe_names("te") if RECIPES[name].one_scale_per_weight]


def check_fp8_params(scenario: str | None, weights: Iterable[tuple[int, int]], num_shards: int) -> None:
    """Raise `UserError` where weights [rows, columns] cannot be kept in fp8, split evenly over `num_shards` GPUs."""
    able = fp8_params_recipes()
    _refuse(
        {
            f"--fp8_params keeps one scale per weight, and --fp8_scenario {scenario} has other ones; use "
            f"{' or '.join(able)}, or drop --fp8_params.": scenario not in able,
            **{
                f"--fp8_params splits the rows of every weight evenly, and a weight of {rows} x {columns} cannot be "
                f"split over {num_shards} GPUs; use a number of GPUs that divides {rows}, or drop --fp8_params.": (
                    rows % num_shards != 0
                )
                for rows, columns in weights
            },
        }
    )
