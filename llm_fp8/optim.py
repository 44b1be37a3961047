"""AdamW in three storage formats, learning-rate schedules, and optimizer state as plain tensors.

Why more than one AdamW. A weight of 0.02 has its bf16 neighbours 1.2e-4 away, so a bf16 weight moves only if an update
exceeds half of that, 6e-5. AdamW's update is about the learning rate, 1e-5 in fine-tuning: plain AdamW on bf16 weights
rounds nearly all of it away and trains only what the noise pushes over the edge. Each kind here keeps those small updates:

    kind           parameters   how small updates survive                              m / v          made by
    adamw_fp32     fp32         the parameters are fp32 (the forward pass casts)       fp32 / fp32    torch, fused
    adamw_master   bf16         the lower 16 bits of an fp32 master are kept apart     bf16 / fp32    llm_fp8.master_adamw
    adamw_8bit     bf16         stochastic rounding: right on average                  8-bit blocks   llm_fp8.eight_bit_adamw

`bytes_per_parameter` has the bytes. AdamW itself is Loshchilov and Hutter, arXiv 1711.05101; 8-bit moments in blocks of 256
with a shared scale are Dettmers et al., arXiv 2110.02861.

Moments of adamw_master. m averages over about 1 / (1 - beta1) = 10 gradients and bears bf16's relative error of 2^-9. v
changes by a fraction (1 - beta2) of (g^2 / v - 1) a step; at beta2 = 0.999 that is often below bf16's half spacing of
2^-9, so a bf16 v stalls. It is fp32 here.

State as tensors. `optimizer_tensors` names every state tensor "parameter_name.state_name" and hands out the tensors
themselves, never casts: `Optimizer.load_state_dict` would turn fp32 moments of bf16 parameters into bf16 ones.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from llm_fp8.config import OptimConfig
from llm_fp8.eight_bit_adamw import EightBitAdamW
from llm_fp8.eight_bit_codes import CODE_BLOCK
from llm_fp8.errors import UserError
from llm_fp8.gradients import clip_factor, clip_gradients_, gradient_norm
from llm_fp8.grouped_adamw import GroupedAdamW
from llm_fp8.master_adamw import FIRST_MOMENT_DTYPE, SECOND_MOMENT_DTYPE, MasterAdamW

OptimizerKind = Literal["adamw_fp32", "adamw_master", "adamw_8bit"]

MAX_WARMUP_SHARE = 10
"""Warm-up takes at most one part in so many of the run."""


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
    """The dtype for trainable parameters: fp32 for adamw_fp32, bf16 for the others (fp32 works there too, at more bytes)."""
    return torch.float32 if kind == "adamw_fp32" else torch.bfloat16


def resolve_optimizer(requested: str, computes_bf16: bool, device_type: str) -> OptimizerKind:
    """The optimizer that `--optimizer` means on this machine.

    auto is adamw_master on a GPU where the run computes in bf16, and adamw_fp32 elsewhere. On a CPU adamw_master and adamw_8bit are
    plain torch, for trials.

    Args:
        requested: value of `--optimizer`, 'auto' included.
        computes_bf16: whether the forward pass computes in bf16, so that bf16 parameters lose nothing.
        device_type: 'cuda', 'cpu', ...: where the parameters live.

    Raises:
        UserError: the run, the machine or the installation lacks what the requested optimizer needs.
    """
    on_gpu = device_type == "cuda"
    if requested == "auto":
        return "adamw_master" if on_gpu and computes_bf16 and _is_installed("triton") else "adamw_fp32"
    if requested == "adamw_fp32":
        return "adamw_fp32"
    if requested not in ("adamw_master", "adamw_8bit"):
        raise UserError(f"--optimizer {requested} is unknown; choose auto, adamw_fp32, adamw_master or adamw_8bit.")
    if not computes_bf16:
        raise UserError(
            f"--optimizer {requested} keeps the parameters in bf16 and needs a run that computes in bf16: --mixed_precision bf16 or fp8, "
            "or use --optimizer adamw_fp32."
        )
    if on_gpu and not _is_installed("triton"):
        raise UserError(f"--optimizer {requested} needs triton on a GPU, and it is not installed: pip install triton.")
    return "adamw_master" if requested == "adamw_master" else "adamw_8bit"


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def parameter_groups(named_parameters: Iterable[tuple[str, Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in at most two groups: matrices with `weight_decay`, norms and biases (at most 1-D) without.

    Embeddings are matrices and decay. Frozen parameters are left out; a parameter with two names (tied weights) counts once.

    Raises:
        ValueError: nothing is trainable.
    """
    unique = {id(parameter): parameter for _, parameter in named_parameters if parameter.requires_grad}
    if not unique:
        raise ValueError("There is no trainable parameter to optimize.")
    matrices = [parameter for parameter in unique.values() if parameter.ndim > 1]
    norms_and_biases = [parameter for parameter in unique.values() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": norms_and_biases, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw_arguments(config: OptimConfig) -> dict[str, Any]:
    """The arguments that every AdamW takes by these names; weight decay is in the groups."""
    return {"lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}


def build_optimizer(config: OptimConfig, kind: OptimizerKind, named_parameters: Iterable[tuple[str, Parameter]]) -> Optimizer:
    """The AdamW of `kind` over the trainable parameters.

    Args:
        config: learning rate, weight decay, betas and epsilon; adamw_8bit's random bits follow from its seed.
        kind: from `resolve_optimizer`.
        named_parameters: e.g. `model.named_parameters(remove_duplicate=False)`; on the device already.

    Raises:
        ValueError: a parameter is neither of `parameter_dtype(kind)` nor fp32, so that its updates would be lost (bf16 under
            adamw_fp32) or the optimizer cannot take it (fp16).
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


def effective_warmup_steps(num_warmup_steps: int, total_steps: int) -> int:
    """Warm-up steps that a run of `total_steps` uses: what was asked for, at most a tenth of the run."""
    return min(num_warmup_steps, total_steps // MAX_WARMUP_SHARE)


def learning_rate_factor(step: int, total_steps: int, warmup_steps: int, kind: str) -> float:
    """The learning rate of the optimizer step with index `step`, as a share of the peak.

    Linear warm-up gives the w warm-up steps the shares 1/w, 2/w, ..., 1: no step runs at zero. After it, with p = (step - w)
    / (total_steps - w):

        constant   1
        linear     1 - p
        cosine     (1 + cos(pi p)) / 2

    Args:
        step: completed optimizer steps, 0 for the first step of the run. At `total_steps` and beyond decays give 0.
        total_steps: optimizer steps of the whole run, resumed parts included.
        warmup_steps: see `effective_warmup_steps`.
        kind: 'linear', 'cosine' or 'constant'.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if kind == "linear":
        return 1.0 - progress
    if kind == "cosine":
        return (1.0 + math.cos(math.pi * progress)) / 2
    raise ValueError(f"Unknown learning-rate schedule {kind!r}.")


def build_scheduler(optimizer: Optimizer, config: OptimConfig, total_steps: int, completed_steps: int = 0) -> LambdaLR:
    """The schedule of `config` on `optimizer`; call `.step()` once after each optimizer step.

    The learning rate is a function of the number of completed steps alone, so a resumed run passes `completed_steps` and
    needs no scheduler state. Do not hand the result to `Accelerator.prepare`: that steps it once per process.
    """
    optimizer = _unwrap(optimizer)
    warmup_steps = effective_warmup_steps(config.num_warmup_steps, total_steps)

    def factor(step: int) -> float:
        return learning_rate_factor(step, total_steps, warmup_steps, config.lr_scheduler)

    for group in optimizer.param_groups:
        group["initial_lr"] = config.learning_rate
    return LambdaLR(optimizer, factor, last_epoch=completed_steps - 1)


def _unwrap(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside Accelerate's wrapper, whose own step may be skipped or patched."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def not_optimised(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Names of the parameters of `model` that want gradients and that no step of `optimizer` moves."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in known]


def clip_and_step(optimizer: Optimizer, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
    """Take one optimizer step with the gradients' global norm clipped to `max_norm`; returns the norm before, an fp32 scalar.

    The AdamWs of this project multiply by the clip factor as they read the gradients, which stay as they are; for torch's they are
    scaled in place first.

    Args:
        optimizer: plain or wrapped by Accelerate; fp16's gradients are unscaled already.
        parameters: those that the norm is taken over; at least one has a gradient.
        max_norm: 0 for no clipping.
    """
    inner = _unwrap(optimizer)
    if isinstance(inner, GroupedAdamW):
        norm = gradient_norm(parameters)
        inner.gradient_scale = clip_factor(norm, max_norm) if max_norm > 0 else None
    else:
        norm = clip_gradients_(parameters, max_norm)
    optimizer.step()
    return norm


def initialize_state(optimizer: Optimizer) -> None:
    """Create the state of every parameter as it is before the first step, so that it can be saved, loaded and counted.

    Call it after `Accelerator.prepare` (which replaces parameters under FSDP2 and reloads the state dict). It does nothing
    where there is state already.
    """
    optimizer = _unwrap(optimizer)
    if optimizer.state:
        return
    if isinstance(optimizer, GroupedAdamW):
        optimizer.initialize_state()
    else:
        _initialize_by_an_idle_step(optimizer)


def _initialize_by_an_idle_step(optimizer: Optimizer) -> None:
    """Let torch's AdamW create its own state: one step with gradients of zero at a learning rate of zero moves nothing.

    torch's optimizers have no public way to create state; torch.distributed.checkpoint does it in this way too.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
        optimizer.state[parameter]["step"].zero_()
    for group, learning_rate in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate


def optimizer_tensors(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]]) -> dict[str, Tensor]:
    """Every state tensor under "parameter_name.state_name": the tensors themselves, without copy or cast.

    adamw_fp32 has step, exp_avg and exp_avg_sq. adamw_master has exp_avg, exp_avg_sq and, for bf16 parameters, remainder; adamw_8bit
    has exp_avg and exp_avg_sq and, where these are codes, exp_avg_scale and exp_avg_sq_scale; the steps of both are in
    `optimizer_scalars`. Tied parameters appear under their first name.
    """
    optimizer = _unwrap(optimizer)
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, parameter in named_parameters:
        if id(parameter) in seen or parameter not in optimizer.state:
            continue
        seen.add(id(parameter))
        for state_name, value in optimizer.state[parameter].items():
            tensors[f"{name}.{state_name}"] = value
    return tensors


def load_optimizer_tensors(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]], tensors: Mapping[str, Tensor]
) -> None:
    """Copy saved state into the optimizer, bit for bit, creating the state first where there is none.

    Raises:
        UserError: names, shapes or dtypes are not those of this optimizer; the sentence names the first few.
    """
    initialize_state(optimizer)
    targets = optimizer_tensors(optimizer, named_parameters)
    problems = [f"{name} is missing" for name in targets if name not in tensors]
    problems += [f"{name} is unexpected" for name in tensors if name not in targets]
    for name in targets.keys() & tensors.keys():
        have, want = tensors[name], targets[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            problems.append(f"{name} is {have.dtype} {tuple(have.shape)}, not {want.dtype} {tuple(want.shape)}")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"The saved optimizer state does not fit this optimizer: {'; '.join(problems[:3])}{more}; "
            "resume with the --optimizer and model that the checkpoint was written with."
        )
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(tensors[name])


def optimizer_scalars(optimizer: Optimizer) -> dict[str, Any]:
    """State that is not a tensor, fit for JSON: this project's AdamWs count steps per parameter group, torch's per parameter."""
    return {"group_steps": [group.get("step") for group in _unwrap(optimizer).param_groups]}


def load_optimizer_scalars(optimizer: Optimizer, scalars: Mapping[str, Any]) -> None:
    """Restore what `optimizer_scalars` gave.

    Raises:
        UserError: the number of parameter groups differs.
    """
    groups, steps = _unwrap(optimizer).param_groups, scalars["group_steps"]
    if len(groups) != len(steps):
        raise UserError(
            f"The saved optimizer has {len(steps)} parameter groups and this one {len(groups)}; "
            "resume with the --optimizer and model that the checkpoint was written with."
        )
    for group, step in zip(groups, steps, strict=True):
        if step is not None:
            group["step"] = step
