"""What the options must satisfy together, checked before anything is loaded."""

from __future__ import annotations

import math

from llm_fp8.config.options import (
    ALL_LINEAR,
    DECODER_LINEARS,
    TE_SCENARIOS,
    TORCHAO_SCENARIOS,
    WANDB_TAG_LENGTH,
    Config,
    LoraConfig,
    RunConfig,
)
from llm_fp8.utils.errors import UserError


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UserError(sentence)


def _check_attention(config: Config) -> None:
    """Raise `UserError` where --attn_implementation cannot go with other options."""
    asked, use_te = config.model.attn_implementation, config.model.use_te
    if not config.model.flash_attention_4:
        _require(
            not use_te or asked == "auto",
            f"--attn_implementation {asked} has no effect with --use_te, whose attention is Transformer Engine's, "
            "or flash_attention_4; drop one.",
        )
        return
    flag = f"--attn_implementation {asked}"
    _require(use_te, f"{flag} is attention of the TE decoder; add --use_te, or choose flash_attention_2.")
    _require(config.packing, f"{flag} is for packed rows; drop --no_packing, or {flag}.")
    mixed = config.precision.mixed_precision
    _require(
        mixed not in ("no", "fp16"),
        f"{flag}: its gradients were compared in bf16 alone; drop it, or --mixed_precision {mixed}.",
    )
    _require(
        config.parallel.context_parallel_size == 1,
        f"{flag} cannot share a row between GPUs; drop it, or --context_parallel_size "
        f"{config.parallel.context_parallel_size}.",
    )


def _check_fp8_backend(config: Config) -> None:
    """Raise `UserError` where --fp8_backend cannot go with other options."""
    options = config.precision
    backend, scenario = options.fp8_backend, options.fp8_scenario
    own, other = (TE_SCENARIOS, "torchao") if backend == "te" else (TORCHAO_SCENARIOS, "te")
    _require(
        scenario in ("default", *own),
        f"--fp8_scenario {scenario} is a recipe of --fp8_backend {other}, and this run has --fp8_backend {backend}, "
        f"whose recipes are {', '.join(own)}; change one of them.",
    )
    gathers = config.parallel.fp8_all_gather
    if backend == "te":
        _require(
            not gathers,
            "--fp8_all_gather belongs to --fp8_backend torchao; for Transformer Engine's modules there is "
            "--fp8_params.",
        )
        return
    _require(
        not gathers or scenario in ("default", "tensorwise"),
        f"--fp8_all_gather gathers a weight with the one scale of tensorwise scaling, and --fp8_scenario {scenario} "
        "has one per row; drop one of them.",
    )
    _require(
        not config.model.use_te,
        "--use_te builds the decoder from Transformer Engine's modules, which --fp8_backend torchao cannot convert; "
        "drop one of them.",
    )
    _require(
        options.fp8_lm_head == "none",
        f"--fp8_lm_head {options.fp8_lm_head} is computed by Transformer Engine and cannot go with --fp8_backend "
        "torchao; drop one of them.",
    )
    for name in ("fp8_format", "amax_history_len", "amax_compute_algo", "fp8_margin"):
        _require(
            getattr(options, name) is None,
            f"--{name} belongs to Transformer Engine's recipes and has no effect with --fp8_backend torchao; drop one "
            "of them.",
        )


def _check_lora(config: Config) -> None:
    """The part of `check_config` on adapters."""
    options, unset = config.lora, LoraConfig()
    _require(options.lora_rank >= 0, f"--lora_rank must be 0 (full fine-tuning) or more, not {options.lora_rank}.")
    if options.lora_rank == 0:
        for name in vars(unset):
            value = getattr(options, name)
            _require(
                value == getattr(unset, name),
                f"--{name} {value} has no effect without --lora_rank; add it or drop --{name}.",
            )
        return
    alpha, dropout = options.lora_alpha, options.lora_dropout
    _require(alpha is None or 0 < alpha < math.inf, f"--lora_alpha must be a finite number above 0, and is {alpha}.")
    _require(0.0 <= dropout < 1.0, f"--lora_dropout must be at least 0 and below 1, not {dropout}.")
    names = options.targets
    _require(
        len(names) > 0,
        f"--lora_targets '{options.lora_targets}' names no layer; give names such as q_proj,v_proj, or {ALL_LINEAR}.",
    )
    _require(len(set(names)) == len(names), f"--lora_targets {options.lora_targets} names a layer twice.")
    _require(
        ALL_LINEAR not in names or len(names) == 1,
        f"--lora_targets {options.lora_targets}: {ALL_LINEAR} stands alone, since it means all of them.",
    )
    unknown = [name for name in names if name not in (*DECODER_LINEARS, ALL_LINEAR)]
    _require(
        not (config.model.use_te and unknown),
        f"--lora_targets {', '.join(unknown)}: with --use_te the layers are {', '.join(DECODER_LINEARS)}, or "
        f"{ALL_LINEAR}.",
    )
    _require(
        not config.parallel.sharding_mode.startswith("deepspeed"),
        f"--lora_rank {options.lora_rank} cannot go with --sharding_mode {config.parallel.sharding_mode}; use ddp or "
        "an fsdp mode.",
    )
    _require(
        config.precision.mixed_precision != "fp8" or config.precision.fp8_backend == "te",
        f"--lora_rank {options.lora_rank} cannot go with --fp8_backend torchao, whose layers compute the gradients of "
        "frozen weights too; use --fp8_backend te.",
    )
    _require(
        not config.parallel.fp8_params,
        f"--fp8_params gives trained weights an fp8 form, and --lora_rank {options.lora_rank} freezes them; drop one "
        "of them.",
    )
    _require(
        config.run.export or not options.lora_merge, "--lora_merge has no effect with --no_export; drop one of them."
    )


