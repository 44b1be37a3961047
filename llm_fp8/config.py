"""Every option of the training scripts, declared once.

Each option is a field of one of the frozen dataclasses below. The field gives its type, default, choices and help
text, and from it come the command line (through transformers' HfArgumentParser), the keys of a `--config` YAML file
and the entries of `run.json`. `parse_config` is the only way a script obtains a `Config`:

    config = parse_config(sys.argv[1:])
    config.data.max_seq_length

Precedence, lowest first: the field's default, the YAML file, the command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_type_hints

import yaml
from transformers import HfArgumentParser

from llm_fp8.errors import OneSentenceParser, UserError
from llm_fp8.flash_attention_package import FLASH_ATTENTION_PACKAGES, FlashAttention

EMBEDDED = "embedded"
"""Name of the model and of the dataset that the repository carries."""

SCRATCH_LEARNING_RATE = 1e-3
"""Default learning rate of a model whose weights start random: the embedded one, and any with --random_init."""

TE_SCENARIOS = ("delayed", "current", "block", "mxfp8", "nvfp4")
TORCHAO_SCENARIOS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
LORA_LEARNING_RATE = 2e-4
"""Default learning rate of adapters, which start at nothing and have to get far."""

ALL_LINEAR = "all-linear"
"""Value of --lora_targets for every linear layer but the output head."""
DECODER_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Hugging Face's names of a decoder layer's linear layers in the order in which they compute (q, k and v at once, gate and up at once)."""

GENERATION_BATCH_SIZE = 64
"""Prompts generated from at a time in evaluations, where no option says otherwise."""

WANDB_TAG_LENGTH = 64
"""Characters that W&B allows in a tag."""


def option(default: Any, help: str) -> Any:
    """A dataclass field that becomes a command-line option with this default and help text."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ModelConfig:
    """Which model, from where, and how it is built."""

    model_name: str = option(
        EMBEDDED, "Hub id or local folder of a Llama, Qwen or Mistral model, or 'embedded' for the tiny one in this repository."
    )
    use_te: bool = option(False, "Build the decoder layers from Transformer Engine modules (te_llama.py). Needs an NVIDIA GPU.")
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4"] = option(
        "auto",
        "Attention. Without --use_te 'auto' takes flash-attn 2 where it is installed and sdpa elsewhere, or eager for architectures that have neither. With --use_te it is Transformer Engine's choice, "
        "cuDNN on Hopper, or with flash_attention_3 and flash_attention_4 flash-attn 3 and 4 (packed rows on Hopper alone).",
    )
    random_init: bool = option(
        False, "Start from random weights of the model's architecture; hub ids with a bundled config need no hub then."
    )
    weights_cache_dir: str | None = option(None, "Folder in which downloaded weights are kept (default: the Hugging Face cache).")
    gradient_checkpointing: bool = option(
        False, "Recompute each decoder layer in the backward pass: less memory, about a third more compute."
    )
    gradient_checkpointing_every: int = option(
        1, "With --gradient_checkpointing: recompute one decoder layer in so many (1: all of them)."
    )
    parity_check: bool | None = option(
        None,
        "Compare the TE decoder with the Hugging Face one on the first real batch before training and refuse to train on a "
        "difference. Default: on with --use_te when weights were loaded.",
    )

    @property
    def flash_attention(self) -> FlashAttention | None:
        """--attn_implementation where it is one of the TE decoder's own (`llm_fp8.flash_attention`), else None."""
        package = FLASH_ATTENTION_PACKAGES.get(self.attn_implementation)
        return None if package is None else package.option


