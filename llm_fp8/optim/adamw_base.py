"""The shared part of this project's AdamWs: coefficients, arithmetic, loop over parameters, state of any dtype.

Step t of a group, in fp32, with g the gradient times `gradient_scale`, in the order of torch.optim.AdamW (Loshchilov
and Hutter, arXiv 1711.05101):

    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g^2
    x = (1 - lr weight_decay) x - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The update uses the new moments before they are rounded for storage. How x, m and v are stored is the subclass's part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

CHUNK_ELEMENTS = 2**18
"""Elements that the torch implementations update at a time, which bounds their fp32 temporaries to a few MiB."""

State = Mapping[str, Tensor]
"""One parameter's state by name."""
Key = tuple[int, int]
"""Of random bits: two numbers of 32 bits, signed."""


class Coefficients(NamedTuple):
    """The numbers of one step of one parameter group, in fp64; rounded to fp32 once, where they are used."""

    decay: float  # 1 - lr weight_decay
    beta1_complement: float  # 1 - beta1
    beta2: float
    beta2_complement: float  # 1 - beta2
    step_size: float  # lr / (1 - beta1^t)
    inverse_root_correction2: float  # 1 / sqrt(1 - beta2^t)
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


def moments_and_update(
    gradient: Tensor, gradient_scale: Tensor | None, m: Tensor, v: Tensor, c: Coefficients
) -> tuple[Tensor, Tensor, Tensor]:
    """The new m and v, and the update to subtract from the decayed parameter: fp32, as `m` and `v` are.

    One rounded operation at a time (torch's lerp, addcmul and addcdiv may fuse), as in `adamw_triton`.
    """
    gradient = gradient.to(torch.float32)
    if gradient_scale is not None:
        gradient = gradient * gradient_scale
    m = m + (gradient - m) * c.beta1_complement
    v = v * c.beta2 + (gradient * c.beta2_complement) * gradient
    # torch's fp32 square root is off in the last bit on some CPUs.
    denominator = v.to(torch.float64).sqrt().to(torch.float32) * c.inverse_root_correction2 + c.epsilon
    return m, v, (m * c.step_size) / denominator


class GroupedAdamW(Optimizer):
    """AdamW over bf16 and fp32 parameters; the subclass defines the state and updates one tensor.

    Every group counts its steps in `group["step"]`, an int. Parameters must be contiguous; a gradient that is not is
    copied. Of sharded parameters (DTensor) each rank updates its shard. Checkpoints hold the state by name
    (`llm_fp8.optim.state`): torch's `load_state_dict` would cast it.
    """

    gradient_scale: Tensor | None
    """fp32 scalar tensor on the parameters' device by which the next step multiplies every gradient as it reads it, so
    that clipping needs no pass over the gradients. `step` resets it to None."""

    def __init__(
        self,
        params: Iterable[Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.gradient_scale = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0})

    def _new_state(self, parameter: Parameter) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        raise NotImplementedError

    def _update_(self, weight: Tensor, *arguments: Any, place: tuple[int, int]) -> None:
        """Update one tensor and its state in place. `arguments`: gradient, state, gradient scale and coefficients;
        `place`: the step and the parameter's number.
        """
        raise NotImplementedError

    def initialize_state(self) -> None:
        """Create the missing state; ValueError where a parameter is not contiguous, or neither bf16 nor fp32."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    def _state_of(self, parameter: Parameter) -> dict[str, Tensor]:
        if parameter not in self.state:
            if parameter.dtype not in (torch.bfloat16, torch.float32) or not local_part(parameter).is_contiguous():
                raise ValueError(
                    f"{type(self).__name__} takes contiguous bf16 and fp32 parameters; one of shape "
                    f"{tuple(parameter.shape)} is {parameter.dtype} with strides {parameter.stride()}."
                )
            self.state[parameter] = self._new_state(parameter)
        return self.state[parameter]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. Closures are not supported."""
        assert closure is None, "closures are not supported"
        gradient_scale, self.gradient_scale = self.gradient_scale, None
        number = -1
        for group in self.param_groups:
            group["step"] += 1
            coefficients = Coefficients.of_step(
                group["step"], group["lr"], group["betas"], group["eps"], group["weight_decay"]
            )
            for parameter in group["params"]:
                number += 1
                weight = local_part(parameter)
                if parameter.grad is None or weight.numel() == 0:
                    continue
                gradient = local_part(parameter.grad).contiguous()
                state = {name: local_part(tensor) for name, tensor in self._state_of(parameter).items()}
                place = (group["step"], number)
                self._update_(weight, gradient, state, gradient_scale, coefficients, place=place)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
