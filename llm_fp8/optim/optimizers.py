"""AdamW in three storage formats: construction, parameter groups, the clipped step, state and schedule.

The bf16 neighbours of a weight of 0.02 are 1.2e-4 away, so rounding to nearest removes every update below 6e-5. An
update of AdamW has about the size of the learning rate, 1e-5 in fine-tuning. The optimizers preserve such updates in
different ways:

    kind           parameters   how small updates are preserved                     m / v         format
    adamw_fp32     fp32         the parameters are fp32 (the forward pass casts)    fp32 / fp32   torch's
    adamw_master   bf16         a remainder has the fp32 master's lower 16 bits     bf16 / fp32   `adamw_master`
    adamw_8bit     bf16         stochastic rounding is unbiased                     8-bit blocks  `adamw_8bit_codes`

In adamw_master, m averages about 10 gradients and tolerates bf16's relative error of 2^-9. v must be fp32: it changes
by the fraction (1 - beta2) (g^2 / v - 1) per step, often below 2^-9 at beta2 = 0.999, and a bf16 v would not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from llm_fp8.config.options import OptimConfig, OptimizerKind
from llm_fp8.optim.adamw_master import draw_lower_bits_
from llm_fp8.utils.errors import reading
from llm_fp8.utils.te_internals import prefer_torchs_cudnn
from llm_fp8.utils.torch_internals import local_of

NamedParameters = Iterable[tuple[str, Parameter]]


def parameter_groups(named_parameters: NamedParameters, weight_decay: float) -> list[dict[str, Any]]:
    """Divide trainable parameters (tied ones once) into matrices, with weight decay, and others, without."""
    unique = dict.fromkeys(parameter for _, parameter in named_parameters if parameter.requires_grad)
    matrices = [parameter for parameter in unique if parameter.ndim > 1]
    norms_and_biases = [parameter for parameter in unique if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": norms_and_biases, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw_arguments(config: OptimConfig) -> dict[str, Any]:
    """Return the keyword arguments that every AdamW gets. Weight decay is in the parameter groups instead."""
    return {"lr": config.learning_rate, "betas": (0.9, config.adam_beta2), "eps": 1e-8}


def _adamw_fp32(parameters: NamedParameters, config: OptimConfig, draws_lower_bits: bool) -> Optimizer:
    groups = parameter_groups(parameters, config.weight_decay)
    if draws_lower_bits:
        sharded = (weight for group in groups for weight in group["params"] if isinstance(weight, DTensor))
        draw_lower_bits_(sharded, config.seed)
    return torch.optim.AdamW(groups, fused=True, **adamw_arguments(config))


def _adamw_master(parameters: NamedParameters, config: OptimConfig, draws_lower_bits: bool) -> Optimizer:
    from llm_fp8.optim.adamw import MasterAdamW

    groups = parameter_groups(parameters, config.weight_decay)
    arguments = {"seed": config.seed if draws_lower_bits else None, **adamw_arguments(config)}
    if config.offload_optimizer:
        from llm_fp8.optim.offload import OffloadedMasterAdamW

        return OffloadedMasterAdamW(groups, share=config.offload_optimizer, **arguments)
    return MasterAdamW(groups, **arguments)


def _adamw_8bit(parameters: NamedParameters, config: OptimConfig, draws_lower_bits: bool) -> Optimizer:
    from llm_fp8.optim.adamw import EightBitAdamW

    return EightBitAdamW(parameter_groups(parameters, config.weight_decay), seed=config.seed, **adamw_arguments(config))


@dataclass(frozen=True)
class OptimizerRow:
    """Properties of an optimizer. Bytes are per trainable parameter. Small tensors may need more."""

    parameter_dtype: torch.dtype  # of trainable parameters and their gradients; fp32 works with every optimizer
    state_bytes: float
    build: Callable[[NamedParameters, OptimConfig, bool], Optimizer]  # True draws the lower bits of master weights
    keeps_lower_bits: bool = False  # the state has the lower bits of fp32 master weights, which bf16 parameters lack

    @property
    def total_bytes(self) -> float:
        """Bytes of weight, gradient and state per trainable parameter."""
        return 2 * self.parameter_dtype.itemsize + self.state_bytes


OPTIMIZERS: dict[OptimizerKind, OptimizerRow] = {
    "adamw_fp32": OptimizerRow(torch.float32, 4 + 4, _adamw_fp32),  # m and v
    "adamw_master": OptimizerRow(torch.bfloat16, 2 + 4 + 2, _adamw_master, keeps_lower_bits=True),  # m, v, remainder
    "adamw_8bit": OptimizerRow(torch.bfloat16, 2 * (1 + 4 / 256), _adamw_8bit),  # codes, an fp32 scale per block
}


def unwrap(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside Accelerate's wrapper, which may skip or patch the step."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def clip_and_step(optimizer: Optimizer, parameters: Sequence[Parameter], max_norm: float) -> Tensor:
    """Clip gradients to the global L2 norm `max_norm` (0: do not clip), and step. Return the unclipped norm in fp32."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # torch's `clip_grad_norm_` accumulates in the gradients' dtype; in bf16 its error is up to 0.4 %.
    norms = torch.stack(torch._foreach_norm([local_of(g) for g in gradients], 2.0, dtype=torch.float32))
    if isinstance(first := gradients[0], DTensor):  # of DTensors, torch 2.14 cannot compute norms in another dtype
        torch.distributed.all_reduce(norms.square_(), group=first.device_mesh.get_group("shard"))
        norms.sqrt_()
    norm = torch.linalg.vector_norm(norms)
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        inner = unwrap(optimizer)
        if hasattr(inner, "gradient_scale"):  # a `GroupedAdamW` multiplies the gradients as it reads them
            inner.gradient_scale = factor
        else:
            torch._foreach_mul_(gradients, factor)
    optimizer.step()
    return norm


