"""--fp8_params: store the decoder's linear weights in fp8 between steps, and all-gather them in fp8.

Each of these weights is sharded along dim 0. A rank stores a shard of the fp32 master weight and its moments (12 bytes
per element), which is saved in checkpoints, and an fp8 shard (1 byte), which is all-gathered. Without this option,
shards are all-gathered in bf16 (2 bytes), and every rank casts the weight to fp8 in every micro-batch. All shards of a
weight have the same scale:

    scale = largest fp8 number / amax of the master weight over all ranks

The scales are computed after the step, with one collective for all weights. The option does not change checkpoints.

The shards are `Float8Tensor`s of Transformer Engine (2.20), which FSDP2 gathers as bytes by its extension for tensor
subclasses (`fsdp_pre_all_gather`). TE's own optimizer would use old scales, or need one collective per weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from llm_fp8.distributed.fsdp import FsdpStrategy
from llm_fp8.precision.context import Precision
from llm_fp8.precision.frozen import prepare_module, quantizer_of
from llm_fp8.precision.te import TEBackend
from llm_fp8.utils.torch_internals import free_memory_, local_of, sharded_like

E4M3 = torch.finfo(torch.float8_e4m3fn)  # all formats cast weights to it


class Fp8Weight(NamedTuple):
    master: Parameter  # DTensor sharded along dim 0: fp32 in the optimizer, or bf16 if frozen
    parameter: Parameter  # fp8 parameter of the module, sharded like `master`
    quantizer: Any  # casts `master` to `parameter`


class Fp8ParamsStrategy(FsdpStrategy):
    """FSDP that gathers weights in fp8. TE's weights are fp8 parameters; other back ends cast before each gather."""

    _backend: Any = TEBackend()  # `prepare` sets the run's back end
    _weights: Sequence[Fp8Weight] = ()

    def prepare(self, model: nn.Module, optimizer: Optimizer, precision: Any = None) -> tuple[nn.Module, Any]:
        self._backend, self._weights = precision.backend, keep_weights_in_fp8(model, precision)
        optimizer.register_step_pre_hook(lambda *_: self._hand_over_gradients())
        optimizer.register_step_post_hook(lambda *_: self._cast_(model))
        return super().prepare(model, optimizer)

    def _hand_over_gradients(self) -> None:
        for master, parameter, _ in self._weights:
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad, None

    def _cast_(self, model: nn.Module) -> None:
        quantise_(self._weights)
        self._backend.refresh_scales_(model)

    def master_of(self, parameter: Any) -> tuple[Any, Tensor]:
        master = next((weight.master for weight in self._weights if weight.parameter is parameter), parameter)
        return master, self._backend.unwrapped_shard(master).detach()

    def after_load(self, model: nn.Module, optimizer: Any, step: int) -> None:
        super().after_load(model, optimizer, step)
        self._cast_(model)


def keep_weights_in_fp8(model: nn.Module, precision: Precision) -> Sequence[Fp8Weight]:
    """Replace the parameters of TE's fp8 modules in `model` by fp8 parameters. Return each new parameter with the old
    one, which becomes its master weight. If the weights are frozen, cast and free the old parameters and return ().

    All ranks must call this before the first forward pass, since FSDP2 reads its parameters in that pass.
    """
    # Every rank has the same order of `modules()`. Modules that are already in fp8, such as frozen ones, are skipped.
    modules: list[Any] = [module for module in model.modules() if module in precision.fp8_modules]
    modules = [module for module in modules if not getattr(module, "primary_weights_in_fp8", True)]
    places = [(module, name) for module in modules for name in prepare_module(module, precision.plan.recipe)]
    if not places:
        return ()
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    weights = list[Fp8Weight]()
    for module, name in places:
        master, recipe_quantizer = getattr(module, name), quantizer_of(module, name)
        parameter = _fp8_parameter(master, recipe_quantizer)
        setattr(module, name, parameter)
        # This quantizer casts with a given scale in every recipe. With delayed scaling, its amax enters the history.
        scale = torch.ones(1, dtype=torch.float32, device=master.device)
        amax = recipe_quantizer.amax if isinstance(recipe_quantizer, Float8Quantizer) else torch.zeros_like(scale)
        quantizer = Float8Quantizer(scale, amax, recipe_quantizer.dtype, rowwise=True, columnwise=False)
        weights.append(Fp8Weight(master, parameter, quantizer))
    quantise_(weights)
    if weights[0].master.requires_grad:
        return weights
    for weight in weights:  # FSDP2 references the masters until the first forward pass
        free_memory_(weight.master)
    return ()


@torch.no_grad()
def quantise_(weights: Sequence[Fp8Weight]) -> None:
    """Cast each master weight to its fp8 parameter. All ranks that share a copy of the model must call this."""
    if not weights:
        return
    masters = [local_of(weight.master) for weight in weights]
    first: Any = weights[0].master
    amax = torch.stack(torch._foreach_norm(masters, math.inf, dtype=torch.float32))
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=first.device_mesh.get_group("shard"))
    # Divide two tensors: torch divides a Python number by a tensor with its reciprocal, which rounds twice. An infinite
    # amax gives the scale 0, and thus NaN.
    scales = torch.where(amax > 0, torch.full_like(amax, E4M3.max) / amax, 1.0)
    scales = scales.clamp(max=torch.finfo(torch.float32).max)
    # Copy in place, since weights that FSDP gathered before refer to the scales of the quantizers.
    torch._foreach_copy_([weight.quantizer.scale for weight in weights], scales.split(1))
    for weight, master in zip(weights, masters, strict=True):
        weight.quantizer.update_quantized(master, local_of(weight.parameter))


@torch.no_grad()
def _fp8_parameter(master: Any, quantizer: Any) -> Parameter:
    """Return an uninitialised fp8 parameter, sharded like `master`."""
    # Hopper's backward pass needs the transpose, which is computed from the gathered weight.
    quantizer.set_usage(rowwise=True, columnwise=False)
    quantizer.internal = False
    parameter = Parameter(sharded_like(quantizer(local_of(master)), master), requires_grad=master.requires_grad)
    local: Any = local_of(parameter)
    local.fsdp_pre_all_gather = functools.partial(_gather, local.fsdp_pre_all_gather)
    return parameter


def _gather(
    pre_all_gather: Any, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: nn.Module, mp_policy: Any
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Call `pre_all_gather`, but gather no transposes. If it gathered them, recomputation would use a freed weight."""
    tensors, (scale_inv, _, _, fp8_dtype) = pre_all_gather(mesh, orig_size, contiguous_orig_stride, module, mp_policy)
    return tensors, (scale_inv, True, False, fp8_dtype)
