"""From checked options to the parts of a run, in the order in which they need each other.

    plan = plan_run(config, ranks)      device, precision, sharding and the model's config: no weights yet
    setup = build_setup(plan)           the model: built, adapted (LoRA), converted to fp8, recomputed, sharded, filled

Both are frozen; what a run finds out later is in `llm_fp8.train.records.RunResults`. A benchmark prints nothing:
`plan_run(config, ranks, say=silent)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

import te_llama
from llm_fp8.config.options import AUTO_BATCH_SIZE, Config
from llm_fp8.config.recipes import size_multiple
from llm_fp8.config.validation import check_decoder, check_machine
from llm_fp8.distributed.build import build_accelerator, build_strategy
from llm_fp8.distributed.process_group import decided_by_main, own_device, smallest_gpu_gib
from llm_fp8.distributed.sharding_mode import ModeChoice, choose_mode, default_optimizer
from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.models.build import build_model, build_structure, count_parameters, decoder_layers
from llm_fp8.models.export import export_size_bytes
from llm_fp8.models.fp8_checkpoint import Fp8Format, fp8_format
from llm_fp8.models.loss_model import TrainingModel
from llm_fp8.models.source import ModelSource, has_random_weights, load_config, resolve_source, stored_dtype
from llm_fp8.models.weights import fill_weights
from llm_fp8.observability.metrics import GIB
from llm_fp8.observability.reporter import require_wandb_login
from llm_fp8.optim.adamw_master import remainder_of
from llm_fp8.optim.optimizers import OptimizerKind, bytes_per_parameter
from llm_fp8.precision.certificate import ExpectedKernels
from llm_fp8.precision.context import Precision, bf16_modules
from llm_fp8.precision.coverage import Fp8Coverage, measure_coverage
from llm_fp8.precision.plan import MIN_FP8_CAPABILITY, PrecisionPlan, precision_name, resolve_precision
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.hf_internals import chosen_attention
from llm_fp8.utils.host_memory import free_host_bytes
from llm_fp8.utils.packages import TRITON
from llm_fp8.utils.ranks import LaunchRanks
from llm_fp8.utils.te_import import require_te

HOST_RESERVE_GIB = 4.0
"""Host memory that is left to the programs themselves where --offload_optimizer takes some; a guess."""

Say = Callable[[str], None]
"""Prints a line on the main process."""


def silent(text: str) -> None:
    """A `Say` that prints nothing, for benchmarks."""


@dataclass(frozen=True)
class RunPlan:
    """What is settled before the model exists."""

    config: Config
    ranks: LaunchRanks
    source: ModelSource
    hf_config: PretrainedConfig
    precision: PrecisionPlan
    sharding: ModeChoice
    accelerator: Accelerator
    strategy: DistributedStrategy
    optimizer_kind: OptimizerKind
    parameter_dtype: torch.dtype
    """Of trained parameters."""
    export_dtype: torch.dtype
    """That of the stored weights, else `parameter_dtype`."""
    stored_fp8: Fp8Format | None
    """How the stored weights are scaled; None where they are not fp8, or none are loaded."""
    say: Say
    measures_precision: bool = False
    """Whether --mixed_precision auto is to measure fp8, which `precision` is until then, against bf16."""
    notes: tuple[str, ...] = ()
    """On what --batch_size auto came to, and on memory."""

    @property
    def device(self) -> torch.device:
        """This process's."""
        return self.accelerator.device

    @property
    def folder(self) -> Path:
        """The run's output folder."""
        return Path(self.config.run.output_dir or "")

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the model's weights: `parameter_dtype`, or under LoRA the compute dtype, since a frozen model needs no
        master weights; fp32 where that is fp16, whose range is small.
        """
        if self.config.lora.lora_rank == 0:
            return self.parameter_dtype
        return torch.bfloat16 if self.precision.compute_dtype == torch.bfloat16 else torch.float32

    @property
    def rounds_weights(self) -> bool:
        """Whether stored weights have bits that the model's bf16 ones have not."""
        has_more_bits = self.export_dtype in (torch.float32, torch.float16) or self.stored_fp8 is not None
        return self.weight_dtype == torch.bfloat16 and has_more_bits

    @property
    def keeps_lower_bits(self) -> bool:
        """Whether those bits go into the remainders of the optimizer."""
        return self.rounds_weights and self.optimizer_kind == "adamw_master" and self.config.lora.lora_rank == 0

    @property
    def certifies(self) -> bool:
        """Whether the run records a step and judges its kernels (--certify)."""
        wanted = self.config.run.certify
        return self.device.type == "cuda" if wanted is None else wanted


