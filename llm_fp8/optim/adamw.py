"""AdamW in this project's two storage formats; the step clips gradients as it reads them.

`MasterAdamW` (--optimizer adamw_master) stores fp32 master weights in two bytes beside bf16 weights (`adamw_master`).
`EightBitAdamW` (--optimizer adamw_8bit) stores 8-bit moments and rounds weights stochastically (`adamw_8bit_codes`).

Libraries were measured first. Transformer Engine's `FusedAdam(store_param_remainders=True)` copies a bf16 m to fp32
where v is fp32. torchao's `AdamW8bit(bf16_stochastic_round=True)` (0.18) has the 8-bit format; for 14.8 billion
parameters on an H200 its step takes 199 ms, and casts and clipping 249 ms; ours takes 88 ms in all
(`speed_table_14b_torchao_adamw.json`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from llm_fp8.optim.adamw_8bit_codes import CODE_BLOCK, SMALLEST_ENCODED, Key, rounding_key
from llm_fp8.optim.adamw_master import FIRST_MOMENT_DTYPE, SECOND_MOMENT_DTYPE, draw_remainder, remainder_of
from llm_fp8.optim.adamw_update import Coefficients, update_with_torch_
from llm_fp8.utils.torch_internals import local_of

Params: TypeAlias = Iterable[Parameter] | Iterable[dict[str, Any]]


class GroupedAdamW(Optimizer):
    """AdamW over contiguous bf16 and fp32 parameters; a subclass defines the state.

    Every group counts its steps in `group["step"]`, an int. Each rank updates its shard of a DTensor. The next step
    multiplies all gradients by `gradient_scale`, an fp32 scalar on their device, as it reads them.
    """

    def __init__(self, params: Params, **adamw_arguments: Any) -> None:
        """`adamw_arguments` are torch's lr, betas, eps and weight_decay."""
        self.gradient_scale: Tensor | None = None
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 0}
        super().__init__(params, defaults | adamw_arguments)

    def _new_state(self, parameter: Parameter) -> dict[str, Tensor]:
        """The state of a parameter before its first step."""
        raise NotImplementedError

    def _key(self, step: int, number: int, parameter: Parameter) -> Key:
        """The key of the random bits for `parameter`, the one with this number; only stochastic rounding uses it."""
        return 0, 0

    def _update_(self, parameter: Parameter, weight: Tensor, *arguments: Any) -> None:
        """Update `weight`, this rank's part of `parameter`, in place; `update_with_torch_` explains `arguments`."""
        update_ = update_with_torch_
        if weight.is_cuda:
            from llm_fp8.optim.adamw_triton import update_
        update_(weight, *arguments)

    def state_of(self, parameter: Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter, and create it first where it is missing."""
        if parameter not in self.state:
            self.state[parameter] = self._new_state(parameter)
        return self.state[parameter]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        gradient_scale = self.gradient_scale
        self.gradient_scale = None
        numbers = itertools.count()
        for group in self.param_groups:
            group["step"] += 1
            coefficients = Coefficients.of_step(
                group["step"], group["lr"], group["betas"], group["eps"], group["weight_decay"]
            )
            for parameter in group["params"]:
                number = next(numbers)
                weight = local_of(parameter)
                if parameter.grad is None or weight.numel() == 0:
                    continue
                gradient = local_of(parameter.grad).contiguous()
                state = {name: local_of(tensor) for name, tensor in self.state_of(parameter).items()}
                key = self._key(group["step"], number, parameter)
                self._update_(parameter, weight, gradient, state, gradient_scale, coefficients, key)


class MasterAdamW(GroupedAdamW):
    """AdamW over bf16 parameters with exact fp32 master weights. Their lower bits, where none are loaded, are drawn
    from `seed`, or zero without one. The state is sharded like the parameter.
    """

    def __init__(self, params: Params, seed: int | None = None, **adamw_arguments: Any) -> None:
        super().__init__(params, **adamw_arguments)
        self.seed = seed

    def _new_state(self, parameter: Parameter) -> dict[str, Tensor]:
        state = {
            "exp_avg": torch.zeros_like(parameter, dtype=FIRST_MOMENT_DTYPE),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=SECOND_MOMENT_DTYPE),
        }
        if parameter.dtype == torch.bfloat16:
            loaded = remainder_of(parameter)
            state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16) if loaded is None else loaded
            if loaded is None and self.seed is not None:
                generator = torch.Generator(parameter.device).manual_seed(self.seed + len(self.state))
                local_of(state["remainder"]).copy_(draw_remainder(local_of(parameter), generator))
        return state


class EightBitAdamW(GroupedAdamW):
    """AdamW with 8-bit moments and stochastic rounding. A sharded parameter whose rows are no whole blocks, which would
    straddle shards, has fp32 moments. All ranks pass the same `seed` for the random bits.
    """

    def __init__(self, params: Params, seed: int = 0, **adamw_arguments: Any) -> None:
        super().__init__(params, **adamw_arguments)
        self.seed = seed

    def _new_state(self, parameter: Parameter) -> dict[str, Tensor]:
        sharded, count = isinstance(parameter, DTensor), parameter.numel()
        unit = count // parameter.shape[0] if sharded else count  # what must be whole blocks
        encoded = count >= SMALLEST_ENCODED and unit % CODE_BLOCK == 0
        state = {}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8 if encoded else torch.float32)
            if encoded:
                # [rows, blocks of a row], sharded alike; else [blocks].
                scales = state[name].flatten(1)[:, ::CODE_BLOCK] if sharded else state[name].view(-1)[::CODE_BLOCK]
                state[f"{name}_scale"] = torch.zeros_like(scales, dtype=torch.float32).contiguous()
        return state

    def _key(self, step: int, number: int, parameter: Parameter) -> Key:
        shard = 0
        if isinstance(parameter, DTensor):
            placed = enumerate(parameter.placements)
            shard = sum(parameter.device_mesh.get_local_rank(dim) for dim, placement in placed if placement.is_shard())
        return rounding_key(self.seed, step, number + 2**20 * shard)
