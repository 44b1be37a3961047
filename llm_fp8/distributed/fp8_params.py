"""--fp8_params: fp8 weights of the decoder's linear layers between steps, all-gathered in fp8.

Each rank holds of every such weight, all sharded along the first dimension:

    what            bytes per element   used by
    master weight   4 (fp32)            the optimizer; checkpoints and the export are written from it
    two moments     8 (fp32)            the optimizer
    fp8 shard       1                   all-gathered as it is for the forward and the backward pass

Without the option the master weight's shard is cast to bf16, all-gathered at two bytes per element, and every rank
casts the unsharded weight to fp8 for every micro-batch. With it each rank casts its own shard, once per step. Gradients
stay unsharded in bf16, reduced in fp32; norms, biases, embedding and lm_head stay fp32 shards of the same units.

All shards of a weight have one scale:

    scale = largest fp8 number / amax of the master weight over all ranks / 2^margin

computed after the step, with one collective for all weights, in both recipes. So no weight exceeds its scale, as it
could under delayed scaling's own rule, and the fp8 shards follow from the master weights alone: checkpoints equal those
of runs without this option.

Transformer Engine 2.20 supports such parameters: FSDP2's extension point for tensor subclasses (`fsdp_pre_all_gather`)
gathers a DTensor of `Float8Tensor` shards as bytes, and `te.quantized_model_init` makes modules for them. TE's
optimizer is not used: under delayed scaling it casts with the scale of past steps, with current scaling it takes a
collective for each weight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from llm_fp8.precision.context import Precision
from llm_fp8.utils.torch_internals import local_of

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

_WEIGHT = "_fp8_weight"
"""Attribute of an fp8 parameter: its `Fp8Weight`."""


def master_of(parameter: AnyTensor) -> AnyTensor:
    """The master weight of an fp8 parameter; any other parameter is its own."""
    weight: Any = getattr(parameter, _WEIGHT, None)
    return parameter if weight is None else weight.master


def requantise_(model: nn.Module) -> None:
    """Compute the fp8 weights of `model`, where it has any, from its master weights; collective."""
    for parameter in model.parameters():
        weight: Fp8Weight | None = getattr(parameter, _WEIGHT, None)
        if weight is not None:
            weight.group.quantise_()
            return


@dataclass(eq=False)
class Fp8Weight:
    """One weight; `quantizer.update_quantized(shard, fp8_shard)` casts with the scale that `group` gave it."""

    master: Parameter
    """fp32 DTensor sharded along dim 0; a parameter of the optimizer and of no module."""
    parameter: Parameter
    """fp8 DTensor sharded likewise; a parameter of its module and of no optimizer."""
    quantizer: Any
    group: Fp8Weights


class Fp8Weights:
    """The fp8 weights of a model.

    Args:
        scales: fp32 [number of weights], read by the weights' quantizers.
        target: the number that a weight's amax becomes.
        process_group: the ranks that share one copy of the model.
    """

    def __init__(self, scales: Tensor, target: float, process_group: dist.ProcessGroup) -> None:
        self._scales = scales
        self._target = target
        self._process_group = process_group
        self._weights: list[Fp8Weight] = []

    def add(self, master: Parameter, parameter: Parameter, quantizer: Any) -> None:
        """The next weight; its quantizer reads the next of the scales."""
        weight = Fp8Weight(master, parameter, quantizer, self)
        setattr(parameter, _WEIGHT, weight)
        self._weights.append(weight)

    def attach(self, optimizer: Optimizer) -> None:
        """Let `optimizer`, over the master weights, use the fp8 parameters' gradients and update them."""
        optimizer.register_step_pre_hook(self._hand_over_gradients)
        optimizer.register_step_post_hook(self._after_step)

    def _hand_over_gradients(self, *_: Any) -> None:
        for weight in self._weights:
            if weight.parameter.grad is not None:
                weight.master.grad, weight.parameter.grad = weight.parameter.grad, None

    def _after_step(self, *_: Any) -> None:
        self.quantise_()

    @torch.no_grad()
    def quantise_(self) -> None:
        """Cast all master weights; collective over the process group."""
        shards = [local_of(weight.master) for weight in self._weights]
        amax = torch.stack(torch._foreach_norm(shards, math.inf))
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self._process_group)
        self._scales.copy_(scales_of(amax, self._target))
        for weight, master in zip(self._weights, shards, strict=True):
            # In place: what FSDP gathered before refers to this very tensor of the scale.
            weight.quantizer.update_quantized(master, local_of(weight.parameter))


