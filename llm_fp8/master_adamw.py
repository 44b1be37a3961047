"""AdamW for bf16 parameters whose fp32 master is kept exactly, in two bytes more.

    state of a parameter   dtype    bytes   what
    (the parameter)        bf16     2       the master rounded to nearest: what the model computes with
    remainder              int16    2       the master's lower 16 bits
    exp_avg                bf16     2       m, the running mean of gradients
    exp_avg_sq             fp32     4       v, the running mean of squared gradients

fp32 parameters (norms and biases of some models, or whatever a user keeps in fp32) are their own master and have no remainder.

The master. bf16 is the upper half of fp32, so an fp32 number x with the bits b splits into two 16-bit halves without loss:

    weight    = (b + 0x8000) >> 16      the upper half, rounded to nearest; a tie goes away from zero
    remainder =  b & 0xFFFF             the lower half as it is, stored as int16

and joins again, because the addition carried into the upper half exactly when the remainder is 0x8000 or more, that is, negative as
int16:

    b = ((weight - (1 if remainder < 0 else 0)) << 16) | (remainder & 0xFFFF)

This holds for every number, denormals and infinities included (a magnitude above bf16's largest by half a spacing shows as infinity
and joins to the number that it was). Only NaN needs care: the GPU's own NaN is 0x7FFFFFFF, and the addition would carry it into the
sign and show a weight of -0. So every NaN is split as 0x7FC00000, which shows as NaN.

The step t of a group, all arithmetic fp32, with g the gradient times `gradient_scale`; the order is that of torch.optim.AdamW
(Loshchilov and Hutter, arXiv 1711.05101):

    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g^2
    x = (1 - lr weight_decay) x - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The update uses the new m before it is rounded to bf16 for storage. Why m may be bf16 and v may not: docs/numerics.md.

Two implementations of this one contract give the same bits: a Triton kernel for CUDA tensors (`llm_fp8.master_adamw_kernel`), which moves
22 bytes per element and allocates nothing, and a torch one for other devices, which is also the reference that tests hold the kernel to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

FIRST_MOMENT_DTYPE = torch.bfloat16
"""dtype of m between steps."""

SECOND_MOMENT_DTYPE = torch.float32
"""dtype of v."""

CHUNK_ELEMENTS = 2**18
"""Elements that the torch implementation updates at a time: its fp32 temporaries take a few MiB, whatever the tensor's size."""


class Coefficients(NamedTuple):
    """The numbers of one step of one parameter group. Computed in double precision, rounded to fp32 once, where they are used."""

    decay: float
    """1 - lr weight_decay"""
    beta1_complement: float
    """1 - beta1"""
    beta2: float
    beta2_complement: float
    """1 - beta2"""
    step_size: float
    """lr / (1 - beta1^t)"""
    inverse_root_correction2: float
    """1 / sqrt(1 - beta2^t)"""
    epsilon: float

    @classmethod
    def of_step(cls, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> Coefficients:
        """The coefficients of step `step`, 1 for the first."""
        beta1, beta2 = betas
        return cls(
            decay=float(1 - lr * weight_decay),
            beta1_complement=float(1 - beta1),
            beta2=float(beta2),
            beta2_complement=float(1 - beta2),
            step_size=lr / (1 - beta1**step),
            inverse_root_correction2=1 / math.sqrt(1 - beta2**step),
            epsilon=float(eps),
        )


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a bf16 `weight` and its int16 `remainder`, of any one shape; bit for bit what `split_master` was given."""
    lower = remainder.to(torch.int32)
    upper = weight.view(torch.int16).to(torch.int32) + (lower >> 15)  # minus one where the remainder is negative
    return ((upper << 16) | (lower & 0xFFFF)).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 `master` as a bf16 weight, rounded to nearest with ties away from zero, and its int16 remainder."""
    bits = master.view(torch.int32)
    bits = torch.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)  # every NaN; see the module's docstring
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def update_with_torch_(
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient_scale: Tensor | None,
    coefficients: Coefficients,
) -> None:
    """One step of one tensor, in place, on any device.

    Args:
        weight: bf16 with a remainder or fp32 without, contiguous; this and the next four are of one shape.
        remainder: int16, contiguous, or None.
        gradient: bf16 or fp32, contiguous; left as it is.
        exp_avg: m, contiguous, rounded to its dtype.
        exp_avg_sq: v, fp32, contiguous.
        gradient_scale: fp32 scalar tensor on the same device that multiplies the gradient, or None.
        coefficients: of this step.
    """
    for start in range(0, weight.numel(), CHUNK_ELEMENTS):
        chunk = slice(start, start + CHUNK_ELEMENTS)
        _update_chunk_(
            weight.view(-1)[chunk],
            None if remainder is None else remainder.view(-1)[chunk],
            gradient.view(-1)[chunk],
            exp_avg.view(-1)[chunk],
            exp_avg_sq.view(-1)[chunk],
            gradient_scale,
            coefficients,
        )