def check_config(config: Config) -> None:
    """Raise `UserError` for values that no machine could run with; what depends on the machine is checked later."""
    positive = {
        "max_seq_length": config.data.max_seq_length,
        "batch_size": config.data.batch_size,
        "num_epochs": config.optim.num_epochs,
        "gradient_accumulation_steps": config.optim.gradient_accumulation_steps,
        "log_every": config.run.log_every,
        "save_total_limit": config.run.save_total_limit,
        "amax_history_len": config.precision.amax_history_len,
        "preprocessing_workers": config.data.preprocessing_workers,
        "num_of_samples": config.data.num_of_samples,
        "max_steps": config.optim.max_steps,
        "eval_batches": config.run.eval_batches,
        "eval_max_new_tokens": config.run.eval_max_new_tokens,
        "gradient_checkpointing_every": config.model.gradient_checkpointing_every,
        "context_parallel_size": config.parallel.context_parallel_size,
        "hybrid_shard_size": config.parallel.hybrid_shard_size,
    }
    for name, value in positive.items():
        _require(value is None or value > 0, f"--{name} must be at least 1, not {value}.")
    non_negative = {
        "learning_rate": config.optim.learning_rate,
        "num_warmup_steps": config.optim.num_warmup_steps,
        "weight_decay": config.optim.weight_decay,
        "max_grad_norm": config.optim.max_grad_norm,
        "save_every": config.run.save_every,
        "eval_every": config.run.eval_every,
        "eval_exact_match": config.run.eval_exact_match,
        "fp8_first_bf16_layers": config.precision.fp8_first_bf16_layers,
        "fp8_last_bf16_layers": config.precision.fp8_last_bf16_layers,
        "empty_cache_freq": config.parallel.empty_cache_freq,
    }
    for name, number in non_negative.items():
        _require(0 <= number < math.inf, f"--{name} must be a finite number that is not negative, and is {number}.")
    _require(
        config.model.gradient_checkpointing or config.model.gradient_checkpointing_every == 1,
        f"--gradient_checkpointing_every {config.model.gradient_checkpointing_every} has no effect without "
        "--gradient_checkpointing; add it.",
    )
    epsilon = config.optim.adam_epsilon
    _require(0 < epsilon < math.inf, f"--adam_epsilon must be above 0, and is {epsilon}.")
    _require(0 <= config.optim.seed < 2**32, f"--seed must be from 0 to 2**32 - 1, and is {config.optim.seed}.")
    for name in ("adam_beta1", "adam_beta2"):
        beta = getattr(config.optim, name)
        _require(0.0 <= beta < 1.0, f"--{name} must be at least 0 and below 1, not {beta}.")
    _check_lora(config)
    fraction = config.data.validation_fraction
    _require(0.0 <= fraction < 1.0, f"--validation_fraction must be at least 0 and below 1, not {fraction}.")
    _check_attention(config)
    _check_fp8_backend(config)
    for tag in config.wandb_tags:
        _require(
            len(tag) <= WANDB_TAG_LENGTH,
            f"--wandb_tags: '{tag}' has {len(tag)} characters, and W&B takes {WANDB_TAG_LENGTH} in a tag; shorten it.",
        )
    tokens = config.data.max_seq_length * config.data.batch_size
    if config.precision.mixed_precision == "fp8" or config.packing:
        _require(
            tokens % 16 == 0,
            f"--batch_size {config.data.batch_size} times --max_seq_length {config.data.max_seq_length} is {tokens} "
            "tokens, which is not a multiple of 16 as fp8 kernels and packed rows need; choose a --max_seq_length "
            "that is a multiple of 16.",
        )
    _require(
        not (config.run.resume_from == "latest" and config.run.output_dir is None),
        "--resume_from latest needs --output_dir, the folder of the run to continue.",
    )
    _require(
        not (config.data.streaming and config.run.eval_exact_match),
        f"--eval_exact_match {config.run.eval_exact_match} needs to look problems up by row, which --streaming "
        "cannot; drop it and evaluate the trained model with scripts/evaluate.py.",
    )
    _require(
        config.run.eval_exact_match > 0 or config.run.eval_max_new_tokens == RunConfig.eval_max_new_tokens,
        f"--eval_max_new_tokens {config.run.eval_max_new_tokens} has no effect without --eval_exact_match; add it.",
    )
    _require(
        not (config.data.streaming and config.optim.max_steps is None),
        "--streaming does not know how many rows there are, so --max_steps must say when to stop.",
    )
