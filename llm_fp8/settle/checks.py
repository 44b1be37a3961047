"""Checks of options that passed `check_options` against a machine, a launch and a model."""

from __future__ import annotations

import te_llama
from llm_fp8.config.options import Config
from llm_fp8.config.recipes import row_of
from llm_fp8.config.validation import check_tokens
from llm_fp8.observability.metrics import GIB
from llm_fp8.optim.optimizers import BYTES_PER_PARAMETER
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.settle.machine import Machine
from llm_fp8.settle.memory import RunSize
from llm_fp8.step.micro_batch_graphs import check_graphs
from llm_fp8.utils.errors import UserError


def check_machine(config: Config, machine: Machine, mode: str, precision: PrecisionPlan, size: RunSize) -> None:
    """Raise `UserError` where options cannot take effect on this machine or in this launch, with the sharding `mode`
    that 'auto' came to ('single' for one process).
    """
    ranks, compute, scenario = machine.ranks, precision.compute_name, precision.effective_scenario
    kind, group_size = config.optim.optimizer, config.parallel.context_parallel_size
    offloads_auto = config.optim.offload_optimizer > 0 and kind == "auto"
    for flag, needs_gpu in {
        "--use_te": config.model.use_te,
        "--certify": config.run.certify,
        "--offload_optimizer with --optimizer auto": offloads_auto,
    }.items():
        if needs_gpu and machine.gpu is None:
            raise UserError(f"{flag} needs an NVIDIA GPU, and none is found; drop it.")
    for flag, needs_bf16 in {
        f"--optimizer {kind}": kind in ("adamw_master", "adamw_8bit"),
        "--offload_optimizer with --optimizer auto": offloads_auto,
    }.items():
        if needs_bf16 and compute != "bf16":
            raise UserError(f"{flag} needs a run that computes in bf16: use --mixed_precision bf16 or fp8, or drop it.")
    check_tokens(config, row_of(scenario).token_multiple, f"--fp8_scenario {scenario}")
    if ranks.world_size % group_size != 0:
        raise UserError(f"--context_parallel_size {group_size} does not divide the {ranks.world_size} processes.")
    if config.always_graphs:
        check_graphs(config, mode, compute, 0.0 if size.sizes is None else size.sizes.attention_dropout)
    if mode == "fsdp_hybrid" and ranks.local_world_size >= ranks.world_size:
        raise UserError("--sharding_mode fsdp_hybrid replicates over hosts, and there is one; use fsdp_full.")
    if (share := config.optim.offload_optimizer) and machine.host_free_gib is not None:
        state_bytes = share * size.num_parameters * BYTES_PER_PARAMETER["adamw_master"].state
        needed_gib = ranks.local_world_size * state_bytes / GIB
        if needed_gib > machine.host_free_gib:
            free = f"{machine.host_free_gib:.1f} free on this host"
            raise UserError(f"--offload_optimizer {share:g} takes {needed_gib:.1f} GiB of {free}.")


def check_te_decoder(config: Config, spec: te_llama.DecoderSizes, num_shards: int) -> None:
    """Raise `UserError` where options cannot take effect with this decoder, split over `num_shards` GPUs."""
    if config.parallel.splits_sequences and any(window is not None for window in spec.windows):
        raise UserError("--context_parallel_size cannot go with sliding-window attention (config.json); drop it.")
    if config.parallel.fp8_params:
        if rows := [rows for rows, _ in te_llama.layer_weight_shapes(spec) if rows % num_shards != 0]:
            raise UserError(f"--fp8_params cannot split {rows[0]} rows of a weight over {num_shards} GPUs; drop it.")
