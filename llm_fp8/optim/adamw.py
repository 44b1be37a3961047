"""This project's AdamWs: the loop over parameters, which clips as it reads gradients, and state in two storage formats.

`MasterAdamW` (--optimizer adamw_master) keeps fp32 master weights in two bytes beside bf16 ones (`adamw_master`),
`EightBitAdamW` (--optimizer adamw_8bit) 8-bit moments and stochastically rounded weights (`adamw_8bit_codes`).

Transformer Engine's `FusedAdam(store_param_remainders=True)` makes fp32 copies of a bf16 m where v is fp32. torchao's
`AdamW8bit(bf16_stochastic_round=True)` (0.18), of the same format, takes 199 ms for 14.8 billion parameters on an H200
where this step takes 88, and 249 ms more for casts and clipping (`speed_table_14b_torchao_adamw.json`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from llm_fp8.optim.adamw_8bit_codes import CODE_BLOCK, SMALLEST_ENCODED, Key, rounding_key
from llm_fp8.optim.adamw_master import FIRST_MOMENT_DTYPE, SECOND_MOMENT_DTYPE, remainder_of
from llm_fp8.optim.adamw_update import Coefficients, update_with_torch_
from llm_fp8.utils.torch_internals import local_part

Params: TypeAlias = Iterable[Parameter] | Iterable[dict[str, Any]]


class GroupedAdamW(Optimizer):
    """AdamW over contiguous bf16 and fp32 parameters; the subclass defines the state.

    Every group counts its steps in `group["step"]`, an int. Each rank updates its shard of a DTensor. `gradient_scale`,
    an fp32 scalar on their device, multiplies all gradients as the next step reads them.
    """

    def __init__(self, params: Params, **adamw_arguments: Any) -> None:
        """`adamw_arguments` are torch's lr, betas, eps and weight_decay."""
        self.gradient_scale: Tensor | None = None
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 0}
        super().__init__(params, defaults | adamw_arguments)

    def _new_state(self, parameter: Parameter) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        raise NotImplementedError

    def _key(self, step: int, number: int) -> Key:
        """The key of a step's random bits for the parameter of this number, where it needs some."""
        return 0, 0

    def _update_(self, parameter: Parameter, weight: Tensor, *arguments: Any) -> None:
        """Update `weight`, this rank's part of `parameter`, in place; `arguments` as of `update_with_torch_`."""
        update_ = update_with_torch_
        if weight.is_cuda:
            from llm_fp8.optim.adamw_triton import update_
        update_(weight, *arguments)

    def state_of(self, parameter: Parameter) -> dict[str, Tensor]:
        """The state of a parameter, created where it is missing."""
        if parameter not in self.state:
            self.state[parameter] = self._new_state(parameter)
        return self.state[parameter]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
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
                state = {name: local_part(tensor) for name, tensor in self.state_of(parameter).items()}
                key = self._key(group["step"], number)
                self._update_(parameter, weight, gradient, state, gradient_scale, coefficients, key)


class MasterAdamW(GroupedAdamW):
    """AdamW over bf16 parameters with exact fp32 master weights; the state is sharded like the parameter."""

    def _new_state(self, parameter: Parameter) -> dict[str, Tensor]:
        state = {
            "exp_avg": torch.zeros_like(parameter, dtype=FIRST_MOMENT_DTYPE),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=SECOND_MOMENT_DTYPE),
        }
        if parameter.dtype == torch.bfloat16:
            given = remainder_of(parameter)
            state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16) if given is None else given
        return state


class EightBitAdamW(GroupedAdamW):
    """AdamW with 8-bit moments and stochastic rounding, over unsharded parameters: blocks would straddle shards. `seed`
    is that of the random bits, the same on all ranks.
    """

    def __init__(self, params: Params, seed: int = 0, **adamw_arguments: Any) -> None:
        super().__init__(params, **adamw_arguments)
        self.seed = seed

    def _new_state(self, parameter: Parameter) -> dict[str, Tensor]:
        assert not isinstance(parameter, DTensor)
        count = parameter.numel()
        encoded = count >= SMALLEST_ENCODED and count % CODE_BLOCK == 0
        state = {}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8 if encoded else torch.float32)
            if encoded:
                state[f"{name}_scale"] = torch.zeros(count // CODE_BLOCK, dtype=torch.float32, device=parameter.device)
        return state

    def _key(self, step: int, number: int) -> Key:
        return rounding_key(self.seed, step, number)
