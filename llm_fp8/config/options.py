"""Every option of the training scripts, declared once, as a field of a frozen dataclass.

A field declares the type, default, choices, help text and range of its option, and the options that it needs or
excludes. The command line, the keys of a `--config` YAML file, the checks (`llm_fp8.config.validation`) and the entries
of `run.json` are derived from the fields. The command line overrides the YAML file, which overrides the defaults.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

EMBEDDED = "embedded"  # the model and the dataset in this repository
SCRATCH_LEARNING_RATE = 1e-3  # for random initial weights (the embedded model, or --random_init)
LORA_LEARNING_RATE = 2e-4
AUTO_BATCH_SIZE = 0  # means --batch_size auto until the run chooses a size

ALL_LINEAR = "all-linear"  # value of --lora_targets: all linear layers but the lm_head
EXPERTS = "experts"  # entry of --lora_targets: the weights of routed experts

COLUMN_NAMES = (  # columns that training reads (`llm_fp8.data.rows`); --columns maps them to the dataset's names
    "problem", "generated_solution", "messages", "tools", "conversations", "instruction", "input",
    "output", "prompt", "completion", "text", "system", "system_prompt", "history", "functions", "chat_template_kwargs",
    "input_ids", "labels", "attention_mask",
)  # fmt: skip

IN_FP8 = "mixed_precision=fp8"
WHOLE_MODEL = "sharding_mode=single|ddp"


def option(
    default: Any,
    help: str,
    *,
    alias: str | None = None,
    needs: tuple[str, ...] = (),
    excludes: dict[str, str] | None = None,
    resume: Literal["same", "scales", "evaluation", "total_steps", "global_batch_size"] | None = None,
    **bounds: float,
) -> Any:
    """Declare a dataclass field that becomes a command-line option.

    `needs` are conditions without which the option has no effect. `excludes` maps each condition that forbids it to
    the reason. A condition NAME means that the option NAME is on, and NAME=PATTERN|PATTERN that its value matches a
    wildcard pattern. NAME may be the option itself. ` and ` or ` or ` joins conditions. sharding_mode is 'single'
    on one GPU. `alias` is the option's name in transformers, if the meaning is exactly the same. `bounds` are at_least,
    at_most, above and below.
    `resume` says what happens if a resumed run changes the option. 'same' and 'scales' make it an error unless
    --allow_changed names the option: the result changes and, for 'scales', the meaning of delayed scaling's histories.
    For 'evaluation' the change is only reported. The other values name the setting that is compared instead.
    """
    declared = {"help": help, "aliases": [f"--{alias}"] if alias else [], "bounds": bounds}
    return field(default=default, metadata={**declared, "needs": needs, "excludes": excludes or {}, "resume": resume})


@dataclass(frozen=True)
class ModelConfig:
    """Model, its source and its construction."""

    model_name: str = option(
        EMBEDDED, "Hub id or folder of a model, folder of a PEFT adapter, or 'embedded'.", alias="model_name_or_path"
    )
    use_te: bool = option(False, "Build the decoder of Transformer Engine modules (te_llama.py), on an NVIDIA GPU.")
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = option(
        "auto",
        "Attention kernels; auto: sdpa, but torch's flash attention for packed rows of models that it fits.",
        excludes={"use_te": "it has its own attention"},
    )
    chat_template: str | None = option(None, "Chat template: a file, or the text itself (default: the tokenizer's).")
    random_init: bool = option(False, "Start from random weights of the model's architecture.")
    gradient_checkpointing: float | Literal["auto"] = option(
        0, "Recompute every n-th layer (no number: all), a share such as 0.5, or auto: as few as memory allows."
    )
    cuda_graphs: bool | None = option(
        None,
        "Replay micro-batches as CUDA graphs, which takes memory (default: auto, if the GPU would be idle).",
        needs=("use_te", "packing", "sharding_mode=single|ddp|fsdp_grad|fsdp_full"),
        excludes={
            "fp8_recast_weights": "a step's gradients start from zero only if casts are kept",
            "sync_every_micro_batch": "gradients are reduced after the last micro-batch",
            "lora_dropout": "recomputed layers would draw other random numbers",
            f"optimizer=adamw_fp32 and {WHOLE_MODEL}": "graphs need bf16 parameters",
        },
    )
    compile: bool | None = option(
        None,
        "Compile the decoder layers of transformers' models (default: on a GPU where it works).",
        excludes={
            "use_te": "its kernels are fused already",
            "fp8_backend=te": "Transformer Engine's modules break the graph of a layer",
            "sharding_mode=deepspeed_*": "DeepSpeed moves parameters of compiled modules",
        },
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Precision of the linear layers."""

    mixed_precision: Literal["no", "bf16", "fp16", "fp8"] | None = option(
        None,
        "no (fp32), bf16, fp16 or fp8 (default: bf16 on a GPU, else fp32).",
        excludes={"mixed_precision=fp16 and sharding_mode=fsdp_*|deepspeed_*": "use bf16"},
    )
    fp8_backend: Literal["auto", "te", "torchao"] = option(  # a resumed run has the recipe, which implies the back end
        "auto",
        "te (Transformer Engine), torchao (emulated on a CPU), or auto: torchao if it is possible, and faster.",
        needs=(IN_FP8,),
        excludes={
            "fp8_backend=torchao and use_te": "its layers are Transformer Engine's",
            "fp8_backend=torchao and sharding_mode=deepspeed_*": "DeepSpeed moves parameters of compiled modules",
            "fp8_backend=torchao and lora_rank": "torchao computes gradients of frozen weights too",
        },
    )
    fp8_scenario: str = option(  # the parser adds choices and help from the table of recipes
        "default", "A recipe that this GPU lacks falls back to 'default' with a warning.", needs=(IN_FP8,)
    )
    fp8_format: Literal["HYBRID", "E4M3"] | None = option(
        None, "E4M3, or HYBRID: E5M2 for gradients (default of delayed and current).", needs=(IN_FP8,), resume="scales"
    )
    amax_history_len: int | None = option(
        None, "Number of passes in the amax history (default: 1024).", needs=(IN_FP8,), resume="scales", at_least=1
    )
    amax_compute_algo: Literal["max", "most_recent"] | None = option(
        None, "Which amax of that history sets the scale (default: max).", needs=(IN_FP8,), resume="same"
    )
    fp8_bf16_modules: str = option(
        "",
        "Modules to keep in bf16, with commas: layers.0, layers.-4:, qkv, 0.mlp or patterns (layers.2?.*).",
        needs=(IN_FP8,),
        resume="scales",
    )
    fp8_recast_weights: bool = option(
        False,
        "Keep no fp8 casts of weights: saves two bytes per weight, but is slower (one GPU and ddp).",
        needs=(IN_FP8, WHOLE_MODEL),
        excludes={"fp8_backend=torchao": "torchao keeps no casts", "lora_rank": "frozen weights are cast once"},
        resume="same",
    )
    fp8_strict: bool = option(False, "Stop instead of falling back to another fp8 recipe.", needs=(IN_FP8,))


