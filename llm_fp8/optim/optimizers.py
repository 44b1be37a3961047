"""AdamW in three storage formats: which one a run takes, its parameter groups, and the clipped step.

Why more than one. A weight of 0.02 has its bf16 neighbours 1.2e-4 away, so a bf16 weight moves only if an update
exceeds half of that, 6e-5. AdamW's update is about the learning rate, 1e-5 in fine-tuning: on bf16 weights nearly all
of it is rounded away. Each kind here keeps those small updates:

    kind           parameters   how small updates survive                           m / v         made by
    adamw_fp32     fp32         the parameters are fp32 (the forward pass casts)    fp32 / fp32   torch, fused
    adamw_master   bf16         the lower 16 bits of an fp32 master weight          bf16 / fp32   `adamw_master`
                                are kept apart
    adamw_8bit     bf16         stochastic rounding: right on average               8-bit blocks  `adamw_8bit`

`bytes_per_parameter` has the bytes. Moments of adamw_master: m averages over about 1 / (1 - beta1) = 10 gradients and
bears bf16's relative error of 2^-9. v changes by a fraction (1 - beta2) of (g^2 / v - 1) a step; at beta2 = 0.999 that
is often below bf16's half spacing of 2^-9, so a bf16 v stalls. It is fp32 here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from llm_fp8.config.options import OptimConfig
from llm_fp8.optim.adamw_8bit import EightBitAdamW
from llm_fp8.optim.adamw_8bit_codes import CODE_BLOCK
from llm_fp8.optim.adamw_base import GroupedAdamW
from llm_fp8.optim.adamw_master import FIRST_MOMENT_DTYPE, SECOND_MOMENT_DTYPE, MasterAdamW
from llm_fp8.optim.clipping import clip_factor, clip_gradients_, gradient_norm

OptimizerKind = Literal["adamw_fp32", "adamw_master", "adamw_8bit"]


@dataclass(frozen=True)
class BytesPerParameter:
    """Bytes that one trainable parameter occupies during training, by part."""

    weight: float
    gradient: float
    master: float
    first_moment: float
    second_moment: float

    @property
    def total(self) -> float:
        return self.weight + self.gradient + self.master + self.first_moment + self.second_moment


# An 8-bit moment is one byte and its share of the fp32 scale of its block.
_8BIT_MOMENT_BYTES = 1 + 4 / CODE_BLOCK

_BYTES_PER_PARAMETER: dict[str, BytesPerParameter] = {
    "adamw_fp32": BytesPerParameter(weight=4, gradient=4, master=0, first_moment=4, second_moment=4),
    "adamw_master": BytesPerParameter(
        weight=2,
        gradient=2,
        master=2,
        first_moment=FIRST_MOMENT_DTYPE.itemsize,
        second_moment=SECOND_MOMENT_DTYPE.itemsize,
    ),
    "adamw_8bit": BytesPerParameter(
        weight=2, gradient=2, master=0, first_moment=_8BIT_MOMENT_BYTES, second_moment=_8BIT_MOMENT_BYTES
    ),
}


def bytes_per_parameter(kind: OptimizerKind) -> BytesPerParameter:
    """Storage per trainable parameter; casts to the compute dtype (bf16, fp8) and activations come on top."""
    return _BYTES_PER_PARAMETER[kind]


def parameter_dtype(kind: OptimizerKind) -> torch.dtype:
    """The dtype of trainable parameters: fp32 for adamw_fp32, bf16 for the others (fp32 works there too)."""
    return torch.float32 if kind == "adamw_fp32" else torch.bfloat16


def resolve_optimizer(requested: str, computes_bf16: bool, device_type: str) -> OptimizerKind:
    """The optimizer that `--optimizer`, which `check_machine` let pass, means on this machine: auto is adamw_master on
    a GPU in a run that computes in bf16, and adamw_fp32 elsewhere.
    """
    if requested != "auto":
        return cast(OptimizerKind, requested)
    has_kernel = device_type == "cuda" and importlib.util.find_spec("triton") is not None
    return "adamw_master" if has_kernel and computes_bf16 else "adamw_fp32"


def parameter_groups(named_parameters: Iterable[tuple[str, Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters, tied ones once, in at most two groups: matrices (embeddings too) with `weight_decay`, norms
    and biases (at most 1-D) without. ValueError where nothing is trainable.
    """
    unique = {id(parameter): parameter for _, parameter in named_parameters if parameter.requires_grad}
    if not unique:
        raise ValueError("There is no trainable parameter to optimize.")
    matrices = [parameter for parameter in unique.values() if parameter.ndim > 1]
    norms_and_biases = [parameter for parameter in unique.values() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": norms_and_biases, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw_arguments(config: OptimConfig) -> dict[str, Any]:
    """The arguments that every AdamW takes by these names; weight decay is in the groups."""
    return {"lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}


def build_optimizer(
    config: OptimConfig, kind: OptimizerKind, named_parameters: Iterable[tuple[str, Parameter]]
) -> Optimizer:
    """The AdamW of `kind` over the trainable parameters.

    Args:
        config: learning rate, weight decay, betas and epsilon; adamw_8bit's random bits follow from its seed.
        kind: from `resolve_optimizer`.
        named_parameters: of the model, on the device already.

    Raises:
        ValueError: a parameter is neither of `parameter_dtype(kind)` nor fp32.
    """
    named = list(named_parameters)
    wanted = parameter_dtype(kind)
    for name, parameter in named:
        if parameter.requires_grad and parameter.dtype not in (wanted, torch.float32):
            raise ValueError(f"{kind} takes {wanted} parameters, and {name} is {parameter.dtype}.")
    groups = parameter_groups(named, config.weight_decay)
    shared = adamw_arguments(config)
    if kind == "adamw_fp32":
        fused = all(parameter.device.type in ("cpu", "cuda") for group in groups for parameter in group["params"])
        return torch.optim.AdamW(groups, fused=fused, **shared)
    if kind == "adamw_master":
        return MasterAdamW(groups, **shared)
    return EightBitAdamW(groups, seed=config.seed, **shared)


def unwrap(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside Accelerate's wrapper, whose own step may be skipped or patched."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def not_optimised(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the trainable parameters of `model` that `optimizer` does not hold."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in known
    ]


def clip_and_step(optimizer: Optimizer, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
    """Step with the gradients of `parameters` clipped to the global norm `max_norm` (0: no clipping); returns the norm
    before clipping, an fp32 scalar.

    This project's AdamWs multiply by the clip factor as they read the gradients; for torch's these are scaled in place.
    fp16's gradients are unscaled already.
    """
    inner = unwrap(optimizer)
    if isinstance(inner, GroupedAdamW):
        norm = gradient_norm(parameters)
        inner.gradient_scale = clip_factor(norm, max_norm) if max_norm > 0 else None
    else:
        norm = clip_gradients_(parameters, max_norm)
    optimizer.step()
    return norm