@dataclass(frozen=True)
class PrecisionConfig:
    """In which precision the linear layers compute."""

    mixed_precision: Literal["no", "bf16", "fp16", "fp8"] | None = option(
        None,
        "no (fp32), bf16, fp16 or fp8. Default: what 'accelerate launch' asked for, else bf16 on a GPU that has it, else no.",
    )
    fp8_backend: Literal["te", "torchao"] = option(
        "te",
        "Whose fp8 linear layers: Transformer Engine's, or torchao's (without --use_te; decoder layers are compiled on a GPU, and its products emulated "
        "on a CPU).",
    )
    fp8_scenario: Literal[
        "default", "delayed", "current", "block", "mxfp8", "nvfp4", "tensorwise", "rowwise", "rowwise_with_gw_hp"
    ] = option(
        "default",
        "FP8 recipe. Of Transformer Engine: delayed scaling, current scaling, block scaling, MXFP8 or NVFP4; 'default' is delayed on Ada and Hopper, and "
        "what this GPU lacks falls back to it with a warning. Of torchao: tensorwise, rowwise or rowwise_with_gw_hp; 'default' is tensorwise.",
    )
    fp8_format: Literal["HYBRID", "E4M3"] | None = option(
        None,
        "HYBRID: E4M3 forward and E5M2 gradients. E4M3: both. Default: HYBRID for delayed and current scaling, E4M3 for block and MXFP8.",
    )
    amax_history_len: int | None = option(
        None, "Delayed scaling: how many forward passes of absolute maxima the scale looks back on (default 1024)."
    )
    amax_compute_algo: Literal["max", "most_recent"] | None = option(
        None, "Delayed scaling: the scale comes from the history's maximum (default) or from its newest entry."
    )
    fp8_margin: int | None = option(None, "Delayed scaling: powers of two kept free above the largest value seen (default 0).")
    fp8_first_bf16_layers: int = option(0, "Number of decoder layers at the input side that stay in bf16.")
    fp8_last_bf16_layers: int = option(0, "Number of decoder layers at the output side that stay in bf16.")
    fp8_lm_head: Literal["none", "gradients", "all"] = option(
        "none",
        "Products of the output head that run in fp8 in training: none; gradients: the two of the backward pass, with logits and loss as before; all: the "
        "logits too. Evaluation has the exact loss. Needs --fp8_backend te.",
    )
    fp8_strict: bool = option(False, "Stop with an error where an fp8 recipe would fall back to another.")


@dataclass(frozen=True)
class DataConfig:
    """Which text, and how it becomes batches."""

    dataset_name: str = option(
        EMBEDDED,
        "Hub id (nvidia/OpenMathInstruct-2), local folder, jsonl/json/parquet/csv file, save_to_disk folder, or 'embedded'.",
    )
    split_name: str | None = option(None, "Split to train on. Default: train_1M where the dataset has it, else train.")
    validation_split_name: str | None = option(
        None, "Split to evaluate on. Default: 'validation' where there is one, else a share of the training problems."
    )
    validation_fraction: float = option(
        0.01, "Share of the training problems held out for evaluation where there is no validation split; 0 holds out none."
    )
    num_of_samples: int | None = option(None, "Use only the first so many rows of the split (default: all).")
    streaming: bool = option(False, "Read the dataset as a stream instead of preparing all of it first (for the 14M-row split).")
    max_seq_length: int = option(1024, "Tokens in a row of a batch; a longer sample is handled as --overlong says.")
    batch_size: int = option(8, "Rows of a micro-batch per GPU.")
    packing: bool | None = option(
        None,
        "Pack whole samples into rows of max_seq_length tokens, with attention kept inside each sample. Default: on with --use_te.",
    )
    train_on_prompt: bool = option(False, "Take the loss on the prompt too, not on the solution only.")
    overlong: Literal["drop", "truncate"] = option("drop", "What happens to a sample longer than max_seq_length.")
    preprocessing_workers: int = option(1, "Processes that tokenise.")
    data_cache_dir: str | None = option(None, "Folder for the tokenised cache (default: the Hugging Face datasets cache).")


@dataclass(frozen=True)
class OptimConfig:
    """How the weights move."""

    num_epochs: int = option(1, "Passes over the training rows.")
    max_steps: int | None = option(
        None, "Stop after so many optimizer steps, whatever --num_epochs says (default: when its passes are done)."
    )
    learning_rate: float = option(
        1e-5,
        f"Peak learning rate (default: 1e-5, {LORA_LEARNING_RATE:g} with --lora_rank, or {SCRATCH_LEARNING_RATE} for weights that start random).",
    )
    gradient_accumulation_steps: int = option(1, "Micro-batches per optimizer step.")
    num_warmup_steps: int = option(100, "Optimizer steps of linear warm-up; at most a tenth of the run is used for it.")
    lr_scheduler: Literal["linear", "cosine", "constant"] = option("cosine", "Shape of the learning rate after warm-up.")
    weight_decay: float = option(0.0, "Decoupled weight decay; norms and biases are exempt.")
    adam_beta1: float = option(0.9, "Decay of the first moment.")
    adam_beta2: float = option(0.95, "Decay of the second moment.")
    adam_epsilon: float = option(1e-8, "Added to the denominator of the update.")
    max_grad_norm: float = option(1.0, "Clip the global gradient norm to this; 0 turns clipping off.")
    optimizer: Literal["auto", "adamw_fp32", "adamw_master", "adamw_8bit"] = option(
        "auto",
        "adamw_fp32: fp32 parameters (16 bytes each). adamw_master: bf16 parameters whose fp32 master is kept as a 16-bit remainder, fused "
        "on the GPU (12 bytes). adamw_8bit: bf16 parameters with stochastic rounding and 8-bit moments (6 bytes). auto: adamw_master on a GPU when "
        "the run computes in bf16 or fp8, else adamw_fp32.",
    )
    seed: int = option(42, "Seed of initialisation, data order and the rounding of adamw_8bit.")


