"""--fp8_params: the weights of the decoder's linear layers in fp8 between steps, and gathered in fp8.

Each rank holds of every such weight, all split over ranks along the first dimension:

    what          bytes per element   who uses it
    fp32 master   4                   the optimizer; checkpoints and the export are written from it
    two moments   8                   the optimizer
    fp8 rows      1                   gathered for the forward and the backward pass, as they are

Without the option the master's rows are cast to bf16, gathered at two bytes per element, and the whole weight is cast
to fp8 by every rank, for every micro-batch. With it each rank casts its own rows, once per step. Gradients are as
before: bf16 whole, summed over ranks in fp32. Norms and biases stay fp32 rows in the same FSDP units, the embedding and
the head too.

All rows of a weight share one scale, whichever rank holds them:

    scale = largest fp8 number / largest |master| over all ranks / 2^margin

It is computed from the masters as they are after the step, with one collective for all weights, in both recipes. So a
weight never exceeds its scale, which under delayed scaling's own rule it could; and the fp8 rows are a function of the
masters alone: a checkpoint needs nothing else to give the same bits again, and is the same as one that was written
without this option.

Transformer Engine 2.20 knows such parameters: a DTensor whose local part is a `Float8Tensor` gathers its bytes by the
extension points that FSDP2 has for tensor subclasses (`fsdp_pre_all_gather`). `te.quantized_model_init` makes modules
for them. Its own optimizer is not used: under delayed scaling it would cast with the scale of past steps, and with
current scaling it takes a collective for each weight.
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

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

_WEIGHT = "_fp8_weight"
"""Attribute of an fp8 parameter: its `Fp8Weight`."""


def master_of(parameter: AnyTensor) -> AnyTensor:
    """The fp32 master of an fp8 parameter; any other parameter is its own master."""
    weight: Any = getattr(parameter, _WEIGHT, None)
    return parameter if weight is None else weight.master


def requantise_(model: nn.Module) -> None:
    """Compute the fp8 weights of `model`, where it has any, from masters that were written to; collective."""
    for parameter in model.parameters():
        weight: Fp8Weight | None = getattr(parameter, _WEIGHT, None)
        if weight is not None:
            weight.group.quantise_()
            return


@dataclass(eq=False)
class Fp8Weight:
    """One weight. `quantizer.update_quantized(rows, fp8_rows)` casts fp32 rows with the scale that `group` gave it."""

    master: Parameter
    """fp32, a DTensor split along dim 0; a parameter of the optimizer and of no module."""
    parameter: Parameter
    """fp8, a DTensor split likewise; a parameter of its module and of no optimizer."""
    quantizer: Any
    group: Fp8Weights


class Fp8Weights:
    """The fp8 weights of a model.

    Args:
        scales: fp32 [number of weights], read by the weights' quantizers.
        target: the number that a weight's largest magnitude becomes.
        process_group: the ranks that hold one copy of the model together.
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
        """Let `optimizer`, which holds the masters, step by the gradients of the fp8 parameters and leave these up
        to date.
        """
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
        """Cast all masters; collective over the process group."""
        rows = [_local(weight.master) for weight in self._weights]
        largest = torch.stack(torch._foreach_norm(rows, math.inf))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._process_group)
        self._scales.copy_(scales_of(largest, self._target))
        for weight, master_rows in zip(self._weights, rows, strict=True):
            # In place: what FSDP gathered before refers to this very tensor of the scale.
            weight.quantizer.update_quantized(master_rows, _local(weight.parameter))


def scales_of(largest: Tensor, target: float) -> Tensor:
    """Scales fp32 [n] that turn magnitudes `largest` fp32 [n] into `target`.

    A weight of zeros has scale 1. One that is infinite has scale 0, which makes it NaN in fp8: training stops on it
    instead of clipping it.
    """
    scales = torch.where(largest > 0, target / largest, 1.0)
    return scales.clamp(max=torch.finfo(torch.float32).max)


def _local(parameter: Parameter) -> Tensor:
    """This rank's part of a DTensor itself, not a view of it."""
    return parameter._local_tensor  # type: ignore[attr-defined]


def keep_weights_in_fp8(model: nn.Module, precision: Precision, optimizer: Optimizer) -> Fp8Weights:
    """Replace the weights of `precision`'s fp8 modules, fp32 rows that hold their values, by fp8 parameters.

    What they were before become the masters: `optimizer` goes on holding them. Collective; call it before the first
    forward pass, which is when FSDP2 looks at its parameters.
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
        # For both recipes the quantizer that casts with a given scale. What it finds as the largest magnitude goes
        # where delayed scaling keeps its history, so that a run without this option can go on from a checkpoint.
        largest = own.amax if isinstance(own, Float8Quantizer) else unused
        quantizer = Float8Quantizer(scales[number : number + 1], largest, own.dtype, rowwise=True, columnwise=False)
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
    """An fp8 parameter split like `master`; its contents are those of no scale in particular."""
    # The transpose, which Hopper's backward pass wants, is made of the gathered weight: the rows' own would be of no
    # use.
    quantizer.set_usage(rowwise=True, columnwise=False)
    quantizer.internal = False
    rows = quantizer(_local(master))
    split = DTensor.from_local(rows, master.device_mesh, master.placements, shape=master.shape, stride=master.stride())
    parameter = Parameter(split)
    local: Any = _local(parameter)
    local.fsdp_pre_all_gather = functools.partial(_gather, local.fsdp_pre_all_gather)
    return parameter


def _gather(
    pre_all_gather: Any, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: nn.Module, mp_policy: Any
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """`Float8Tensor.fsdp_pre_all_gather`, asking for the gathered rows alone in the backward pass as in the forward
    pass.

    TE would have the transpose made at once and the rows let go in the backward pass. But gradient checkpointing
    computes the layer again from the rows, and would then hold on to the transposes. The modules make a transpose where
    they need one, and drop it; the rows belong to FSDP.
    """
    tensors, (scale_inv, _, _, fp8_dtype) = pre_all_gather(mesh, orig_size, contiguous_orig_stride, module, mp_policy)
    return tensors, (scale_inv, True, False, fp8_dtype)