@dataclass(frozen=True)
class DataConfig:
    """Datasets and their conversion to batches."""

    dataset_name: str = option(EMBEDDED, "Hub id[:CONFIG], folder, file, pattern or 'embedded'; several with commas.")
    dataset_weights: str | None = option(None, "Shares of several datasets, as in 0.7,0.3 (default: all rows of each).")
    eval_dataset_name: str | None = option(None, "Dataset to evaluate on (default: see --validation_split_name).")
    columns: str | None = option(
        None, f"Our names=the dataset's, as in problem=question (default: ours). Ours: {', '.join(COLUMN_NAMES)}."
    )
    split_name: str | None = option(None, "Split to train on (default: train_1M if the dataset has it, else train).")
    validation_split_name: str | None = option(None, "Split to evaluate on (default: validation, else a share).")
    validation_fraction: float | None = option(
        None,
        "Share of the training problems to evaluate on; 0: none (default: 0.01, but at least 100 rows).",
        excludes=dict.fromkeys(("eval_dataset_name", "validation_split_name"), "that option sets the evaluation data"),
        at_least=0,
        below=1,
    )
    num_of_samples: int | None = option(None, "Use only the first rows of the split (default: all).", at_least=1)
    streaming: bool = option(False, "Read the dataset as a stream, without preparing it first.", needs=("max_steps",))
    max_seq_length: int = option(1024, "Tokens per sequence; see --overlong for longer samples.", at_least=1)
    batch_size: int = option(
        8,
        "Sequences per micro-batch and GPU, or auto: as many as fit.",
        alias="per_device_train_batch_size",
        resume="global_batch_size",
    )
    packing: bool | None = option(None, "Pack whole samples into full sequences (default: on with --use_te).")
    train_on_prompt: bool = option(False, "Compute the loss on the prompt too, not only on the solution.")
    overlong: Literal["drop", "truncate"] = option("drop", "Drop or truncate samples longer than --max_seq_length.")
    chat_template_kwargs: dict[str, Any] | None = option(
        None,
        "JSON of the chat template's variables, as in '{\"enable_thinking\": false}'; a row's column overrides it.",
    )

    @property
    def weights(self) -> list[float] | None:
        """The numbers in --dataset_weights, or None without this option."""
        return None if self.dataset_weights is None else [float(word) for word in self.dataset_weights.split(",")]

    @property
    def column_names(self) -> dict[str, str]:
        """The pairs in --columns: our name of a column -> the name in the dataset."""
        pairs = [pair.partition("=") for pair in names_in(self.columns)]
        return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