def _update_chunk_(
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient_scale: Tensor | None,
    c: Coefficients,
) -> None:
    # One operation at a time, each rounded by itself: torch's lerp, addcmul and addcdiv may or may not fuse theirs.
    gradient = gradient.to(torch.float32)
    if gradient_scale is not None:
        gradient = gradient * gradient_scale
    m = exp_avg.to(torch.float32)
    m = m + (gradient - m) * c.beta1_complement
    v = exp_avg_sq * c.beta2 + (gradient * c.beta2_complement) * gradient
    # torch's fp32 root is off in the last bit on some CPUs; the root in double precision rounds to the right one.
    denominator = v.to(torch.float64).sqrt().to(torch.float32) * c.inverse_root_correction2 + c.epsilon
    update = (m * c.step_size) / denominator
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if remainder is None:
        weight.copy_(weight * c.decay - update)
    else:
        new_weight, new_remainder = split_master(join_master(weight, remainder) * c.decay - update)
        weight.copy_(new_weight)
        remainder.copy_(new_remainder)


class MasterAdamW(Optimizer):
    """AdamW over bf16 parameters with exact fp32 masters; see the module's docstring for state and arithmetic.

    Every parameter group counts its steps in `group["step"]`, an int; a parameter without gradient is left alone in a step that its
    group counts. Parameters must be contiguous; a gradient that is not is copied first. Of sharded parameters (DTensor) each rank
    updates its own part, and the state is sharded like the parameter.

    Args:
        params: parameters or groups of them; bf16 or fp32.
        lr: learning rate, a float, which schedules may change between steps.
        betas: decays of the moments, in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled weight decay.

    Raises:
        ValueError: an argument is out of range.
    """

    gradient_scale: Tensor | None
    """Multiplies every gradient of the next step as it is read: an fp32 scalar tensor on the parameters' device. Clipping by the
    global norm then costs no pass over the gradients. `step` takes it and leaves None."""

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr, eps and weight_decay must not be negative and betas must lie in [0, 1): {lr}, {eps}, {weight_decay}, {betas}."
            )
        self.gradient_scale = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    def initialize_state(self) -> None:
        """Create the state that parameters have before their first step, where there is none: m, v and remainder of zero.

        Raises:
            ValueError: a parameter is not contiguous, or neither bf16 nor fp32.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    def _state_of(self, parameter: Parameter) -> dict[str, Tensor]:
        if parameter not in self.state:
            if parameter.dtype not in (torch.bfloat16, torch.float32):
                raise ValueError(f"MasterAdamW takes bf16 and fp32 parameters, and one is {parameter.dtype}.")
            if not _local(parameter).is_contiguous():
                raise ValueError(f"MasterAdamW takes contiguous parameters, and one of shape {tuple(parameter.shape)} is not.")
            state = {
                "exp_avg": torch.zeros_like(parameter, dtype=FIRST_MOMENT_DTYPE),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=SECOND_MOMENT_DTYPE),
            }
            if parameter.dtype == torch.bfloat16:
                state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
            self.state[parameter] = state
        return self.state[parameter]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient; returns what `closure`, if given, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradient_scale, self.gradient_scale = self.gradient_scale, None
        for group in self.param_groups:
            group["step"] += 1
            coefficients = Coefficients.of_step(group["step"], group["lr"], group["betas"], group["eps"], group["weight_decay"])
            for parameter in group["params"]:
                if parameter.grad is None or _local(parameter).numel() == 0:
                    continue
                state = self._state_of(parameter)
                update_(
                    _local(parameter),
                    _local(state["remainder"]) if "remainder" in state else None,
                    _local(parameter.grad).contiguous(),
                    _local(state["exp_avg"]),
                    _local(state["exp_avg_sq"]),
                    gradient_scale,
                    coefficients,
                )
        return loss

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that state keeps its dtypes: torch casts it to the parameter's, which would ruin remainder and v."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in state_dict["state"]:
                saved = state_dict["state"][number]
                self.state[parameter] = {name: tensor.to(parameter.device, copy=True) for name, tensor in saved.items()}


def update_(
    weight: Tensor,
    remainder: Tensor | None,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient_scale: Tensor | None,
    coefficients: Coefficients,
) -> None:
    """`update_with_torch_`, by the Triton kernel where the tensors are on a CUDA device."""
    if weight.is_cuda:
        from llm_fp8.master_adamw_kernel import update_with_triton_

        update_with_triton_(weight, remainder, gradient, exp_avg, exp_avg_sq, gradient_scale, coefficients)
    else:
        update_with_torch_(weight, remainder, gradient, exp_avg, exp_avg_sq, gradient_scale, coefficients)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
