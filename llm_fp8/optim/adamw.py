"""AdamW with two storage formats that torch lacks. The step multiplies gradients by the clip factor as it reads them.

`MasterAdamW` (--optimizer adamw_master) stores bf16 weights and the lower bits of fp32 master weights (`adamw_master`).
`EightBitAdamW` (--optimizer adamw_8bit) stores 8-bit moments and rounds weights stochastically (`adamw_8bit_codes`).

`update_with_torch_` updates one tensor. `adamw_triton` computes the same on a GPU. Step t is computed in fp32, in the
order of torch.optim.AdamW (Loshchilov and Hutter, arXiv 1711.05101). With g the gradient times `gradient_scale`:

    m = m + (1 - beta1) (g - m)
    v = beta2 v + (1 - beta2) g^2
    x = (1 - lr weight_decay) x - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The last line uses the new moments before they are rounded for storage. Transformer Engine's
`FusedAdam(store_param_remainders=True)` is not used: it copies a bf16 m to fp32 if v is fp32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from llm_fp8.optim import adamw_8bit_codes as codes
from llm_fp8.optim import adamw_master as masters
from llm_fp8.optim.adamw_8bit_codes import CODE_BLOCK, SMALLEST_ENCODED, Key, rounding_key
from llm_fp8.utils.torch_internals import local_of

Params: TypeAlias = Iterable[Parameter] | Iterable[dict[str, Any]]
CHUNK_ELEMENTS = 2**18  # updated at a time, so fp32 temporaries take a few MiB; a multiple of CODE_BLOCK
State = Mapping[str, Tensor]  # the state of one parameter: name -> tensor
Coefficients = Mapping[str, float]


def coefficients_of(group: Mapping[str, Any]) -> Coefficients:
    """Return the coefficients, in fp64, for a step of a parameter group. The step itself rounds them to fp32."""
    (beta1, beta2), step, lr = group["betas"], group["step"], group["lr"]
    return {
        "decay": float(1 - lr * group["weight_decay"]),
        "beta1_complement": float(1 - beta1),
        "beta2": float(beta2),
        "beta2_complement": float(1 - beta2),
        "step_size": lr / (1 - beta1**step),
        "inverse_root_correction2": 1 / math.sqrt(1 - beta2**step),
        "epsilon": float(group["eps"]),
    }


def moments_and_update(
    gradient: Tensor, gradient_scale: Tensor | None, m: Tensor, v: Tensor, coefficients: Coefficients
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new m and v, and the update to subtract from the decayed parameter, all in fp32. Every operation is
    rounded separately, as in `adamw_triton`; torch's lerp, addcmul and addcdiv may fuse operations.
    """
    gradient = gradient.to(torch.float32)
    if gradient_scale is not None:
        gradient = gradient * gradient_scale
    m = m + (gradient - m) * coefficients["beta1_complement"]
    v = v * coefficients["beta2"] + (gradient * coefficients["beta2_complement"]) * gradient
    root = v.to(torch.float64).sqrt().to(torch.float32)  # torch's fp32 sqrt has a wrong last bit on some CPUs
    denominator = root * coefficients["inverse_root_correction2"] + coefficients["epsilon"]
    return m, v, (m * coefficients["step_size"]) / denominator


def _load_moment(state: State, name: str, signed: bool) -> Tensor:
    scale = state.get(f"{name}_scale")
    return state[name].to(torch.float32) if scale is None else codes.decode(state[name], scale, signed)


def _store_moment(state: State, name: str, signed: bool, moment: Tensor) -> None:
    if f"{name}_scale" in state:
        moment, scale = codes.encode(moment, signed)
        state[f"{name}_scale"].copy_(scale)
    state[name].copy_(moment)


