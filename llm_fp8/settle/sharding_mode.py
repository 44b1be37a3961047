"""Choose --sharding_mode and everything that depends on it.

`auto` takes the first mode that leaves 40% of the smallest GPU's memory to activations, fp8 casts and logits.
`llm_fp8.config.options.Mode` lists the bytes of each mode.
"""

from __future__ import annotations

from llm_fp8.config.options import MODES, Config, OptimizerKind
from llm_fp8.observability.metrics import GIB
from llm_fp8.optim.optimizers import OPTIMIZERS
from llm_fp8.utils.ranks import LaunchRanks

STATE_SHARE = 0.6  # share of a GPU's memory for weights, gradients and optimizer state
_FROZEN_WEIGHT_BYTES, _ACCUMULATED_GRADIENT_BYTES = 2, 4


def choose_mode(config: Config, ranks: LaunchRanks, num_parameters: int, gpu_gib: float | None) -> tuple[str, str]:
    """Return the mode and, under auto, the reason, else ''. `gpu_gib`: memory of the smallest GPU; None on CPUs."""
    requested = config.parallel.sharding_mode
    if requested != "auto":
        return requested, ""
    if ranks.world_size == 1:
        return "single", "there is one process"
    if gpu_gib is None:
        return "ddp", "there is no GPU"
    room, needs = STATE_SHARE * gpu_gib, {}
    compute = "fp32" if config.precision.mixed_precision in ("no", "fp16") else "bf16"
    for mode in ("ddp", "fsdp_grad", "fsdp_full"):
        kind = resolve_optimizer(config, mode, compute)
        needs[mode] = num_parameters * state_bytes(mode, kind, ranks.world_size, config) / GIB
    mode = next((mode for mode, needed in needs.items() if needed <= room), "fsdp_full")
    by_mode = ", ".join(f"{name} {value:.0f}" for name, value in needs.items())
    return mode, f"weights, gradients and optimizer state must fit in {room:.0f} GiB per GPU and take {by_mode}"


def num_shards(mode: str, ranks: LaunchRanks) -> int:
    """Return the number of GPUs over which a sharding mode splits one copy of the model."""
    return ranks.local_world_size if mode == "fsdp_hybrid" else ranks.world_size


def resolve_optimizer(config: Config, mode: str, compute: str = "bf16", device_type: str = "cuda") -> OptimizerKind:
    """Resolve --optimizer for a mode and a machine that computes in `compute`: fp32, bf16 or fp16."""
    if config.optim.optimizer != "auto":
        return config.optim.optimizer
    row = MODES[mode]
    needs_fp32 = compute != "bf16" or device_type != "cuda" or row.on_host or row.holds_masters
    if row.engine == "fsdp" and not needs_fp32:
        # Gradient shards are summed in the parameters' dtype, and weights sharded in fp8 have fp32 masters.
        parallel = config.parallel
        needs_fp32 = parallel.sync_every_micro_batch or parallel.fp8_params or config.trains_adapters
    return "adamw_fp32" if needs_fp32 else "adamw_master"


def state_bytes(mode: str, kind: OptimizerKind, num_shards: int, config: Config) -> float:
    """Return the bytes per parameter of weights, gradients and optimizer state between micro-batches, on one of
    `num_shards` GPUs that share a copy. If adapters are trained, count only the frozen weights.
    """
    row, optimizer = MODES[mode], OPTIMIZERS[kind]
    if row.on_host:
        return 0.0
    if config.trains_adapters:
        if row.engine != "fsdp":  # ZeRO 3 shards frozen weights too, which is not counted
            return _FROZEN_WEIGHT_BYTES
        return _FROZEN_WEIGHT_BYTES / num_shards + row.unsharded_bytes
    if row.engine == "copies":
        return optimizer.total_bytes - config.optim.offload_optimizer * optimizer.state_bytes
    gradients = _ACCUMULATED_GRADIENT_BYTES if keeps_unsharded_gradients(mode, config) else 0
    return (row.sharded_bytes or optimizer.total_bytes) / num_shards + row.unsharded_bytes + gradients


def keeps_unsharded_gradients(mode: str, config: Config) -> bool:
    """Return True if an fsdp mode keeps unsharded gradients on every GPU from one micro-batch to the next."""
    accumulates = config.optim.gradient_accumulation_steps > 1 and not config.parallel.sync_every_micro_batch
    return MODES[mode].engine == "fsdp" and accumulates and not config.trains_adapters


def holds_frozen_in_fp8(config: Config, mode: str) -> bool:
    """Return True if frozen weights can be held in fp8 only, in an fp8 run whose recipe allows it in this mode. Steps
    after --fp8_until, the export of drawn weights and fsdp_offload need bf16 weights.
    """
    exports_drawn = config.draws_weights and config.run.export
    needs_bf16 = config.precision.fp8_until < 1 or exports_drawn or mode == "fsdp_offload"
    return config.trains_adapters and config.model.use_te and not needs_bf16
