"""Build the parts of a run from its plan: model, adapters (LoRA), fp8, recomputation, sharding, weights, optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llm_fp8.config.recipes import row_of
from llm_fp8.data.collate import Batch
from llm_fp8.data.loader import TrainLoader
from llm_fp8.models.build import allocate_and_fill, build_structure, fill_weights, filled_layers
from llm_fp8.models.model import Model, is_adapter
from llm_fp8.observability.metrics import GIB
from llm_fp8.optim.optimizers import OPTIMIZERS, build_scheduler
from llm_fp8.precision.context import Precision
from llm_fp8.precision.coverage import Fp8Coverage, gemms_per_weight, measure_coverage
from llm_fp8.settle.plan import RunPlan
from llm_fp8.step.compiled import compile_layers
from llm_fp8.step.loss_model import TrainingModel
from llm_fp8.step.stepper import Stepper
from llm_fp8.utils.hf_internals import chosen_attention
from llm_fp8.utils.torch_internals import free_memory_, ignore_in_ddp


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of a run that are built before its optimizer."""

    plan: RunPlan
    model: Model
    training_model: TrainingModel  # computes the loss of `model.module`
    precision: Precision  # attached to `model`
    coverage: Fp8Coverage
    recomputed: Sequence[nn.Module]  # recomputed decoder layers
    attention: str  # 'te', or transformers' name of the attention implementation
    num_parameters: int
    num_trainable_parameters: int
    num_adapter_parameters: int

    @property
    def exports_adapter(self) -> bool:
        """True if final/ will contain adapters alone. If the base weights are random, final/ gets the whole model."""
        return self.plan.config.trains_adapters and self.plan.stored is not None


def build_setup(plan: RunPlan, first_batch: Batch | None = None, in_bf16: bool = False) -> TrainingSetup:
    """Build the model of `plan` with its weights on the device, sharded over the processes. Collective.

    If `first_batch` is set, the TE decoder's outputs for it are compared with those of Hugging Face's decoder. If
    `in_bf16`, frozen weights stay in bf16, even if the plan says that they are stored in fp8.
    """
    config, strategy = plan.config, plan.strategy
    holds_in_fp8 = plan.holds_frozen_in_fp8 and not in_bf16
    built = _decoder_with_adapters(plan, on_meta=strategy.shards_parameters or holds_in_fp8)
    model, layers = built.module, built.layers
    if (chosen_attention(model.config), config.model.attn_implementation) == ("eager", "auto"):
        plan.say("attention: eager, which is slow: transformers has no sdpa for this model")
    dtype = plan.precision.compute_dtype
    # FSDP gathers parameters in the compute dtype.
    module_dtype = dtype if strategy.shards_parameters else plan.parameter_dtype
    precision = Precision(plan.precision, config.precision, plan.device, module_dtype)
    reasons = precision.attach(model, layers, not config.model.use_te, config.parallel.fp8_params)
    if config.trains_adapters and strategy.caches_weight_casts:
        precision.keep_casts_of_frozen_weights()
    gemms = gemms_per_weight(built)
    in_fp8 = row_of(plan.precision.effective_scenario).gemms_in_fp8
    coverage = measure_coverage(model, precision.fp8_modules, plan.precision.compute_name, reasons, gemms, in_fp8)
    plan.say(coverage.describe())
    uses_te = config.model.use_te or plan.precision.backend == "te"
    reentrant = uses_te and strategy.reentrant_te_checkpoints
    amount, in_graphs = config.model.gradient_checkpointing, plan.graphs is not False
    recomputed: Sequence[nn.Module] = ()
    if amount:
        from llm_fp8.step.activation_checkpoint import enable_gradient_checkpointing

        recomputed = enable_gradient_checkpointing(layers, amount, uses_te, reentrant, in_graphs)
    training_model = TrainingModel(model, config, dtype, plan.packed_form)
    attention = "te" if config.model.use_te else chosen_attention(model.config)  # which `TrainingModel` may change
    plan.say(training_model.router_note)
    strategy.shard(training_model, layers, precision.fp8_modules if holds_in_fp8 else ())
    _load_weights(plan, built, precision, first_batch, holds_in_fp8)
    if holds_in_fp8 and not strategy.shards_parameters:
        # DDP would broadcast the frozen fp8 weights as bf16, the dtype that torch reports.
        ignore_in_ddp(training_model, [name for name, p in training_model.named_parameters() if not p.requires_grad])
    if config.trains_adapters:
        from llm_fp8.models.lora import initialize_adapters_, load_adapters_

        initialize_adapters_(model, config.optim.seed)
        if (adapter := plan.source.adapter) is not None:
            load_adapters_(model, adapter)
            plan.say(f"adapters: those in {adapter}, trained on")
    if strategy.context_group is not None:
        strategy.context_group.attach(layers)
    plan.say(built.describe_left_out())
    if plan.stored is not None and (plan.rounds_weights or plan.stored.fp8 is not None):
        plan.say(_describe_rounding(plan, plan.stored.fp8))
    if plan.eager_reason is None:
        compile_layers(layers, recomputed=bool(recomputed))
    num_parameters = sum(parameter.numel() for parameter in training_model.parameters())
    num_trained = sum(parameter.numel() for parameter in training_model.parameters() if parameter.requires_grad)
    num_adapter = sum(parameter.numel() for name, parameter in model.named_parameters() if is_adapter(name))
    parts = plan, built, training_model, precision, coverage, recomputed, attention
    return TrainingSetup(*parts, num_parameters, num_trained, num_adapter)