@dataclass(frozen=True)
class TrainingSetup:
    """A run's parts, built: everything that its options, the machine and the launch decide."""

    plan: RunPlan
    model: PreTrainedModel
    training_model: TrainingModel
    """What the loop calls: `model` with the loss."""
    weights_loaded: bool
    """Stored weights were loaded; False where they start random."""
    precision: Precision
    """The autocast context, attached to `model`."""
    coverage: Fp8Coverage
    expected: ExpectedKernels
    """What the kernels of a step must be, by options and coverage."""
    attention: str
    """'te', or transformers' name of the implementation."""
    num_parameters: int
    num_trainable_parameters: int
    num_adapter_parameters: int = 0

    @property
    def exports_adapter(self) -> bool:
        """Whether final/ will hold an adapter; one for random weights would be useless."""
        return self.plan.config.lora.lora_rank > 0 and self.weights_loaded

    @property
    def exported_bytes(self) -> int:
        """Size of final/; 0 where there will be none."""
        if not self.plan.config.run.export:
            return 0
        return export_size_bytes(self.model, self.plan.export_dtype, adapters_only=self.exports_adapter)


def plan_run(config: Config, ranks: LaunchRanks, say: Say | None = None) -> RunPlan:
    """Resolve the options on this machine; `UserError` for what it cannot do, or its memory cannot hold. Collective.

    `config` passed `check_options`, and the process group exists. `say` replaces printing on the main process.
    """
    device = own_device()
    source = resolve_source(config.model)
    hf_config = load_config(config.model, source)
    gpu_gib = smallest_gpu_gib(device)
    sharding = choose_mode(config, ranks, lambda: count_parameters(hf_config), gpu_gib)
    measures_precision = False
    if config.precision.mixed_precision == "auto":
        measures_precision = _can_be_fp8(config, device)
        config = with_precision(config, "fp8" if measures_precision else "bf16")
    precision = resolve_precision(config.precision, device)
    notes: list[str] = []
    if gpu_gib is not None or config.data.batch_size == AUTO_BATCH_SIZE:
        config, notes = _settle_memory(config, hf_config, precision, sharding.mode, ranks, gpu_gib)
    on_gpu, scenario = device.type == "cuda", precision.effective_scenario
    check_machine(
        config, on_gpu=on_gpu, mode=sharding.mode, compute=precision.compute_name, scenario=scenario, ranks=ranks
    )
    _check_packages(config, sharding.mode, on_gpu, ranks)
    _check_model(config, hf_config, sharding.mode, scenario, ranks)
    accelerator = build_accelerator(config, ranks, precision)
    strategy = build_strategy(sharding.mode, config, accelerator, ranks, precision.compute_dtype)
    optimizer_kind = strategy.resolve_optimizer(config.optim.optimizer, precision.compute_dtype)
    parameter_dtype = strategy.parameter_dtype(optimizer_kind, precision.compute_dtype)
    return RunPlan(
        config=config,
        ranks=ranks,
        source=source,
        hf_config=hf_config,
        precision=precision,
        sharding=sharding,
        accelerator=accelerator,
        strategy=strategy,
        optimizer_kind=optimizer_kind,
        parameter_dtype=parameter_dtype,
        export_dtype=stored_dtype(hf_config, default=parameter_dtype),  # building the model changes the entry
        stored_fp8=None if has_random_weights(config.model, source) else fp8_format(hf_config),
        say=say or (functools.partial(print, flush=True) if accelerator.is_main_process else silent),
        measures_precision=measures_precision,
        notes=tuple(notes),
    )


def _can_be_fp8(config: Config, device: torch.device) -> bool:
    """Whether --mixed_precision auto has something to measure; without a GPU that has fp8 the run is in bf16."""
    if config.precision.fp8_backend == "torchao":
        raise UserError("--mixed_precision auto measures Transformer Engine's fp8, not torchao's; give fp8 or bf16.")
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_FP8_CAPABILITY


