"""AdamW in three storage formats: which one a run takes, its parameter groups, and the clipped step.

A weight of 0.02 has its bf16 neighbours 1.2e-4 away, so a bf16 weight moves only by updates above half of that, 6e-5.
AdamW's update is about the learning rate, 1e-5 in fine-tuning: it would be rounded away. Each kind keeps small updates:

    kind           parameters   how small updates survive                           m / v         format
    adamw_fp32     fp32         the parameters are fp32 (the forward pass casts)    fp32 / fp32   torch's
    adamw_master   bf16         a remainder holds the fp32 master's lower 16 bits   bf16 / fp32   `adamw_master`
    adamw_8bit     bf16         stochastic rounding: right on average               8-bit blocks  `adamw_8bit_codes`

Moments of adamw_master: m averages over about 1 / (1 - beta1) = 10 gradients and tolerates bf16's relative error of
2^-9. v changes by a fraction (1 - beta2) of (g^2 / v - 1) a step; at beta2 = 0.999 that is often below bf16's half
spacing of 2^-9, so a bf16 v would stall.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from llm_fp8.config.options import OptimConfig
from llm_fp8.optim.adamw_master import FIRST_MOMENT_DTYPE, SECOND_MOMENT_DTYPE

OptimizerKind = Literal["adamw_fp32", "adamw_master", "adamw_8bit"]


class BytesPerParameter(NamedTuple):
    """Bytes that one trainable parameter occupies during training; casts and activations come on top."""

    weight: float
    gradient: float
    state: float

    @property
    def total(self) -> float:
        return sum(self)


def bytes_per_parameter(kind: OptimizerKind) -> BytesPerParameter:
    if kind == "adamw_fp32":
        return BytesPerParameter(4, 4, 4 + 4)
    if kind == "adamw_master":
        return BytesPerParameter(2, 2, 2 + FIRST_MOMENT_DTYPE.itemsize + SECOND_MOMENT_DTYPE.itemsize)
    return BytesPerParameter(2, 2, 2 * (1 + 4 / 256))  # codes and their share of the fp32 scale of a block of 256


def parameter_dtype(kind: OptimizerKind) -> torch.dtype:
    """The dtype of trainable parameters: fp32 for adamw_fp32, bf16 for the others (fp32 works there too)."""
    return torch.float32 if kind == "adamw_fp32" else torch.bfloat16


def parameter_groups(named_parameters: Iterable[tuple[str, Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters, tied ones once: matrices (embeddings too) with `weight_decay`, norms and biases (at most
    1-D) without.
    """
    unique = {id(parameter): parameter for _, parameter in named_parameters if parameter.requires_grad}
    matrices = [parameter for parameter in unique.values() if parameter.ndim > 1]
    norms_and_biases = [parameter for parameter in unique.values() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": norms_and_biases, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


ADAM_BETA1, ADAM_EPSILON = 0.9, 1e-8
"""Decay of the first moment, and what is added to the denominator of the update."""


def adamw_arguments(config: OptimConfig) -> dict[str, Any]:
    """The arguments that every AdamW takes by these names; weight decay is in the groups."""
    return {"lr": config.learning_rate, "betas": (ADAM_BETA1, config.adam_beta2), "eps": ADAM_EPSILON}


def build_optimizer(
    config: OptimConfig, kind: OptimizerKind, named_parameters: Iterable[tuple[str, Parameter]]
) -> Optimizer:
    """The AdamW of `kind` over the trainable parameters, of `parameter_dtype(kind)` or fp32."""
    groups, shared = parameter_groups(named_parameters, config.weight_decay), adamw_arguments(config)
    if kind == "adamw_fp32":
        return torch.optim.AdamW(groups, fused=True, **shared)
    if kind == "adamw_master" and config.offload_optimizer:
        from llm_fp8.optim.offload import OffloadedMasterAdamW

        return OffloadedMasterAdamW(groups, share=config.offload_optimizer, **shared)
    from llm_fp8.optim.adamw import EightBitAdamW, MasterAdamW

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


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """The global L2 norm, an fp32 scalar on the gradients' device, without a host synchronisation."""
    # torch's `clip_grad_norm_` accumulates in the gradients' dtype; bf16 is off by up to 0.4 %.
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm  # reduces over the ranks that hold shards


def clip_and_step(optimizer: Optimizer, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
    """Step with the (unscaled) gradients of `parameters` clipped to the global norm `max_norm` (0: no clipping);
    returns the norm before clipping, an fp32 scalar.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(gradients)
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        inner = unwrap(optimizer)
        if hasattr(inner, "gradient_scale"):  # this project's, which apply it as they read the gradients
            inner.gradient_scale = factor
        else:
            torch._foreach_mul_(gradients, factor)
    optimizer.step()
    return norm
