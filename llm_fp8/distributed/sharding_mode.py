"""Which --sharding_mode a run uses, and which options cannot go together with it.

`auto` estimates what stands in a GPU's memory between micro-batches, in bytes per parameter with N GPUs:

    ddp          12              bf16 weight, gradient and moments, with the master's remainder (`adamw_master`)
    fsdp_grad    16 / N + 2 + 4  fp32 master, gradient and moments sharded; whole bf16 weights; whole fp32 gradients while accumulating
    fsdp_full    16 / N + 4      the same without the whole weights

and takes the first that leaves 40% of the memory to activations, fp8 casts, logits and the gathered layer. The 4 bytes
fall away with a single micro-batch per step or --sync_every_micro_batch. An --optimizer that is named has bytes of its
own in place of the 12 or 16. Under LoRA there are only the frozen weights to count: 2, 2 / N + 2 and 2 / N bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llm_fp8.config.options import FP8_GATHER_MODES, Config
from llm_fp8.observability.metrics import GIB
from llm_fp8.optim.optimizers import OptimizerKind, bytes_per_parameter
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks

STATE_SHARE = 0.6
"""Share of a GPU's memory that weights, gradients and optimizer state may take."""

_DEEPSPEED_BYTES = {"deepspeed_1": (12, 4), "deepspeed_2": (14, 2), "deepspeed_3": (16, 0)}
"""Split over GPUs, whole on each: see docs/deepspeed.md."""
_GATHERED_WEIGHT_BYTES = 2
_ACCUMULATED_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class ModeChoice:
    """The mode of a run and, where it was left to the program, the reason."""

    mode: str
    reason: str | None = None


def choose_mode(
    config: Config, ranks: LaunchRanks, count_parameters: Callable[[], int], gpu_memory_gib: float | None
) -> ModeChoice:
    """What --sharding_mode means in this run.

    Args:
        config: the run's.
        ranks: the launch's.
        count_parameters: of the model; called where the choice depends on it.
        gpu_memory_gib: of the smallest GPU; None on CPUs.
    """
    asked = config.parallel.sharding_mode
    if asked != "auto":
        return ModeChoice(asked)
    if ranks.world_size == 1:
        return ModeChoice("single", "there is one process")
    if gpu_memory_gib is None:
        return ModeChoice("ddp", "there is no GPU whose memory would count")
    room = STATE_SHARE * gpu_memory_gib
    num_parameters = count_parameters()
    needs = {
        mode: num_parameters * state_bytes(mode, _optimizer_under(mode, config), ranks.world_size, config) / GIB
        for mode in ("ddp", "fsdp_grad", "fsdp_full")
    }
    for mode, needed in needs.items():
        if needed <= room or mode == "fsdp_full":
            told = ", ".join(f"{name} {value:.0f} GiB" for name, value in needs.items())
            fits = "fits" if needed <= room else "comes nearest to"
            return ModeChoice(
                mode,
                f"weights, gradients and optimizer state of {num_parameters / 1e9:.2f} billion parameters on "
                f"{ranks.world_size} GPUs take, per GPU, {told}; {mode} is the first that {fits} {room:.0f} GiB, "
                f"{STATE_SHARE:.0%} of the smallest GPU",
            )
    raise AssertionError("fsdp_full ends the loop")


def default_optimizer(mode: str) -> OptimizerKind:
    """The optimizer that `--optimizer auto` means on a GPU in bf16 or fp8."""
    return "adamw_fp32" if mode.startswith("fsdp") else "adamw_master"


def _optimizer_under(mode: str, config: Config) -> OptimizerKind:
    """The optimizer that a GPU would run in `mode`; adamw_8bit, which no fsdp mode takes, counts as their default
    there.
    """
    asked = config.optim.optimizer
    refused = asked == "adamw_8bit" and mode.startswith("fsdp")
    return default_optimizer(mode) if asked == "auto" or refused else asked


def state_bytes(mode: str, kind: OptimizerKind, num_shards: int, config: Config) -> float:
    """Bytes per parameter that weights, gradients and optimizer state take on one GPU between micro-batches, where so
    many GPUs hold one copy together.

    Under LoRA these are the frozen weights alone; what the adapters take beside them is left out.
    """
    if config.lora.lora_rank:
        if mode == "fsdp_offload":
            return 0.0
        if not mode.startswith("fsdp"):
            return _GATHERED_WEIGHT_BYTES
        share = _GATHERED_WEIGHT_BYTES / num_shards
        return share + (_GATHERED_WEIGHT_BYTES if mode == "fsdp_grad" else 0)
    if mode in _DEEPSPEED_BYTES:
        split, whole = _DEEPSPEED_BYTES[mode]
        return split / num_shards + whole
    total = bytes_per_parameter(kind).total
    if not mode.startswith("fsdp"):
        return total
    if mode == "fsdp_offload":
        return 0.0
    gathered = _GATHERED_WEIGHT_BYTES if mode == "fsdp_grad" else 0
    return (
        total / num_shards + gathered + (_ACCUMULATED_GRADIENT_BYTES if keeps_unsharded_gradients(mode, config) else 0)
    )