@dataclass(frozen=True)
class RunConfig:
    """Where results go, what is reported and when it is saved."""

    output_dir: str | None = option(
        None,
        "Folder of the run: run.json, metrics.jsonl, summary.json, checkpoints/ and final/. Default: a new folder under runs/, named after the "
        "time, model and precision.",
    )
    resume_from: str | None = option(
        None, "'latest' (of --output_dir) or a checkpoint folder to continue from (default: start anew)."
    )
    save_every: int = option(0, "Optimizer steps between checkpoints; 0 saves none during training.")
    save_total_limit: int = option(2, "Checkpoints kept; the oldest go first.")
    export: bool = option(True, "Write the final weights as a Hugging Face checkpoint with tokenizer and model card.")
    eval_every: int = option(0, "Optimizer steps between evaluations; 0 evaluates at the end only.")
    eval_batches: int | None = option(None, "Batches per evaluation (default: the whole held-out set).")
    eval_exact_match: int = option(
        0,
        "Held-out problems that the model answers at each evaluation, to be compared with the dataset's expected_answer; 0: none. Where there are "
        "fewer, all of them.",
    )
    eval_max_new_tokens: int = option(512, "Tokens after which an answer of --eval_exact_match is cut off.")
    certify: bool | None = option(
        None,
        "Record the GPU kernels of one early step, compare them with what was asked for, and end the run with exit code 1 where they differ. "
        "Default: on with an NVIDIA GPU.",
    )
    log_every: int = option(10, "Optimizer steps between log lines; every step reaches metrics.jsonl.")
    use_wandb: bool = option(False, "Log to Weights & Biases (the same as --report_to wandb).")
    wandb_project: str = option("llm-fp8", "Project of the W&B run.")
    wandb_run_name: str | None = option(None, "Name of the W&B run (default: W&B makes one up).")
    wandb_group: str | None = option(
        None, "Group of the W&B run, the same for runs that are to be compared (default: the name of the output folder)."
    )
    wandb_tags: str | None = option(
        None,
        "Further tags of the W&B run, separated by commas; precision, model, sharding mode and GPU are tags anyway (default: none).",
    )
    report_to: Literal["none", "wandb", "tensorboard", "all"] = option("none", "Trackers besides metrics.jsonl.")


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (LoRA) in place of full fine-tuning."""

    lora_rank: int = option(0, "Rank of the adapters; the model itself is then frozen. 0: full fine-tuning.")
    lora_alpha: float | None = option(
        None, "An adapter's output is multiplied by this over --lora_rank (default: twice the rank)."
    )
    lora_dropout: float = option(0.0, "Share of an adapter's inputs that is dropped while training.")
    lora_targets: str = option(
        ALL_LINEAR,
        "Linear layers that get an adapter: names as in the Hugging Face model, separated by commas (q_proj,v_proj), or 'all-linear' for all but "
        "the output head.",
    )
    lora_merge: bool = option(
        False, "Export the model with its adapters added to its weights, as a whole checkpoint, in place of a PEFT adapter."
    )

    @property
    def targets(self) -> tuple[str, ...]:
        """The names in --lora_targets, in order."""
        return tuple(name.strip() for name in self.lora_targets.split(",") if name.strip())


ShardingMode = Literal[
    "auto",
    "ddp",
    "fsdp_grad",
    "fsdp_full",
    "fsdp_hybrid",
    "fsdp_offload",
    "deepspeed_1",
    "deepspeed_2",
    "deepspeed_3",
]
SHARDING_MODES = tuple(mode for mode in get_args(ShardingMode) if mode != "auto")
FP8_GATHER_MODES = ("fsdp_full", "fsdp_grad")
"""Modes that can gather torchao's weights in fp8."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the training is spread over several GPUs (train_multi_gpu.py)."""

    sharding_mode: ShardingMode = option(
        "auto",
        "ddp: every GPU holds the whole model. fsdp_grad: gradients and optimizer are sharded, parameters are gathered once a step and kept whole "
        "to its last backward pass. fsdp_full: parameters are sharded too. fsdp_hybrid: sharded inside a host, replicated across hosts. fsdp_offload: "
        "fsdp_full with parameters, gradients and optimizer in the hosts' memory. deepspeed_1, _2, _3: DeepSpeed's ZeRO stages. auto: "
        "the first of ddp, fsdp_grad and fsdp_full that the GPUs have room for; it says why.",
    )
    hybrid_shard_size: int | None = option(
        None, "fsdp_hybrid: GPUs that hold one copy of the model together (default: the GPUs of a host)."
    )
    sync_every_micro_batch: bool = option(
        False,
        "Exchange gradients after every micro-batch rather than once a step: sharded modes then keep no unsharded gradients (4 bytes per "
        "parameter), for more traffic.",
    )
    fp8_params: bool = option(
        False,
        "Keep the decoder's linear weights in fp8 between steps and gather them in fp8 (fsdp_grad, fsdp_full and fsdp_hybrid, with --use_te).",
    )
    fp8_all_gather: bool = option(
        False,
        "With --fp8_backend torchao and tensorwise scaling: cast the weights of fp8 layers before they are gathered, half the bytes of bf16 (fsdp_full "
        "and fsdp_grad).",
    )
    context_parallel_size: int = option(
        1, "GPUs that share the tokens of a row, for rows too long for one GPU (needs --use_te and an fsdp mode)."
    )
    deepspeed_config: str | None = option(
        None, "DeepSpeed JSON file for the deepspeed modes (default: configs/ds_z1.json, ds_z2.json or ds_z3.json)."
    )
    async_save: bool = option(
        False, "Write checkpoints in the background: training waits only until the tensors are copied to the host's memory."
    )
    empty_cache_freq: int = option(
        0,
        "Give cached GPU memory back to the driver every so many steps (0: never). It costs the time to allocate it anew; use it only where memory "
        "is fragmented.",
    )


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The configuration as plain nested dicts, as stored in run.json."""
        return dataclasses.asdict(self)

    @property
    def packing(self) -> bool:
        """Whether rows are packed, with the default (on with --use_te) resolved."""
        return self.model.use_te if self.data.packing is None else self.data.packing

    @property
    def wandb_tags(self) -> list[str]:
        """The tags of --wandb_tags, in order."""
        return [tag.strip() for tag in (self.run.wandb_tags or "").split(",") if tag.strip()]

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers asked for, as Accelerate names them."""
        chosen = {"none": [], "all": ["wandb", "tensorboard"]}.get(self.run.report_to, [self.run.report_to])
        if self.run.use_wandb and "wandb" not in chosen:
            chosen = ["wandb", *chosen]
        return chosen


