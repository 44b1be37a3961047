"""Settle a run, given options, config.json and machine: precision, sharding, optimizer, micro-batches, memory.

`settle` is a pure function: it allocates nothing, uses no GPU, reads no file, and returns equal results for equal
arguments. A run, a dry run and `llm-fp8 memory` call it, so they make the same decisions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

import te_llama
from llm_fp8.config.options import ALL_LINEAR, AUTO_BATCH_SIZE, Config, OptimizerKind
from llm_fp8.config.recipes import DEFAULTS, Backend, recipe_for, recipe_names, row_of
from llm_fp8.config.validation import check_declared, check_options, check_tokens, refusal
from llm_fp8.models.build import count_parameters
from llm_fp8.models.memory import MODES, RunSize, holds_frozen_in_fp8, resolve_optimizer, state_bytes
from llm_fp8.observability.metrics import GIB
from llm_fp8.optim.optimizers import OPTIMIZERS, learning_rate_schedule
from llm_fp8.precision.plan import PrecisionPlan, choose_backend
from llm_fp8.settle.machine import Machine
from llm_fp8.settle.memory import settle_memory
from llm_fp8.step.compiled import why_eager
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks

STATE_SHARE = 0.6  # fraction of a GPU's memory for weights, gradients and optimizer state


@dataclass(frozen=True, kw_only=True)
class Settled:
    """Decisions about a run. Its `config` has merged micro-batches, and numbers in place of 'auto'."""

    config: Config
    machine: Machine
    hf_config: PretrainedConfig
    precision: PrecisionPlan  # without the library's recipe object, which `precision.context.with_recipe` adds
    mode: str  # sharding mode; 'single' for one process
    optimizer_kind: OptimizerKind
    size: RunSize
    num_requested_micro_batches: int  # per step, before merging; `config` has the merged number
    eager_reason: str | None  # why transformers' decoder layers are not compiled, or None if they are
    notes: tuple[str, ...] = ()  # sentences to print: memory, merged micro-batches, sharding, fallback of fp8

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Dtype of trained parameters: the compute dtype in modes that hold master weights, else the optimizer's."""
        holds_masters = MODES[self.mode].holds_masters
        return self.precision.compute_dtype if holds_masters else OPTIMIZERS[self.optimizer_kind].parameter_dtype

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the base model's weights. If trained, they have `parameter_dtype`. If frozen, they have the compute
        dtype, except that they are fp32 in an fp16 run, since the range of fp16 is too small for them.
        """
        if not self.config.trains_adapters:
            return self.parameter_dtype
        return torch.bfloat16 if self.precision.compute_dtype == torch.bfloat16 else torch.float32

    @property
    def certifies(self) -> bool:
        """True if the run records a step and checks its kernels (--certify)."""
        wanted = self.config.run.certify
        return self.machine.gpu is not None if wanted is None else wanted

    @property
    def graphs(self) -> bool | None:
        """True if micro-batches run as CUDA graphs (--cuda_graphs). None if it depends on the measured idle time."""
        if self.config.model.cuda_graphs is not None:
            return self.config.model.cuda_graphs
        sizes, weights = self.size.sizes, torch.bfloat16 if MODES[self.mode].engine == "fsdp" else self.parameter_dtype
        possible = self.precision.compute_dtype == weights == torch.bfloat16 and not self.machine.lacks_delta_kernels
        if not possible or sizes is None or max(sizes.attention_dropout, sizes.residual_dropout):
            return False
        measured = self.certifies  # idle time is measured in the recorded step only
        return None if measured and not refusal(self.config.with_options(cuda_graphs=True), self.mode) else False

    @property
    def holds_frozen_in_fp8(self) -> bool:
        """True if the frozen weights of an fp8 run with adapters are stored in fp8 only."""
        possible = self.config.parallel.fp8_params or MODES[self.mode].engine != "fsdp"
        in_te, recipe = self.precision.backend == "te", self.precision.effective_scenario
        return possible and in_te and holds_frozen_in_fp8(self.config, self.mode, recipe)


def settle(
    requested: Config,
    hf_config: PretrainedConfig,
    machine: Machine,
    resumed: Mapping[str, Any] | None = None,
    num_parameters: int | None = None,
) -> Settled:
    """Settle the run with the options `requested`, which `check_options` must have accepted. Raise `UserError` if the
    run is not possible with this machine or model, or if it does not fit in the GPU's memory.

    Args:
        resumed: contents of meta.json in the checkpoint to continue. The run has the same micro-batches and precision.
        num_parameters: the model's number of parameters, if it is already known.
    """
    config, ranks, notes = requested, machine.ranks, list[str]()
    num_parameters = num_parameters or count_parameters(hf_config)
    mode, reason = choose_mode(config, ranks, num_parameters, machine.gpu_gib)
    saved, why = "" if resumed is None else resumed["fingerprint"]["precision"], None
    if config.precision.mixed_precision == "fp8":
        backend, why = choose_backend(config, machine.no_torchao, saved.partition("fp8 ")[2])
        check_options(config := config.with_options(fp8_backend=backend))
    check_declared(config, mode)
    precision = dataclasses.replace(resolve_precision(config, machine), backend_reason=why)
    optimizer_kind = resolve_optimizer(config, mode, precision.compute_name, "cpu" if machine.gpu is None else "cuda")
    recipe = precision.effective_scenario or precision.effective
    shards = ranks.local_world_size if mode == "fsdp_hybrid" else ranks.world_size  # GPUs that share a copy of it
    size = RunSize(config, hf_config, recipe, mode, shards, num_parameters, machine.lacks_delta_kernels)
    if size.shards_in_fp8:
        size = size.changed(fp8_params=True)
    if machine.gpu_gib is not None:
        rows = None if resumed is None else resumed["options"]["batch_size"]
        size, notes = settle_memory(size, machine.gpu_gib, rows)
    elif config.data.batch_size == AUTO_BATCH_SIZE:
        raise UserError("--batch_size auto needs a GPU, whose memory it fills, and none is found; give a number.")
    elif config.model.gradient_checkpointing == "auto":
        size = size.changed(gradient_checkpointing=0)
        notes.append("--gradient_checkpointing auto: without a GPU no layer is recomputed")
    config = size.config
    learning_rate_schedule(config.optim, total_steps=100)  # refuses wrong arguments before weights are loaded
    check_machine(config, machine, mode, precision, size)
    if config.model.use_te and size.sizes is not None:  # `check_model` raises for unsupported models
        check_te_decoder(config, size.sizes, shards)
    if ranks.world_size > 1:
        notes.append(f"sharding: {mode}{f', because {reason}' if reason else ''}")
    if precision.fallback_reason:
        names = f"{precision.requested_scenario} FELL BACK to {precision.effective_scenario}"
        notes.append(f"WARNING: --fp8_scenario {names}: {precision.fallback_reason}")
    return Settled(
        config=config,
        machine=machine,
        hf_config=hf_config,
        precision=precision,
        mode=mode,
        optimizer_kind=optimizer_kind,
        size=size,
        num_requested_micro_batches=requested.optim.gradient_accumulation_steps,
        eager_reason=why_eager(config, mode, precision, machine.no_compiler),
        notes=tuple(notes),
    )


def choose_mode(config: Config, ranks: LaunchRanks, num_parameters: int, gpu_gib: float | None) -> tuple[str, str]:
    """Return the sharding mode and a reason, which is '' unless --sharding_mode is auto. Auto selects the first of ddp,
    fsdp_grad and fsdp_full that leaves 40% of `gpu_gib` (None on CPUs) for activations, fp8 casts and logits.
    """
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


def resolve_precision(config: Config, machine: Machine) -> PrecisionPlan:
    """Choose precision and recipe. Raise `UserError` if the precision or, with --fp8_strict, the recipe cannot run."""
    options = config.precision
    requested = options.mixed_precision or ("bf16" if machine.capability >= (8, 0) else "no")
    if requested != "fp8":
        if requested == "fp16" and machine.gpu is None:
            raise UserError("--mixed_precision fp16 needs a CUDA GPU; use bf16 or no (fp32) on the CPU.")
        return PrecisionPlan(requested=requested, effective=requested)
    backend: Backend = "torchao" if options.fp8_backend == "torchao" else "te"
    wanted = recipe_for(options.fp8_scenario, backend)
    if not machine.has_fp8 and (machine.gpu is not None or backend == "te"):  # torchao's modules can be emulated
        needs = f"a GPU of compute capability 8.9 or later; found {machine.gpu or 'no CUDA GPU'}"
        raise UserError(f"--mixed_precision fp8 needs {needs}. Use bf16.")
    if wanted not in machine.lacking:
        return PrecisionPlan("fp8", "fp8", options.fp8_scenario, wanted, backend=backend)
    others = ", ".join(name for name in recipe_names(backend) if name not in machine.lacking)
    fallback = f"{wanted} is not available on {machine.gpu}: {machine.lacking[wanted]} Available here: {others}."
    if options.fp8_strict:
        raise UserError(f"--fp8_scenario {wanted} with --fp8_strict: {fallback}")
    return PrecisionPlan("fp8", "fp8", options.fp8_scenario, DEFAULTS[backend], fallback, backend=backend)


def check_machine(config: Config, machine: Machine, mode: str, precision: PrecisionPlan, size: RunSize) -> None:
    """Raise `UserError` if options are not possible on this machine, in this launch or in the sharding `mode`."""
    ranks, compute, scenario = machine.ranks, precision.compute_name, precision.effective_scenario
    kind, group_size = config.optim.optimizer, config.parallel.context_parallel_size
    offloads_auto = config.optim.offload_optimizer > 0 and kind == "auto"
    for flag, needs_gpu, needs_bf16 in (
        ("--use_te", config.model.use_te, False),
        ("--certify", config.run.certify, False),
        ("--offload_optimizer with --optimizer auto", offloads_auto, offloads_auto),
        (f"--optimizer {kind}", False, kind != "auto" and OPTIMIZERS[kind].parameter_dtype == torch.bfloat16),
    ):
        if needs_gpu and machine.gpu is None:
            raise UserError(f"{flag} needs an NVIDIA GPU, and none is found; drop it.")
        if needs_bf16 and compute != "bf16":
            raise UserError(f"{flag} needs a run that computes in bf16: use --mixed_precision bf16 or fp8, or drop it.")
    check_tokens(config, row_of(scenario).token_multiple, f"--fp8_scenario {scenario}")
    if ranks.world_size % group_size != 0:
        raise UserError(f"--context_parallel_size {group_size} does not divide the {ranks.world_size} processes.")
    if config.model.cuda_graphs:
        from llm_fp8.step.micro_batch_graphs import check_graphs

        dropout = max(sizes.attention_dropout, sizes.residual_dropout) if (sizes := size.sizes) else 0.0
        check_graphs(config, mode, compute, dropout)
        if machine.lacks_delta_kernels:
            raise UserError("--cuda_graphs needs flash-linear-attention's kernels, and they do not work here; drop it.")
    if mode == "fsdp_hybrid" and ranks.local_world_size >= ranks.world_size:
        raise UserError("--sharding_mode fsdp_hybrid replicates over hosts, and this launch has one; use fsdp_full.")
    if (share := config.optim.offload_optimizer) and machine.host_free_gib is not None:
        needed_gib = ranks.local_world_size * share * size.num_parameters * OPTIMIZERS[size.optimizer].state_bytes / GIB
        if needed_gib > machine.host_free_gib:
            free = f"{machine.host_free_gib:.1f} GiB are free on this host"
            raise UserError(f"--offload_optimizer {share:g} takes {needed_gib:.1f} GiB, and {free}; lower it.")


def check_te_decoder(config: Config, spec: te_llama.DecoderSizes, num_shards: int) -> None:
    """Raise `UserError` if a TE decoder of the sizes `spec`, on `num_shards` GPUs, does not support the options."""
    linears = dict.fromkeys(name for layer in spec.layers if layer for name in te_llama.linear_shapes(layer))
    if config.trains_adapters and (unknown := sorted({*config.lora.targets} - {*linears, ALL_LINEAR})):
        raise UserError(f"--lora_targets {', '.join(unknown)}: the model has {', '.join(linears)}; choose from these.")
    has_windows = any(layer is not None and layer.window for layer in spec.layers)
    if config.parallel.context_parallel_size > 1 and (has_windows or spec.delta_net):
        kind = "sliding-window attention" if has_windows else "gated delta nets"
        raise UserError(f"--context_parallel_size does not support {kind} (config.json); drop it.")
    if config.parallel.fp8_params and (rows := [rows for rows in te_llama.linear_rows(spec) if rows % num_shards]):
        raise UserError(f"--fp8_params cannot split {rows[0]} rows of a weight over {num_shards} GPUs; drop it.")
