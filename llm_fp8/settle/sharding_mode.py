"""Choose --sharding_mode.

`auto` takes the first mode that leaves 40% of the smallest GPU's memory to activations, fp8 casts and logits.
`llm_fp8.config.options.Mode` lists the bytes of each mode.
"""

from __future__ import annotations

from llm_fp8.config.options import Config
from llm_fp8.models.memory import resolve_optimizer, state_bytes
from llm_fp8.observability.metrics import GIB
from llm_fp8.utils.ranks import LaunchRanks

STATE_SHARE = 0.6  # share of a GPU's memory for weights, gradients and optimizer state


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