OptimizerKind = Literal["adamw_fp32", "adamw_master", "adamw_8bit"]
Scheduler = Literal[  # transformers' names, but for those that wait for an eval loss
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
]  # fmt: skip


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer, schedule and length of the training."""

    num_epochs: int = option(1, "Passes over the rows.", alias="num_train_epochs", resume="total_steps", at_least=1)
    max_steps: int | None = option(None, "Optimizer steps, in place of --num_epochs.", resume="total_steps", at_least=1)
    learning_rate: float = option(
        1e-5,
        f"Peak rate (default: 1e-5, {LORA_LEARNING_RATE:g} for LoRA, {SCRATCH_LEARNING_RATE:g} for random weights).",
        resume="same",
        at_least=0,
    )
    gradient_accumulation_steps: int = option(1, "Micro-batches per step.", resume="global_batch_size", at_least=1)
    merge_micro_batches: bool = option(True, "Merge micro-batches of a step, as many as fit GPU memory.")
    num_warmup_steps: float = option(
        100, "Steps of warm-up, at most a tenth of all; below 1: their share of all steps.", resume="same", at_least=0
    )
    lr_scheduler: Scheduler = option(
        "cosine", "Schedule of the learning rate, by transformers' name.", alias="lr_scheduler_type", resume="same"
    )
    lr_scheduler_kwargs: dict[str, Any] | None = option(
        None,
        "JSON of its arguments, as in '{\"min_lr_rate\": 0.1}' (default: transformers').",
        excludes={"lr_scheduler=constant*": "it has no arguments"},
        resume="same",
    )
    weight_decay: float = option(0.0, "Decoupled weight decay; norms and biases are exempt.", resume="same", at_least=0)
    adam_beta2: float = option(0.95, "Decay of the second moment.", resume="same", at_least=0, below=1)
    max_grad_norm: float = option(1.0, "Clip the global gradient norm to this; 0: never.", resume="same", at_least=0)
    optimizer: Literal["auto", OptimizerKind] = option(
        "auto",
        "adamw_fp32: 16 bytes a parameter; adamw_master: bf16 with master weights, 12; adamw_8bit: bf16, stochastic "
        "rounding, 6; auto: adamw_master on GPUs in bf16 or fp8, adamw_fp32 elsewhere and under DeepSpeed.",
        excludes={"optimizer=adamw_8bit|adamw_master and sharding_mode=deepspeed_*": "DeepSpeed has master weights"},
    )
    offload_optimizer: float = option(
        0.0,
        "Share of adamw_master's state to keep in host memory, 0 to 1; on one GPU or under ddp.",
        needs=("optimizer=auto|adamw_master", WHOLE_MODEL),
        excludes={"lora_rank": "frozen weights have no optimizer state"},
        at_least=0,
        at_most=1,
    )
    seed: int = option(42, "Seed of weights, data order and stochastic rounding.", at_least=0, below=2**32)


@dataclass(frozen=True)
class RunConfig:
    """Output, reports, evaluation and checkpoints of the run."""

    output_dir: str | None = option(None, "Folder of the run (default: a new one under runs/).")
    dry_run: bool = option(False, "Prepare the data, print counts, steps and memory, and exit.")
    gpu: str | None = option(None, "GPU to assume, as H100, or 80 for its GiB (default: this one).", needs=("dry_run",))
    resume_from: str | None = option(None, "'latest', or a checkpoint folder to continue from (default: start anew).")
    allow_changed: str | None = option(None, "Options that may have changed (default: none).", needs=("resume_from",))
    save_every: int | Literal["epoch"] | None = option(
        None,
        "Steps between checkpoints, or epoch, beside one every 30 minutes; 0: none (default: every 30 minutes).",
        alias="save_steps",
        at_least=0,
    )
    save_total_limit: int = option(2, "Checkpoints to keep, not counting that of --keep_best.", at_least=1)
    export: bool = option(True, "Write the final weights as a Hugging Face checkpoint with tokenizer and model card.")
    eval_every: int | Literal["epoch"] = option(
        0,
        "Steps between evaluations, or epoch; 0: at the end only.",
        alias="eval_steps",
        resume="evaluation",
        at_least=0,
    )
    keep_best: bool = option(
        False, "Keep and export the checkpoint with the lowest eval loss.", needs=("eval_every",), resume="evaluation"
    )
    early_stopping_patience: int = option(
        0,
        "End the run after this many evaluations without a lower eval loss; 0: never.",
        needs=("eval_every",),
        resume="evaluation",
        at_least=0,
    )
    eval_batches: int | None = option(None, "Batches per evaluation (default: all).", resume="evaluation", at_least=1)
    certify: bool | None = option(None, "Exit with 1 unless the requested kernels run (default: on with a GPU).")
    log_every: int = option(10, "Optimizer steps between log lines.", alias="logging_steps", at_least=1)
    use_wandb: bool = option(False, "Log to Weights & Biases; its variables, such as WANDB_RUN_GROUP, apply.")
    report_to: str = option("none", "Accelerate's trackers to log to, as in wandb,tensorboard,mlflow.")
    wandb_project: str | None = option(
        None, "Project in W&B and other trackers (default: WANDB_PROJECT, else llm-fp8).", needs=("use_wandb",)
    )
    wandb_run_name: str | None = option(None, "Name of the run in trackers (default: their own).", needs=("use_wandb",))

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names of the trackers in --report_to, and 'wandb' with --use_wandb."""
        names = names_in(f"wandb,{self.report_to}" if self.use_wandb else self.report_to)
        return tuple(name for name in names if name != "none")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA) in place of full fine-tuning."""

    lora_rank: int = option(
        0, "Rank of adapters; 0: none.", excludes={"sharding_mode=deepspeed_*": "use ddp or FSDP"}, at_least=0
    )
    lora_alpha: float | None = option(
        None, "Scale adapters by this divided by --lora_rank (default: twice the rank).", needs=("lora_rank",), above=0
    )
    lora_dropout: float = option(0.0, "Dropout before adapters.", needs=("lora_rank",), at_least=0, below=1)
    lora_targets: str = option(
        ALL_LINEAR,
        "Layers that get an adapter, as in q_proj,experts; all-linear: all but lm_head and routed experts.",
        needs=("lora_rank",),
    )

    @property
    def targets(self) -> tuple[str, ...]:
        """The names in --lora_targets."""
        return names_in(self.lora_targets)

    @property
    def scaling(self) -> float:
        """The factor by which an adapter's output is multiplied: alpha / rank, or 2 without --lora_alpha."""
        return 2.0 if self.lora_alpha is None else self.lora_alpha / self.lora_rank