def warm_up_scales(setup: TrainingSetup, loader: TrainLoader) -> None:
    """If the run uses delayed scaling, compute its first scales from the loader's next step. Collective."""
    if not setup.precision.scales_lag:
        return
    from llm_fp8.step.scale_warmup import PASSES, warm_up_delayed_scales

    plan, batches = setup.plan, loader.first_step()
    # The stepper divides by the tokens of all processes, and `DistributedStrategy.backward` multiplies by their number.
    num_on_rank = torch.tensor(float(sum(batch.num_supervised_tokens for batch in batches)), device=plan.device)
    num_supervised = float(plan.accelerator.reduce(num_on_rank, reduction="mean"))
    warm_up_delayed_scales(setup.training_model, setup.precision, batches[0].to(plan.device), num_supervised)
    plan.say(f"delayed scaling: first scales from {PASSES} passes over the first micro-batch")


def build_stepper(setup: TrainingSetup, loader: TrainLoader | None, num_steps: int, step: int = 0) -> Stepper:
    """Build optimizer, first fp8 scales and schedule of a run of `num_steps` steps, of which `step` are done. `loader`
    is None if the scales will be restored from a checkpoint. Collective.
    """
    plan, options, strategy = setup.plan, setup.plan.config.optim, setup.plan.strategy
    parameters = setup.training_model.named_parameters()
    optimizer = OPTIMIZERS[plan.optimizer_kind].build(parameters, options, plan.draws_lower_bits)
    # A prepared model may treat every backward pass as training, so scales are computed before `prepare`. FSDP's
    # parameters may be replaced by `prepare`, so scales are computed after it.
    if loader is not None and not strategy.shards_parameters:
        warm_up_scales(setup, loader)
    model, optimizer = strategy.prepare(setup.training_model, optimizer, setup.precision)
    if loader is not None and strategy.shards_parameters:
        warm_up_scales(setup, loader)
    scheduler = build_scheduler(optimizer, options, num_steps, step)
    return Stepper(
        setup.training_model, model, optimizer, scheduler, strategy, setup.precision, options.max_grad_norm, plan.graphs
    )


def _decoder_with_adapters(plan: RunPlan, on_meta: bool) -> Model:
    """Build the model and, for LoRA, uninitialised adapters. If `on_meta`, all other weights are uninitialised too."""
    config = plan.config
    shared: dict[str, Any] = {"parameter_dtype": plan.weight_dtype, "device": plan.device}
    shared["full_tensor"] = plan.strategy.full_tensor
    if config.trains_adapters:
        from llm_fp8.models import lora

        shared["unfused_mlp"] = lora.needs_unfused_mlp(config.lora)
    model = build_structure(config.model, plan.hf_config, plan.stored, **shared)
    if not on_meta:
        allocate_and_fill(model, plan.device, config.optim.seed, plan.keeps_lower_bits)
    if config.trains_adapters:
        plan.say(lora.add_adapters(model, config.lora, plan.parameter_dtype))
    return model


def _describe_rounding(plan: RunPlan, fp8: Any) -> str:
    """Describe how stored weights are rounded to the model's dtype. `fp8` is their fp8 format, if they have one."""
    if fp8 is not None:
        rounded = ", rounded to bfloat16" if plan.rounds_weights and not plan.keeps_lower_bits else ""
        return f"stored weights are {fp8.describe()}: training starts from value times scale{rounded}"
    stored = str(plan.export_dtype).removeprefix("torch.")
    if plan.keeps_lower_bits:
        return f"stored weights are {stored}: training starts from their exact values"
    return f"WARNING: stored weights are {stored} and are rounded to bfloat16"


def _load_weights(plan: RunPlan, model: Model, precision: Precision, batch: Batch | None, holds_in_fp8: bool) -> None:
    """Fill the parameters of `model` that are not initialised. If `batch` is set, compare the outputs of the TE decoder
    with those of Hugging Face's. If `holds_in_fp8`, allocate weights layer by layer, kept only in fp8. Collective.
    """
    filling, shards_parameters = (plan.device, plan.config.optim.seed), plan.strategy.shards_parameters
    full_layers: Iterable[nn.Module] = model.layers
    if holds_in_fp8:
        full_layers = _freed_again(filled_layers(model, model.layers, *filling), precision)
        if not shards_parameters:
            model.module.tie_weights()  # moving the model to the device unties them
    elif shards_parameters:
        fill_weights(model, *filling, plan.keeps_lower_bits)
    if batch is not None:
        from llm_fp8.models.parity import check_parity

        dtype = plan.precision.compute_dtype if shards_parameters else plan.weight_dtype
        first, width = batch.to(plan.device), plan.config.data.max_seq_length
        num_slices = plan.config.parallel.context_parallel_size
        plan.say(check_parity(model, full_layers, first, width, dtype, num_slices))
    if not holds_in_fp8:
        return
    dropped = 0
    for layer in filled_layers(model, model.layers, *filling):
        if shards_parameters:
            from llm_fp8.distributed.fp8_params import keep_weights_in_fp8

            keep_weights_in_fp8(layer, precision)
        else:
            from llm_fp8.precision.frozen import hold_in_fp8

            dropped += hold_in_fp8(layer, precision)
    held = f"held in fp8 only ({dropped / GIB:.1f} GiB of bf16 weights cast while loading)"
    plan.say(f"frozen weights are {'sharded and gathered in fp8 only' if shards_parameters else held}")


def _freed_again(layers: Iterable[nn.Module], precision: Precision) -> Iterator[nn.Module]:
    """Yield each of `layers`. Once the caller has processed a layer, free the memory of the fp8 modules in it."""
    for layer in layers:
        yield layer
        for module in precision.fp8_modules.intersection(layer.modules()):
            for parameter in module.parameters(recurse=False):
                free_memory_(parameter)
