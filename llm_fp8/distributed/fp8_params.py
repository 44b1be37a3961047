"""--fp8_params: the decoder's linear weights stay in fp8 between steps and are all-gathered in fp8.

Each of these weights is sharded along dim 0. A rank holds a shard of the fp32 master weight and its moments (12 bytes
per element), which checkpoints store, and an fp8 shard (1 byte), which is all-gathered. Without the option shards are
all-gathered in bf16 (2 bytes), and every rank casts the weight to fp8 in every micro-batch. In both recipes all shards
of a weight share one scale,

    scale = largest fp8 number / amax of the master weight over all ranks

computed after the step, with one collective for all weights. Checkpoints are the same with and without this option.

FSDP2's extension point for tensor subclasses (`fsdp_pre_all_gather`) gathers the shards, Transformer Engine's (2.20)
`Float8Tensor`, as bytes. TE's own optimizer casts with the scale of past steps, or needs a collective per weight.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
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


class Fp8Weight(NamedTuple):
    master: Parameter  # DTensor sharded along dim 0: fp32 in the optimizer, or bf16 if frozen
    parameter: Parameter  # the module's fp8 parameter, sharded like `master`
    quantizer: Any  # casts the master to the parameter


@dataclass(eq=False)
class Fp8Weights:
    """All fp8 weights of a model."""

    weights: list[Fp8Weight]
    scales: Tensor  # fp32 [number of weights], read by the quantizers
    target: float  # number to which a weight's amax is scaled
    process_group: dist.ProcessGroup  # the ranks that share one copy of the model

    def hand_over_gradients(self) -> None:
        for weight in self.weights:
            if weight.parameter.grad is not None:
                weight.master.grad = weight.parameter.grad
                weight.parameter.grad = None

    @torch.no_grad()
    def quantise_(self) -> None:
        """Cast all master weights. Collective over the process group."""
        masters = [local_of(weight.master) for weight in self.weights]
        amax = torch.stack(torch._foreach_norm(masters, math.inf, dtype=torch.float32))
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.process_group)
        # Divide tensor by tensor: torch divides a Python number by a tensor via the reciprocal and rounds twice. An
        # infinite amax gives scale 0, and so NaN.
        scales = torch.where(amax > 0, torch.full_like(amax, self.target) / amax, 1.0)
        # In place, since weights that FSDP gathered before refer to this tensor.
        self.scales.copy_(scales.clamp(max=torch.finfo(torch.float32).max))
        for weight, master in zip(self.weights, masters, strict=True):
            weight.quantizer.update_quantized(master, local_of(weight.parameter))


class Fp8ParamsStrategy(FsdpStrategy):
    """FSDP that gathers weights in fp8: TE's weights as fp8 parameters, others in the form of their back end."""

    _backend: Any = TEBackend()  # set to the run's back end by `prepare`
    _weights: Fp8Weights | None = None

    def prepare(self, model: nn.Module, optimizer: Optimizer, precision: Any = None) -> tuple[nn.Module, Any]:
        self._backend, self._weights = precision.backend, keep_weights_in_fp8(model, precision)
        if (weights := self._weights) is not None:
            optimizer.register_step_pre_hook(lambda *_: weights.hand_over_gradients())
        optimizer.register_step_post_hook(lambda *_: self._cast_(model))
        return super().prepare(model, optimizer)

    def _cast_(self, model: nn.Module) -> None:
        if self._weights is not None:
            self._weights.quantise_()
        self._backend.refresh_scales_(model)

    def master_of(self, parameter: Any) -> tuple[Any, Tensor]:
        weights = [] if self._weights is None else self._weights.weights
        master = next((weight.master for weight in weights if weight.parameter is parameter), parameter)
        return master, self._backend.unwrapped_shard(master).detach()

    def after_load(self, model: nn.Module, optimizer: Any, step: int) -> None:
        super().after_load(model, optimizer, step)
        self._cast_(model)


def keep_weights_in_fp8(model: nn.Module, precision: Precision) -> Fp8Weights | None:
    """Give TE's fp8 modules in `model` fp8 parameters; the previous parameters become their masters. Return None if no
    weight is trained: frozen weights are cast once and their masters freed.

    Collective. Call it before the first forward pass, in which FSDP2 reads its parameters.
    """
    recipe: Any = precision.plan.recipe
    # Follow the order of `modules()`, which is the same on every rank; a set has no order.
    modules: list[Any] = [module for module in model.modules() if module in precision.fp8_modules]
    # Leave out modules that are in fp8 already, such as frozen ones.
    modules = [module for module in modules if not getattr(module, "primary_weights_in_fp8", True)]
    places = [(module, name) for module in modules for name in prepare_module(module, recipe)]
    if not places:
        return None
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    first: Any = getattr(*places[0])
    split_dim = next(dim for dim, placement in enumerate(first.placements) if placement.is_shard())
    scales = torch.ones(len(places), dtype=torch.float32, device=first.device)
    unused = torch.zeros(1, dtype=torch.float32, device=first.device)
    weights = list[Fp8Weight]()
    for (module, name), scale in zip(places, scales.split(1), strict=True):
        master, recipe_quantizer = getattr(module, name), quantizer_of(module, name)
        parameter = _fp8_parameter(master, recipe_quantizer)
        setattr(module, name, parameter)
        # In both recipes this quantizer casts with a given scale. Its amax goes into delayed scaling's history.
        amax = recipe_quantizer.amax if isinstance(recipe_quantizer, Float8Quantizer) else unused
        quantizer = Float8Quantizer(scale, amax, recipe_quantizer.dtype, rowwise=True, columnwise=False)
        weights.append(Fp8Weight(master, parameter, quantizer))
    group = Fp8Weights(weights, scales, recipe.fp8_format.value.max_fwd, first.device_mesh.get_group(split_dim))
    group.quantise_()
    if first.requires_grad:
        return group
    for weight in weights:  # FSDP2 refers to the masters until the first forward pass
        free_memory_(weight.master)
    return None


@torch.no_grad()
def _fp8_parameter(master: Any, quantizer: Any) -> Parameter:
    """Return an fp8 parameter with undefined contents, sharded like `master`."""
    # Hopper's backward pass needs the transpose, which is made from the gathered weight.
    quantizer.set_usage(rowwise=True, columnwise=False)
    quantizer.internal = False
    parameter = Parameter(sharded_like(quantizer(local_of(master)), master), requires_grad=master.requires_grad)
    local: Any = local_of(parameter)
    local.fsdp_pre_all_gather = functools.partial(_gather, local.fsdp_pre_all_gather)
    return parameter


def _gather(
    pre_all_gather: Any, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: nn.Module, mp_policy: Any
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Call `Float8Tensor.fsdp_pre_all_gather` without transposes: with them, recomputation finds the weight freed."""
    tensors, (scale_inv, _, _, fp8_dtype) = pre_all_gather(mesh, orig_size, contiguous_orig_stride, module, mp_policy)
    return tensors, (scale_inv, True, False, fp8_dtype)
