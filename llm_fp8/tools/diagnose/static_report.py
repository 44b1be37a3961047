"""The diagnosis without a GPU: which layers fp8 would cover, and the memory that parameters alone need."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from llm_fp8.config.options import Config
from llm_fp8.config.recipes import chosen, size_multiple
from llm_fp8.models.build import count_parameters, decoder_layers, model_on_meta
from llm_fp8.models.source import load_config, resolve_source
from llm_fp8.optim.optimizers import OptimizerKind, bytes_per_parameter
from llm_fp8.precision.context import bf16_modules
from llm_fp8.precision.convert import reason_to_leave
from llm_fp8.precision.coverage import Fp8Coverage, measure_coverage
from llm_fp8.precision.plan import PrecisionPlan, describe_device
from llm_fp8.tools.diagnose.result import findings


def diagnose_without_gpu(config: Config) -> dict[str, Any]:
    """The findings that need no GPU. Raises `UserError` for a model that does not exist or cannot be built."""
    plan = asked_for(config)
    hf_config = load_config(config.model, resolve_source(config.model))
    notes = [
        "operand types, attention kernels, the time of a step and its peak of memory need an NVIDIA GPU, and none is "
        "found"
    ]
    if config.model.use_te:
        notes.append(
            "the layers of --use_te are Transformer Engine's, which exist on a GPU only; --use_te=false shows the "
            "Hugging Face path's"
        )
    kind = planned_optimizer(config, plan)
    notes.append(f"memory is worked out for {kind}, one GPU, without activations and fp8 casts")
    return findings(
        config,
        describe_device(torch.device("cpu")),
        plan,
        coverage=None if config.model.use_te else planned_coverage(config, hf_config, plan),
        notes=notes,
        planned_memory=planned_memory(count_parameters(hf_config), kind),
    )


def asked_for(config: Config) -> PrecisionPlan:
    """The precision that the options ask for, without the checks that need the hardware."""
    requested = config.precision.mixed_precision or "bf16"
    if requested != "fp8":
        return PrecisionPlan(requested, requested)
    scenario, backend = config.precision.fp8_scenario, config.precision.fp8_backend
    return PrecisionPlan(requested, requested, scenario, chosen(scenario, backend), backend=backend)


def planned_coverage(config: Config, hf_config: PretrainedConfig, plan: PrecisionPlan) -> Fp8Coverage:
    """The coverage of the Hugging Face decoder, from the model's structure without weights."""
    model = model_on_meta(hf_config)
    if plan.effective != "fp8":
        return measure_coverage(model, (), plan.compute_name, {})
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    head: Any = model.get_output_embeddings()
    multiple = size_multiple(plan.effective_scenario)
    reasons = {
        name: reason for name, module in linears.items() if (reason := reason_to_leave(name, module, head, multiple))
    }
    kept = {
        inner for module in bf16_modules(config.precision, model, decoder_layers(model)) for inner in module.modules()
    }
    covered = [module for name, module in linears.items() if name not in reasons and module not in kept]
    return measure_coverage(model, covered, plan.compute_name, reasons)


def planned_optimizer(config: Config, plan: PrecisionPlan) -> OptimizerKind:
    if config.optim.optimizer != "auto":
        return config.optim.optimizer
    return "adamw_master" if plan.compute_dtype == torch.bfloat16 else "adamw_fp32"


def planned_memory(num_parameters: int, kind: OptimizerKind) -> dict[str, int]:
    """Bytes by kind that follow from the number of parameters."""
    each = bytes_per_parameter(kind)
    return {
        "weights": int(num_parameters * each.weight),
        "gradients": int(num_parameters * each.gradient),
        "optimizer_state": int(num_parameters * each.state),
    }