SECTIONS: dict[str, type] = {f.name: f.default_factory for f in dataclasses.fields(Config)}  # type: ignore[misc]
PARALLEL_SECTION = "parallel"
"""Name of the section whose options train_multi_gpu.py has and train_fp8.py has not."""


def _sections(parallel: bool) -> dict[str, type]:
    """The sections of a script's options."""
    return {name: section for name, section in SECTIONS.items() if parallel or name != PARALLEL_SECTION}


class _HelpFormatter(argparse.HelpFormatter):
    """Help that ends with the default, unless the text itself says it, as it must where the default is None."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.default is None or action.default == argparse.SUPPRESS or "(default:" in text:
            return text
        shown = ("on" if action.default else "off") if isinstance(action.default, bool) else action.default
        return f"{text} (default: {shown})"


class _Parser(OneSentenceParser, HfArgumentParser):
    """HfArgumentParser whose errors are one sentence and whose optional booleans can be bare flags."""

    def __init__(self, sections: dict[str, type], **kwargs: Any) -> None:
        kwargs = {"formatter_class": _HelpFormatter, "allow_abbrev": False, **kwargs}
        super().__init__(list(sections.values()), **kwargs)  # type: ignore[arg-type]
        for section in sections.values():
            for name, hint in get_type_hints(section).items():
                if bool in get_args(hint):
                    self._make_flag(name)
        for action in self._actions:
            if action.option_strings[0].startswith("--no_"):
                action.help, action.default = f"Turn --{action.dest} off.", argparse.SUPPRESS

    def _make_flag(self, name: str) -> None:
        """Let `--name` stand for true and add `--no_name`; argparse's default for Optional[bool] wants a value."""
        action = next(a for a in self._actions if a.dest == name)
        action.nargs, action.const = "?", True
        self.add_argument(f"--no_{name}", dest=name, action="store_false")

    def error(self, message: str) -> NoReturn:
        if any(f"--{option.name}" in message.split() for option in dataclasses.fields(ParallelConfig)):
            message += " (options of sharding belong to train_multi_gpu.py)"
        super().error(message)