def with_precision(config: Config, name: str) -> Config:
    """The options with this --mixed_precision."""
    return dataclasses.replace(config, precision=dataclasses.replace(config.precision, mixed_precision=name))  # type: ignore[arg-type]


def _settle_memory(
    config: Config,
    hf_config: PretrainedConfig,
    precision: PrecisionPlan,
    mode: str,
    ranks: LaunchRanks,
    gpu_gib: float | None,
) -> tuple[Config, list[str]]:
    """The options with a number for --batch_size auto, and sentences to print; the main process decides."""
    from llm_fp8.distributed.memory import settle_memory

    if gpu_gib is None:
        raise UserError("--batch_size auto counts a GPU's memory, and there is none here; give a number.")
    kind = effective_optimizer(config, mode, precision.compute_name)
    recipe = precision.effective_scenario or precision.effective
    settle = functools.partial(
        settle_memory, config, hf_config, recipe=recipe, optimizer=kind, mode=mode, num_gpus=ranks.world_size
    )
    return decided_by_main(lambda: settle(gpu_gib=gpu_gib))


def _check_packages(config: Config, mode: str, on_gpu: bool, ranks: LaunchRanks) -> None:
    """Raise `UserError` where a package is missing, or does not load, that the run needs beyond those of every run."""
    kind, rank = config.optim.optimizer, config.lora.lora_rank
    if config.model.use_te:
        require_te("--use_te")
    if on_gpu and (kind in ("adamw_master", "adamw_8bit") or config.optim.offload_optimizer > 0):
        TRITON.require_installed(f"--optimizer {kind}")
    if rank:
        from llm_fp8.models.lora import require_peft

        require_peft(f"--lora_rank {rank}")
    if mode.startswith("deepspeed"):
        from llm_fp8.distributed.deepspeed_config import load_deepspeed

        load_deepspeed(f"--sharding_mode {mode}")
    if config.run.use_wandb and ranks.rank == 0:  # the only process that talks to W&B
        require_wandb_login("--use_wandb")


def _check_model(
    config: Config, hf_config: PretrainedConfig, mode: str, scenario: str | None, ranks: LaunchRanks
) -> None:
    """Raise `UserError` where options cannot take effect with this model, or its state does not fit the host."""
    if share := config.optim.offload_optimizer:
        needed_gib = share * count_parameters(hf_config) * bytes_per_parameter("adamw_master").state / GIB
        needed_gib, free_gib = needed_gib * ranks.local_world_size, free_host_bytes() / GIB - HOST_RESERVE_GIB
        if needed_gib > free_gib:
            raise UserError(
                f"--offload_optimizer {share:g} takes {needed_gib:.1f} GiB of this host's memory, where {free_gib:.1f} "
                f"are left for it; use {share * max(0.0, free_gib) / needed_gib:.2f} or less, or adamw_8bit."
            )
    if config.model.use_te:
        with contextlib.suppress(te_llama.UnsupportedArchitecture):  # said when the model is looked at
            spec = te_llama.decoder_spec(hf_config)
            check_decoder(
                config,
                scenario=scenario,
                windows=spec.windows,
                attention_dropout=spec.attention_dropout,
                weights=te_llama.layer_weight_shapes(spec),
                num_shards=ranks.local_world_size if mode == "fsdp_hybrid" else ranks.world_size,
            )


def effective_optimizer(config: Config, mode: str, compute: str) -> OptimizerKind:
    """What --optimizer means on a GPU that computes in `compute`: fp32, bf16 or fp16."""
    kind = config.optim.optimizer
    if kind != "auto":
        return kind
    return default_optimizer(mode) if compute == "bf16" else "adamw_fp32"


