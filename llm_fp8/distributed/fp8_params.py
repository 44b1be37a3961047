"""--fp8_params: fp8 weights of the decoder's linear layers between steps, all-gathered in fp8.

Each rank holds of every such weight, sharded along the first dimension, the fp32 master weight and its moments (12
bytes per element), from which checkpoints are written, and the fp8 shard (1 byte), which is all-gathered as it is.
Without the option it is cast to bf16, all-gathered at two bytes per element, and cast to fp8 by every rank for every
micro-batch. All shards of a weight have one scale, in both recipes,

    scale = largest fp8 number / amax of the master weight over all ranks

computed after the step, with one collective for all weights. Checkpoints equal those of runs without this option.

FSDP2's extension point for tensor subclasses (`fsdp_pre_all_gather`) gathers Transformer Engine's (2.20) `Float8Tensor`
shards as bytes. TE's optimizer is not used: it casts with the scale of past steps, or takes a collective per weight.
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
from torch.nn import Parameter
from torch.optim import Optimizer

from llm_fp8.precision.context import Precision
from llm_fp8.utils.torch_internals import local_of, sharded_like

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

_MASTER, _GROUP = "_fp8_master", "_fp8_group"  # attributes of an fp8 parameter; the second is its `Fp8Weights`


def master_of(parameter: AnyTensor) -> AnyTensor:
    """The master weight of an fp8 parameter; any other parameter is its own."""
    return getattr(parameter, _MASTER, parameter)


def requantise_(model: nn.Module) -> None:
    """Compute the fp8 weights of `model`, where it has any, from its master weights; collective."""
    for group in {getattr(p, _GROUP) for p in model.parameters() if hasattr(p, _GROUP)}:
        group.quantise_()


@dataclass(eq=False)
class Fp8Weights:
    weights: list[tuple[Parameter, Parameter, Any]]
    """The master weight, an fp32 DTensor sharded along dim 0, which the optimizer has; the fp8 parameter, sharded
    likewise, which the module has; and the quantizer that casts one to the other."""
    scales: Tensor  # fp32 [number of weights], read by the quantizers
    target: float  # the number that a weight's amax becomes
    process_group: dist.ProcessGroup  # the ranks that share one copy of the model

    def hand_over_gradients(self) -> None:
        for master, parameter, _ in self.weights:
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad, None

    @torch.no_grad()
    def quantise_(self) -> None:
        """Cast all master weights; collective over the process group."""
        amax = torch.stack(torch._foreach_norm([local_of(master) for master, _, _ in self.weights], math.inf))
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.process_group)
        scales = torch.where(amax > 0, self.target / amax, 1.0)  # 0 for infinity, which becomes NaN
        self.scales.copy_(scales.clamp(max=torch.finfo(torch.float32).max))
        for master, parameter, quantizer in self.weights:
            # In place: what FSDP gathered before refers to this very tensor of the scale.
            quantizer.update_quantized(local_of(master), local_of(parameter))


def keep_weights_in_fp8(model: nn.Module, precision: Precision, optimizer: Optimizer) -> None:
    """Replace the weights of `precision`'s fp8 modules, fp32 shards in `optimizer`, by fp8 parameters, and make them
    the master weights. Collective; before the first forward pass, when FSDP2 reads its parameters.
    """
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    recipe: Any = precision.plan.recipe
    target = recipe.fp8_format.value.max_fwd
    # In the modules' order, the same on every rank; the set of fp8 modules has none.
    modules: list[Any] = [module for module in model.modules() if module in precision.fp8_modules]
    places = [(module, name) for module in modules for name in _prepare_module(module, recipe)]
    first: Any = getattr(*places[0])
    split_dim = next(dim for dim, placement in enumerate(first.placements) if placement.is_shard())
    scales = torch.ones(len(places), dtype=torch.float32, device=first.device)
    unused = torch.zeros(1, dtype=torch.float32, device=first.device)
    weights: list[tuple[Parameter, Parameter, Any]] = []
    for number, (module, name) in enumerate(places):
        own: Any = module.quantizers["scaling_fwd"][module.param_init_meta[name].fp8_meta_index]
        master: Parameter = getattr(module, name)
        parameter = _fp8_parameter(master, own)
        setattr(module, name, parameter)
        # It casts with a given scale, for both recipes; its amax goes into delayed scaling's history, for resuming.
        amax = own.amax if isinstance(own, Float8Quantizer) else unused
        quantizer = Float8Quantizer(scales[number : number + 1], amax, own.dtype, rowwise=True, columnwise=False)
        weights.append((master, parameter, quantizer))
    group = Fp8Weights(weights, scales, target, first.device_mesh.get_group(split_dim))
    for master, parameter, _ in weights:
        setattr(parameter, _MASTER, master)
        setattr(parameter, _GROUP, group)
    group.quantise_()
    optimizer.register_step_pre_hook(lambda *_: group.hand_over_gradients())
    optimizer.register_step_post_hook(lambda *_: group.quantise_())


def _prepare_module(module: Any, recipe: Any) -> Sequence[str]:
    """Make `module` as if built under `te.quantized_model_init`; the names of its weights."""
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
    parameter = Parameter(sharded_like(quantizer(local_of(master)), master))
    local: Any = local_of(parameter)
    local.fsdp_pre_all_gather = functools.partial(_gather, local.fsdp_pre_all_gather)
    return parameter


def _gather(
    pre_all_gather: Any, mesh: Any, orig_size: Any, contiguous_orig_stride: Any, module: nn.Module, mp_policy: Any
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """`Float8Tensor.fsdp_pre_all_gather` without transposes, which would free the weight before a recomputation."""
    tensors, (scale_inv, _, _, fp8_dtype) = pre_all_gather(mesh, orig_size, contiguous_orig_stride, module, mp_policy)
    return tensors, (scale_inv, True, False, fp8_dtype)