def update_with_torch_(
    weight: Tensor, gradient: Tensor, state: State, gradient_scale: Tensor | None, coefficients: Coefficients, key: Key
) -> None:
    """Update one contiguous tensor in place, on any device. This is the reference for the Triton kernel. The moments in
    `state` are 8-bit codes if `state` has scales, else bf16 or fp32. An fp32 `weight` needs no master weight. A bf16
    `weight` is rounded to nearest if `state` has a remainder, else stochastically with the random bits of `key`.
    """
    weight, gradient = weight.view(-1), gradient.view(-1)
    state, decay = {name: tensor.view(-1) for name, tensor in state.items()}, coefficients["decay"]
    for start in range(0, weight.numel(), CHUNK_ELEMENTS):
        chunk = slice(start, start + CHUNK_ELEMENTS)
        blocks = slice(chunk.start // CODE_BLOCK, chunk.stop // CODE_BLOCK)
        part = weight[chunk]
        part_state = {name: tensor[blocks if "scale" in name else chunk] for name, tensor in state.items()}
        m = _load_moment(part_state, "exp_avg", signed=True)
        v = _load_moment(part_state, "exp_avg_sq", signed=False)
        m, v, update = moments_and_update(gradient[chunk], gradient_scale, m, v, coefficients)
        if "remainder" in state:
            master = masters.join_master(part, part_state["remainder"]) * decay - update
            part[:], part_state["remainder"][:] = masters.split_master(master)
        elif part.dtype == torch.bfloat16:
            random = codes.rounding_bits(key, start, part.numel(), part.device)
            part.copy_(codes.round_stochastically(part.to(torch.float32) * decay - update, random))
        else:
            part.copy_(part * decay - update)
        _store_moment(part_state, "exp_avg", signed=True, moment=m)
        _store_moment(part_state, "exp_avg_sq", signed=False, moment=v)


class GroupedAdamW(Optimizer):
    """Base class of AdamW over contiguous bf16 and fp32 parameters; a subclass defines the state. `group["step"]` is
    the number of steps (int). Each rank updates its shard of a DTensor. If `gradient_scale` is set (an fp32 scalar on
    the gradients' device), the next step multiplies all gradients by it.
    """

    def __init__(self, params: Params, seed: int | None = None, **adamw_arguments: Any) -> None:
        """`adamw_arguments` are torch's lr, betas, eps and weight_decay. Only subclasses use `seed`."""
        self.seed = seed
        self.gradient_scale: Tensor | None = None
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "step": 0}
        super().__init__(params, defaults | adamw_arguments)

    def _new_state(self, parameter: Parameter) -> dict[str, Tensor]:
        """Create the state of a parameter."""
        raise NotImplementedError

    def _key(self, step: int, number: int, parameter: Parameter) -> Key:
        """Return the key of the random bits that round the `number`-th parameter. Only stochastic rounding uses it."""
        return 0, 0

    def _update_(self, parameter: Parameter, weight: Tensor, *arguments: Any) -> None:
        """Update `weight`, this rank's shard of `parameter`, in place. For `arguments` see `update_with_torch_`."""
        update_ = update_with_torch_
        if weight.is_cuda:
            from llm_fp8.optim.adamw_triton import update_
        update_(weight, *arguments)

    def state_of(self, parameter: Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter. Create it if it does not exist."""
        if parameter not in self.state:
            self.state[parameter] = self._new_state(parameter)
        return self.state[parameter]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        gradient_scale, self.gradient_scale = self.gradient_scale, None
        numbers = itertools.count()
        for group in self.param_groups:
            group["step"] += 1
            coefficients = coefficients_of(group)
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
    """AdamW over bf16 parameters with exact fp32 master weights. If the lower bits of a master weight were not loaded,
    they are drawn at random with `seed` or, without a seed, are zero. The state is sharded like the parameter.
    """

    def _new_state(self, parameter: Parameter) -> dict[str, Tensor]:
        state = {
            "exp_avg": torch.zeros_like(parameter, dtype=masters.FIRST_MOMENT_DTYPE),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=masters.SECOND_MOMENT_DTYPE),
        }
        if parameter.dtype == torch.bfloat16:
            loaded = masters.remainder_of(parameter)
            state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16) if loaded is None else loaded
            if loaded is None and self.seed is not None:
                generator = torch.Generator(parameter.device).manual_seed(self.seed + len(self.state))
                local_of(state["remainder"]).copy_(masters.draw_remainder(local_of(parameter), generator))
        return state


class EightBitAdamW(GroupedAdamW):
    """AdamW with 8-bit moments and stochastic rounding. A sharded parameter has fp32 moments if its row size is not a
    multiple of the block size, since blocks would straddle shards. All ranks must use the same `seed` (default: 0).
    """

    def _new_state(self, parameter: Parameter) -> dict[str, Tensor]:
        sharded, count = isinstance(parameter, DTensor), parameter.numel()
        unit = count // parameter.shape[0] if sharded else count  # must be a multiple of the block size
        encoded = count >= SMALLEST_ENCODED and unit % CODE_BLOCK == 0
        state = {}
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=torch.uint8 if encoded else torch.float32)
            if encoded:
                # Scales are [rows, blocks per row], sharded like the parameter, or [blocks] if it is not sharded.
                scales = state[name].flatten(1)[:, ::CODE_BLOCK] if sharded else state[name].view(-1)[::CODE_BLOCK]
                state[f"{name}_scale"] = torch.zeros_like(scales, dtype=torch.float32).contiguous()
        return state

    def _key(self, step: int, number: int, parameter: Parameter) -> Key:
        shard = 0
        if isinstance(parameter, DTensor):
            placed = enumerate(parameter.placements)
            shard = sum(parameter.device_mesh.get_local_rank(dim) for dim, placement in placed if placement.is_shard())
        return rounding_key(self.seed or 0, step, number + 2**20 * shard)