def _yaml_arguments(path: str, sections: dict[str, type]) -> list[str]:
    """The entries of a YAML file as command-line words, so that they are parsed and checked like typed ones."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"--config {path}: no such file.")
    try:
        entries = yaml.safe_load(file.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if entries is None:
        return []
    if not isinstance(entries, dict):
        raise UserError(f"--config {path} must hold 'option: value' lines, not a {type(entries).__name__}.")
    known = {f.name for section in sections.values() for f in dataclasses.fields(section)}
    words: list[str] = []
    for key, value in entries.items():
        if key not in known:
            raise UserError(f"--config {path}: '{key}' is not an option; --help lists them.")
        if value is not None:
            words.append(f"--{key}={value}")
    return words


def build_parser(prog: str | None = None, description: str | None = None, parallel: bool = False) -> HfArgumentParser:
    """The command-line parser of train_fp8.py, or with `parallel` that of train_multi_gpu.py."""
    parser = _Parser(_sections(parallel), prog=prog, description=description)
    parser.add_argument("--config", help="YAML file of 'option: value' lines; the command line overrides it (default: none).")
    return parser


def parse_config(argv: list[str], prog: str | None = None, description: str | None = None, parallel: bool = False) -> Config:
    """Parse a command line (without the program's name) into a `Config`; `parallel` adds the options of `ParallelConfig`.

    Raises `UserError` on values that cannot be; argparse itself exits with code 2 on unknown options and choices.
    """
    parser = build_parser(prog, description, parallel)
    path = parser.parse_known_args(argv)[0].config
    words = _yaml_arguments(path, _sections(parallel)) if path else []
    parser.set_defaults(learning_rate=None)  # to tell "not given" from its default
    values = vars(parser.parse_args([*words, *argv]))
    if values["learning_rate"] is None:
        from_scratch = values["random_init"] or values["model_name"] == EMBEDDED
        otherwise = LORA_LEARNING_RATE if values["lora_rank"] else OptimConfig().learning_rate
        values["learning_rate"] = SCRATCH_LEARNING_RATE if from_scratch else otherwise
    sections = {
        name: section(**{f.name: values[f.name] for f in dataclasses.fields(section)})
        for name, section in _sections(parallel).items()
    }
    config = Config(**sections)
    check_config(config)
    return config


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UserError(sentence)


def _check_attention(config: Config) -> None:
    """Raise `UserError` where --attn_implementation cannot go with other options."""
    asked, use_te = config.model.attn_implementation, config.model.use_te
    if config.model.flash_attention is None:
        _require(
            not use_te or asked == "auto",
            f"--attn_implementation {asked} has no effect with --use_te, whose attention is Transformer Engine's, {' or '.join(FLASH_ATTENTION_PACKAGES)}; drop one.",
        )
        return
    flag = f"--attn_implementation {asked}"
    _require(use_te, f"{flag} is attention of the TE decoder; add --use_te, or choose flash_attention_2.")
    _require(config.packing, f"{flag} is for packed rows; drop --no_packing, or {flag}.")
    mixed = config.precision.mixed_precision
    _require(
        mixed not in ("no", "fp16"), f"{flag}: its gradients were compared in bf16 alone; drop it, or --mixed_precision {mixed}."
    )
    _require(
        config.parallel.context_parallel_size == 1,
        f"{flag} cannot share a row between GPUs; drop it, or --context_parallel_size {config.parallel.context_parallel_size}.",
    )


def _check_fp8_backend(config: Config) -> None:
    """Raise `UserError` where --fp8_backend cannot go with other options."""
    options = config.precision
    backend, scenario = options.fp8_backend, options.fp8_scenario
    own, other = (TE_SCENARIOS, "torchao") if backend == "te" else (TORCHAO_SCENARIOS, "te")
    _require(
        scenario in ("default", *own),
        f"--fp8_scenario {scenario} is a recipe of --fp8_backend {other}, and this run has --fp8_backend {backend}, whose recipes are "
        f"{', '.join(own)}; change one of them.",
    )
    gathers = config.parallel.fp8_all_gather
    if backend == "te":
        _require(
            not gathers,
            "--fp8_all_gather belongs to --fp8_backend torchao; for Transformer Engine's modules there is --fp8_params.",
        )
        return
    _require(
        not gathers or scenario in ("default", "tensorwise"),
        f"--fp8_all_gather gathers a weight with the one scale of tensorwise scaling, and --fp8_scenario {scenario} has one per row; drop one of them.",
    )
    _require(
        not config.model.use_te,
        "--use_te builds the decoder from Transformer Engine's modules, which --fp8_backend torchao cannot convert; drop one of them.",
    )
    _require(
        options.fp8_lm_head == "none",
        f"--fp8_lm_head {options.fp8_lm_head} is computed by Transformer Engine and cannot go with --fp8_backend torchao; drop one of them.",
    )
    for name in ("fp8_format", "amax_history_len", "amax_compute_algo", "fp8_margin"):
        _require(
            getattr(options, name) is None,
            f"--{name} belongs to Transformer Engine's recipes and has no effect with --fp8_backend torchao; drop one of them.",
        )


def _check_lora(config: Config) -> None:
    """The part of `check_config` on adapters."""
    options, unset = config.lora, LoraConfig()
    _require(options.lora_rank >= 0, f"--lora_rank must be 0 (full fine-tuning) or more, not {options.lora_rank}.")
    if options.lora_rank == 0:
        for name in vars(unset):
            value = getattr(options, name)
            _require(
                value == getattr(unset, name), f"--{name} {value} has no effect without --lora_rank; add it or drop --{name}."
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
        f"--lora_targets {', '.join(unknown)}: with --use_te the layers are {', '.join(DECODER_LINEARS)}, or {ALL_LINEAR}.",
    )
    _require(
        not config.parallel.sharding_mode.startswith("deepspeed"),
        f"--lora_rank {options.lora_rank} cannot go with --sharding_mode {config.parallel.sharding_mode}; use ddp or an fsdp mode.",
    )
    _require(
        config.precision.mixed_precision != "fp8" or config.precision.fp8_backend == "te",
        f"--lora_rank {options.lora_rank} cannot go with --fp8_backend torchao, whose layers compute the gradients of frozen weights too; use --fp8_backend te.",
    )
    _require(
        not config.parallel.fp8_params,
        f"--fp8_params gives trained weights an fp8 form, and --lora_rank {options.lora_rank} freezes them; drop one of them.",
    )
    _require(config.run.export or not options.lora_merge, "--lora_merge has no effect with --no_export; drop one of them.")


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
        f"--gradient_checkpointing_every {config.model.gradient_checkpointing_every} has no effect without --gradient_checkpointing; add it.",
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
            f"--batch_size {config.data.batch_size} times --max_seq_length {config.data.max_seq_length} is {tokens} tokens, which is not a "
            "multiple of 16 as fp8 kernels and packed rows need; choose a --max_seq_length that is a multiple of 16.",
        )
    _require(
        not (config.run.resume_from == "latest" and config.run.output_dir is None),
        "--resume_from latest needs --output_dir, the folder of the run to continue.",
    )
    _require(
        not (config.data.streaming and config.run.eval_exact_match),
        f"--eval_exact_match {config.run.eval_exact_match} needs to look problems up by row, which --streaming cannot; drop it and evaluate the "
        "trained model with scripts/evaluate.py.",
    )
    _require(
        config.run.eval_exact_match > 0 or config.run.eval_max_new_tokens == RunConfig.eval_max_new_tokens,
        f"--eval_max_new_tokens {config.run.eval_max_new_tokens} has no effect without --eval_exact_match; add it.",
    )
    _require(
        not (config.data.streaming and config.optim.max_steps is None),
        "--streaming does not know how many rows there are, so --max_steps must say when to stop.",
    )