def scales_of(amax: Tensor, target: float) -> Tensor:
    """Scales fp32 [n] that turn `amax` fp32 [n] into `target`: 1 for a weight of zeros; 0 for an infinite one, which
    makes it NaN in fp8, so that training stops on it.
    """
    scales = torch.where(amax > 0, target / amax, 1.0)
    return scales.clamp(max=torch.finfo(torch.float32).max)


def keep_weights_in_fp8(model: nn.Module, precision: Precision, optimizer: Optimizer) -> Fp8Weights:
    """Replace the weights of `precision`'s fp8 modules, fp32 shards, by fp8 parameters; the former, which `optimizer`
    holds, become the master weights. Collective; before the first forward pass, when FSDP2 reads its parameters.
    """
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    recipe: Any = precision.plan.recipe
    target = recipe.fp8_format.value.max_fwd / 2 ** getattr(recipe, "margin", 0)
    # In the modules' order, the same on every rank; the set of fp8 modules has none.
    modules: list[Any] = [module for module in model.modules() if module in precision.fp8_modules]
    places = [(module, name) for module in modules for name in _prepare_module(module, recipe)]
    first: Any = getattr(*places[0])
    split_dim = next(dim for dim, placement in enumerate(first.placements) if placement.is_shard())
    scales = torch.ones(len(places), dtype=torch.float32, device=first.device)
    unused = torch.zeros(1, dtype=torch.float32, device=first.device)
    weights = Fp8Weights(scales, target, first.device_mesh.get_group(split_dim))
    for number, (module, name) in enumerate(places):
        own: Any = module.quantizers["scaling_fwd"][module.param_init_meta[name].fp8_meta_index]
        master: Parameter = getattr(module, name)
        parameter = _fp8_parameter(master, own)
        setattr(module, name, parameter)
        # The quantizer that casts with a given scale, for both recipes. The amax that it finds goes where delayed
        # scaling keeps its history, so that a run without this option can resume.
        amax = own.amax if isinstance(own, Float8Quantizer) else unused
        quantizer = Float8Quantizer(scales[number : number + 1], amax, own.dtype, rowwise=True, columnwise=False)
        weights.add(master, parameter, quantizer)
    weights.quantise_()
    weights.attach(optimizer)
    return weights


def _prepare_module(module: Any, recipe: Any) -> Sequence[str]:
    """Make `module` what it would be had it been built under `te.quantized_model_init`; the names of its weights.

    It was built before it was known which layers stay in bf16, and its weights could not have been filled.
    """
    import transformer_engine.pytorch as te

    names = [name for name, entry in module.param_init_meta.items() if entry.fp8_meta_index is not None]
    with te.quantized_model_init(enabled=True, recipe=recipe):
        module.init_fp8_metadata(num_gemms=len(names))
    module.primary_weights_in_fp8 = True
    return names


@torch.no_grad()
def _fp8_parameter(master: Any, quantizer: Any) -> Parameter:
    """An fp8 parameter sharded like `master`, contents undefined."""
    # The transpose, which Hopper's backward pass wants, is made of the gathered weight.
    quantizer.set_usage(rowwise=True, columnwise=False)
    quantizer.internal = False
    shard = quantizer(local_of(master))
    sharded = DTensor.from_local(
        shard, master.device_mesh, master.placements, shape=master.shape, stride=master.stride()
    )
    parameter = Parameter(sharded)
    local: Any = local_of(parameter)
    local.fsdp_pre_all_gather = functools.partial(_gather, local.fsdp_pre_all_gather)
    return parameter


def _gather(
    pre_all_gather: Any, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: nn.Module, mp_policy: Any
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """`Float8Tensor.fsdp_pre_all_gather`, without transposes in the backward pass either.

    TE would make the transpose at once and free the gathered weight. Activation checkpointing recomputes the layer from
    that weight, and would keep the transposes. Modules make a transpose where they need one, and drop it.
    """
    tensors, (scale_inv, _, _, fp8_dtype) = pre_all_gather(mesh, orig_size, contiguous_orig_stride, module, mp_policy)
    return tensors, (scale_inv, True, False, fp8_dtype)