def initialize_state(optimizer: Optimizer) -> None:
    """Create the optimizer state of every parameter that has none. Call it after `Accelerator.prepare`."""
    optimizer = unwrap(optimizer)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if hasattr(optimizer, "state_of"):  # a `GroupedAdamW`
            optimizer.state_of(parameter)
        elif parameter not in optimizer.state:  # the state that torch's fused AdamW creates in its first step
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}


def optimizer_tensors(optimizer: Optimizer, named_parameters: NamedParameters) -> dict[str, Tensor]:
    """Return the state tensors, not copied, by "parameter_name.state_name". Tied parameters have their first name.
    Checkpoints are copied into these: torch's `load_state_dict` would cast fp32 moments of bf16 parameters to bf16.
    """
    optimizer = unwrap(optimizer)
    if bytes_on_host(optimizer) and torch.cuda.is_available():
        torch.cuda.synchronize()  # waits for copies out of the GPU
    names: dict[Parameter, str] = {}
    for name, parameter in named_parameters:
        names.setdefault(parameter, name)
    return {f"{name}.{key}": value for p, name in names.items() for key, value in optimizer.state.get(p, {}).items()}


def bytes_on_host(optimizer: Optimizer) -> int:
    """Return the bytes of optimizer state in host memory (--offload_optimizer)."""
    return getattr(unwrap(optimizer), "host_bytes", 0)


def set_completed_steps(optimizer: Optimizer, step: int) -> None:
    """Set a `GroupedAdamW`'s number of completed steps. torch's AdamW stores the number in its state instead."""
    for group in unwrap(optimizer).param_groups:
        if "step" in group:
            group["step"] = step


def effective_warmup_steps(num_warmup_steps: float, total_steps: int) -> int:
    """Return the steps of warm-up: at most a tenth of `total_steps`, or a share of them if below 1."""
    share = math.ceil(num_warmup_steps * total_steps)  # rounded as by transformers
    return share if num_warmup_steps < 1 else min(int(num_warmup_steps), total_steps // 10)


def learning_rate_schedule(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return transformers' schedule, a function from a step, counted from 0, to its fraction of the peak rate. Warm-up
    omits the first step at rate 0: over w steps it is 1/w, 2/w, ..., 1, also with 'constant'. `total_steps` includes
    steps before a resume. Raise `UserError` if --lr_scheduler_kwargs does not fit.
    """
    warmup_steps = effective_warmup_steps(config.num_warmup_steps, total_steps)
    name, arguments = config.lr_scheduler, config.lr_scheduler_kwargs

    def usual(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return {"constant": 1.0, "linear": 1.0 - progress}.get(name, (1.0 + math.cos(math.pi * progress)) / 2)

    if name in ("constant", "linear", "cosine") and not arguments:
        return usual
    prefer_torchs_cudnn()  # transformers imports PEFT, which imports Transformer Engine
    from transformers import get_scheduler

    peak = torch.optim.SGD([torch.zeros(())], lr=config.learning_rate)  # some schedules end at an absolute rate
    with reading("--lr_scheduler", name, "its arguments", "Give them, and no others, with --lr_scheduler_kwargs."):
        theirs = get_scheduler(name, peak, warmup_steps, total_steps, arguments).lr_lambdas[0]
        omitted = int(theirs(0) == 0)
        theirs(total_steps - 1)  # fails if an argument has the wrong type
    return lambda step: theirs(step + omitted if step < warmup_steps else step)


def build_scheduler(optimizer: Optimizer, config: OptimConfig, total_steps: int, completed_steps: int = 0) -> LambdaLR:
    """Return the learning-rate schedule. `Accelerator.prepare` must not wrap it: a wrapper steps once per process."""
    optimizer = unwrap(optimizer)
    for group in optimizer.param_groups:
        group["initial_lr"] = config.learning_rate
    return LambdaLR(optimizer, learning_rate_schedule(config, total_steps), last_epoch=completed_steps - 1)