ShardingMode = Literal[
    "auto", "ddp", "fsdp_grad", "fsdp_full", "fsdp_hybrid", "fsdp_offload", "deepspeed_1", "deepspeed_2", "deepspeed_3"
]


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism over several GPUs (train_multi_gpu.py)."""

    sharding_mode: ShardingMode = option(
        "auto",
        "ddp: every GPU holds the whole model; fsdp_grad: gradients and optimizer are sharded; fsdp_full: parameters "
        "too; fsdp_hybrid: inside a host only; fsdp_offload: fsdp_full in CPU memory; deepspeed_1 to _3: ZeRO; "
        "auto: the first of ddp, fsdp_grad and fsdp_full that fits.",
    )
    sync_every_micro_batch: bool = option(
        False, "Reduce gradients after each micro-batch, which saves memory.", needs=("sharding_mode=ddp|fsdp_*",)
    )
    fp8_params: bool = option(
        False,
        "Gather decoder weights in fp8, half the bytes of bf16; with --use_te, modules hold them in fp8.",
        needs=(IN_FP8, "use_te or fp8_backend=torchao|auto", "sharding_mode=fsdp_grad|fsdp_full|fsdp_hybrid"),
        excludes={
            "fp8_backend=torchao and sharding_mode=fsdp_hybrid": "use fsdp_grad or fsdp_full",
            "optimizer=adamw_master|adamw_8bit": "--fp8_params keeps fp32 weights",
        },
    )
    context_parallel_size: int = option(
        1,
        "GPUs that share the tokens of a sequence.",
        needs=("use_te", "sharding_mode=fsdp_*"),
        excludes={
            "mixed_precision=no": "attention over several GPUs runs in bf16",
            "cuda_graphs": "ring attention cannot be captured",
        },
        at_least=1,
    )
    deepspeed_config: str | None = option(
        None, "DeepSpeed's JSON file (default: configs/ds_z1.json to ds_z3.json).", needs=("sharding_mode=deepspeed_*",)
    )
    async_save: bool = option(
        False, "Write checkpoints in the background.", excludes={"sharding_mode=deepspeed_*": "DeepSpeed writes them"}
    )
    empty_cache_freq: int = option(0, "Steps between releases of cached GPU memory; 0: never.", at_least=0)


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    run: RunConfig = RunConfig()
    lora: LoraConfig = LoraConfig()
    parallel: ParallelConfig = ParallelConfig()

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the configuration as plain nested dicts, as stored in run.json."""
        return dataclasses.asdict(self)

    @property
    def options(self) -> dict[str, Any]:
        """The values of all options by name."""
        return {name: value for section in vars(self).values() for name, value in vars(section).items()}

    def with_options(self, **options: Any) -> Config:
        """Return a copy in which each keyword sets the option of the same name."""
        sections = {
            name: dataclasses.replace(section, **{key: options[key] for key in vars(section) if key in options})
            for name, section in vars(self).items()
        }
        return Config(**sections)

    @property
    def packing(self) -> bool:
        """True if rows are packed: the value of --packing or, without it, of --use_te."""
        return self.model.use_te if self.data.packing is None else self.data.packing

    @property
    def trains_adapters(self) -> bool:
        """True if the run trains adapters and the model's own weights are frozen."""
        return self.lora.lora_rank > 0

    @property
    def draws_weights(self) -> bool:
        """True if the run starts from random weights, not from a checkpoint."""
        return self.model.random_init or self.model.model_name == EMBEDDED

    @property
    def default_learning_rate(self) -> float:
        """The peak learning rate of a run without --learning_rate."""
        if self.draws_weights:
            return SCRATCH_LEARNING_RATE
        return LORA_LEARNING_RATE if self.trains_adapters else self.optim.learning_rate


def names_in(listed: str | None) -> tuple[str, ...]:
    """Return the names in the comma-separated text `listed`, each once and in order."""
    return tuple(dict.fromkeys(name.strip() for name in (listed or "").split(",") if name.strip()))


SECTIONS = {name: type(section) for name, section in vars(Config()).items()}

MOST_USED = (  # options that --help explains; --help_all explains all
    "model_name", "dataset_name", "output_dir", "use_te", "mixed_precision", "fp8_scenario", "max_seq_length",
    "batch_size", "gradient_accumulation_steps", "learning_rate", "num_epochs", "max_steps", "sharding_mode",
)  # fmt: skip

FIELDS = {each.name: each for section in SECTIONS.values() for each in dataclasses.fields(section)}
RESUME = {name: each.metadata["resume"] for name, each in FIELDS.items() if each.metadata["resume"]}
"""Option -> effect of a change in a resumed run (see `option`)."""
SETTINGS = {name: name if kind in ("same", "scales") else kind for name, kind in RESUME.items() if kind != "evaluation"}
"""Option -> setting that a resumed run compares, which is the option itself or one that it helps to decide."""