def announce(plan: RunPlan) -> None:
    """Print sharding, precision and optimizer, with a warning where fp8 fell back."""
    precision, sharding, say = plan.precision, plan.sharding, plan.say
    for note in plan.notes:
        say(note)
    if plan.ranks.world_size > 1:
        say(f"sharding: {sharding.mode}{f', because {sharding.reason}' if sharding.reason else ''}")
    asked = precision_name(precision.requested, precision.requested_scenario)
    if precision.fallback_reason:
        say(
            f"WARNING: --fp8_scenario {precision.requested_scenario} FELL BACK to {precision.effective_scenario}: "
            f"{precision.fallback_reason}"
        )
    say(f"precision: {precision.name} (asked for: {asked})")
    if precision.backend == "torchao":
        say(
            "fp8 by torchao, EMULATED on the CPU: operands are rounded to fp8 and multiplied in higher precision, so "
            "this shows losses and no speed"
            if precision.emulated
            else "fp8 by torchao, with torch.compile for each decoder layer: first steps take longer, because they "
            "compile"
        )
    trained, frozen = (str(dtype).removeprefix("torch.") for dtype in (plan.parameter_dtype, plan.weight_dtype))
    if rank := plan.config.lora.lora_rank:
        say(f"optimizer: {plan.optimizer_kind}, adapters of rank {rank} in {trained}, frozen model in {frozen}")
    else:
        say(f"optimizer: {plan.optimizer_kind}, parameters in {trained}")


def build_setup(plan: RunPlan) -> TrainingSetup:
    """Build the model of `plan` on its device, with its weights, sharded over the processes. Collective."""
    config, strategy, precision_plan, seed = plan.config, plan.strategy, plan.precision, plan.config.optim.seed
    model, loaded = _decoder_with_adapters(plan)
    layers = decoder_layers(model)
    reasons = _convert_linears(plan, model, layers)
    attention: str = "te" if config.model.use_te else chosen_attention(model.config)
    if attention == "eager" and config.model.attn_implementation == "auto":
        model_type = plan.hf_config.model_type
        plan.say(f"attention: eager, which is slow: transformers has no sdpa for models of type '{model_type}'")
    precision = _attach_precision(plan, model, layers)
    gemms, num_adapter_parameters = _adapter_figures(plan, model)
    coverage = measure_coverage(
        model,
        precision.fp8_modules,
        precision_plan.compute_name,
        reasons | precision.misfits,
        gemms,
        precision.num_fp8_gemms_per_weight,
    )
    plan.say(coverage.describe())
    recomputed = _recompute_layers(plan, layers)
    training_model = TrainingModel(model, config.data.max_seq_length, precision_plan.compute_dtype)
    if config.parallel.fp8_params and precision_plan.backend == "te":
        strategy.keep_in_fp8(precision)  # type: ignore[attr-defined]  # check_options asked for an fsdp mode
    strategy.shard(training_model, layers)
    if strategy.shards_parameters:
        loaded = fill_weights(model, config.model, plan.source, plan.device, seed, plan.keeps_lower_bits)
        _initialize_adapters(plan, model)
    if loaded and (plan.rounds_weights or plan.stored_fp8 is not None):
        plan.say(_describe_rounding(plan, model))
    if precision_plan.backend == "torchao" and not precision_plan.emulated:
        from llm_fp8.precision.torchao import compile_layers

        compile_layers(layers, recomputed=bool(recomputed))
    return TrainingSetup(
        plan=plan,
        model=model,
        training_model=training_model,
        weights_loaded=loaded,
        precision=precision,
        coverage=coverage,
        expected=ExpectedKernels.of_model(precision, coverage, recomputed, gemms),
        attention=attention,
        num_parameters=sum(parameter.numel() for parameter in training_model.parameters()),
        num_trainable_parameters=sum(p.numel() for p in training_model.parameters() if p.requires_grad),
        num_adapter_parameters=num_adapter_parameters,
    )


def _decoder_with_adapters(plan: RunPlan) -> tuple[PreTrainedModel, bool]:
    """The model, and whether weights were loaded; one whose parameters are sharded has no values yet."""
    options, lora = plan.config.model, plan.config.lora
    shared: dict[str, Any] = {
        "parameter_dtype": plan.weight_dtype,
        "compute_dtype": plan.precision.compute_dtype,
        "device": plan.device,
    }
    if lora.lora_rank:
        from llm_fp8.models.lora import add_adapters, needs_unfused_mlp

        shared["unfused_mlp"] = needs_unfused_mlp(lora)
    sharded, loaded = plan.strategy.shards_parameters, False
    if sharded:
        model = build_structure(options, plan.source, plan.hf_config, **shared)
    else:
        shared |= {"seed": plan.config.optim.seed, "keep_lower_bits": plan.keeps_lower_bits}
        model, loaded = build_model(options, plan.source, plan.hf_config, **shared)
    if lora.lora_rank:
        add_adapters(model, lora, plan.parameter_dtype)
        if not sharded:
            _initialize_adapters(plan, model)
    return model, loaded