def keeps_unsharded_gradients(mode: str, config: Config) -> bool:
    """Whether an fsdp mode keeps unsharded gradients on every GPU from one micro-batch to the next."""
    accumulates = config.optim.gradient_accumulation_steps > 1
    trains_all = config.lora.lora_rank == 0
    return mode.startswith("fsdp") and accumulates and trains_all and not config.parallel.sync_every_micro_batch


def check_mode(config: Config, mode: str, ranks: LaunchRanks, compute_name: str) -> None:
    """Raise `UserError` where the run's options cannot go together with `mode`; `compute_name` is fp32, bf16 or
    fp16.
    """
    options, flag = config.parallel, f"--sharding_mode {mode}"
    sharded, deepspeed = mode.startswith("fsdp"), mode.startswith("deepspeed")
    needed_by_fp8_params = {
        "such a mode": sharded and mode != "fsdp_offload",
        "--use_te": config.model.use_te,
        "--mixed_precision fp8": config.precision.mixed_precision == "fp8",
    }
    needed_by_context_parallelism = {"--use_te": config.model.use_te, "an fsdp mode": sharded}
    refused = {
        f"--mixed_precision fp16 cannot go with {flag}, which would shard what its gradient scaler has to see; use "
        "bf16.": (compute_name == "fp16" and mode not in ("ddp", "single")),
        f"--optimizer adamw_8bit cannot go with {flag}: its 8-bit blocks cannot be split over GPUs; use --optimizer "
        "auto, or --sharding_mode ddp.": (config.optim.optimizer == "adamw_8bit" and (sharded or deepspeed)),
        "--fp8_params needs an fsdp mode other than fsdp_offload, --use_te and --mixed_precision fp8; this run has "
        f"{flag} and lacks {_lacking(needed_by_fp8_params)}.": options.fp8_params
        and not all(needed_by_fp8_params.values()),
        f"--fp8_all_gather needs --sharding_mode {' or '.join(FP8_GATHER_MODES)}, and this run has {flag}; change the "
        "mode or drop it.": (options.fp8_all_gather and mode not in FP8_GATHER_MODES),
        f"--fp8_backend torchao cannot go with {flag}: DeepSpeed moves parameters in and out of modules that torchao "
        "compiles; use ddp or an fsdp mode.": (deepspeed and config.precision.fp8_backend == "torchao"),
        f"--fp8_lm_head {config.precision.fp8_lm_head} cannot go with {flag}: DeepSpeed moves parameters itself, and "
        "whether the head's weight is whole there was never tried; use ddp or an fsdp mode.": deepspeed
        and config.precision.fp8_lm_head != "none",
        f"--context_parallel_size {options.context_parallel_size} needs --use_te and an fsdp mode; this run has "
        f"{flag} and lacks {_lacking(needed_by_context_parallelism)}.": (
            options.context_parallel_size > 1 and not all(needed_by_context_parallelism.values())
        ),
        f"--context_parallel_size {options.context_parallel_size} does not divide the {ranks.world_size} processes; "
        "choose a size that does.": (ranks.world_size % options.context_parallel_size != 0),
        f"--hybrid_shard_size {options.hybrid_shard_size} has no effect with {flag}; use --sharding_mode fsdp_hybrid "
        "or drop it.": (options.hybrid_shard_size is not None and mode != "fsdp_hybrid"),
        f"--deepspeed_config {options.deepspeed_config} has no effect with {flag}; use a deepspeed mode or drop it.": (
            options.deepspeed_config is not None and not deepspeed
        ),
        f"--async_save cannot go with {flag}, whose checkpoints DeepSpeed writes itself; drop it.": options.async_save
        and deepspeed,
        f"--sync_every_micro_batch has no effect with {flag}, which decides that itself; drop it.": (
            options.sync_every_micro_batch and (deepspeed or mode == "single")
        ),
    }
    for sentence, wrong in refused.items():
        if wrong:
            raise UserError(sentence)
    if mode == "fsdp_hybrid":
        size = hybrid_shard_size(config, ranks)
        if ranks.world_size % size or ranks.world_size == size:
            raise UserError(
                f"--sharding_mode fsdp_hybrid shards over {size} GPUs (--hybrid_shard_size, by default those of a "
                f"host) and replicates, which {ranks.world_size} GPUs cannot be divided into; choose a proper "
                "divisor, or fsdp_full."
            )


def _lacking(needed: dict[str, bool]) -> str:
    """The names of what is not there, for a sentence."""
    return ", ".join(name for name, there in needed.items() if not there)


def hybrid_shard_size(config: Config, ranks: LaunchRanks) -> int:
    """GPUs that hold one copy of the model together under fsdp_hybrid."""
    return config.parallel.hybrid_shard_size or ranks.local_world_size