def _initialize_adapters(plan: RunPlan, model: PreTrainedModel) -> None:
    if plan.config.lora.lora_rank:
        from llm_fp8.models.lora import initialize_adapters_

        initialize_adapters_(model, plan.config.optim.seed)


def _adapter_figures(plan: RunPlan, model: PreTrainedModel) -> tuple[Mapping[nn.Module, int], int]:
    """For each frozen linear module its GEMMs in a micro-batch, and the number of the adapters' parameters."""
    if not plan.config.lora.lora_rank:
        return {}, 0
    from llm_fp8.models.lora import gemms_per_weight, num_adapter_parameters

    return gemms_per_weight(model), num_adapter_parameters(model)


def _describe_rounding(plan: RunPlan, model: PreTrainedModel) -> str:
    """What becomes of stored weights that the model's parameters cannot hold as they are."""
    stored = str(plan.export_dtype).removeprefix("torch.")
    keeps_all = any(remainder_of(parameter) is not None for parameter in model.parameters())
    if plan.stored_fp8 is not None:
        rounded = ", rounded to bfloat16" if plan.rounds_weights and not keeps_all else ""
        return (
            f"stored weights are {plan.stored_fp8.describe()}: training starts from value times scale in fp32{rounded}"
        )
    if keeps_all:
        return f"stored weights are {stored}: training starts from their exact values, and final/ is {stored} again"
    advice = "" if plan.config.lora.lora_rank else "; --optimizer adamw_master or adamw_fp32 keeps them exact"
    return f"WARNING: stored weights are {stored} and are rounded to bfloat16{advice}"


def _convert_linears(plan: RunPlan, model: PreTrainedModel, layers: nn.ModuleList) -> dict[str, str]:
    """Put the backend's linear layers into a Hugging Face decoder, for fp8; name -> reason for each one left alone."""
    config, precision = plan.config, plan.precision
    if precision.backend == "torchao":
        gathers = config.parallel.fp8_params
        from llm_fp8.precision.convert import convert_with_torchao

        recipe = dataclasses.replace(precision.recipe, enable_fsdp_float8_all_gather=gathers)
        return convert_with_torchao(model, recipe, bf16_modules(config.precision, model, layers))
    if precision.recipe is not None and not config.model.use_te:
        from llm_fp8.precision.convert import swap_linears

        return swap_linears(model, size_multiple(precision.effective_scenario))
    return {}


def _attach_precision(plan: RunPlan, model: PreTrainedModel, layers: nn.ModuleList) -> Precision:
    """The autocast context, attached to the model."""
    strategy = plan.strategy
    # FSDP hands modules their parameters in the compute dtype.
    module_dtype = plan.precision.compute_dtype if strategy.shards_parameters else plan.parameter_dtype
    precision = Precision(plan.precision, plan.config.precision, plan.device, module_dtype)
    precision.attach(model, layers)
    if plan.config.lora.lora_rank and strategy.caches_weight_casts:
        precision.keep_casts_of_frozen_weights()
    return precision


def _recompute_layers(plan: RunPlan, layers: nn.ModuleList) -> Sequence[nn.Module]:
    """Turn on activation checkpointing where --gradient_checkpointing asks for it; returns its decoder layers."""
    options = plan.config.model
    if options.gradient_checkpointing == 0:
        return ()
    from llm_fp8.distributed.activation_checkpoint import enable_gradient_checkpointing

    uses_te = options.use_te or plan.precision.te_recipe is not None
    return enable_gradient_checkpointing(
        layers,
        options.gradient_checkpointing,
        uses_te,
        reentrant=uses_te and plan.strategy.reentrant_te_checkpoints,
    )
