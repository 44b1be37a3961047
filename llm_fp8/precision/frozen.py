"""In fp8 runs with adapters, store frozen weights only in fp8.

Otherwise a module stores the bf16 weight (2 bytes per element) and two fp8 casts (1 byte each), since Hopper's GEMMs
need two layouts. The casts of a frozen weight never change, so the GEMMs read the same bits in both cases. With delayed
scaling, the scale is computed from the weight's current amax, as it would otherwise be from the second cast on.

If a tensor has one scale, the layout for dgrad is the transpose of the other layout. Transformer Engine creates a
missing transpose in the backward pass, and we free it after dgrad. This leaves 1 byte per element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from llm_fp8.precision.context import Precision
from llm_fp8.utils.te_internals import make_rowwise_only
from llm_fp8.utils.torch_internals import free_memory_


def prepare_module(module: Any, recipe: Any) -> list[str]:
    """Bring a TE module into the state of one built under `te.quantized_model_init`. Return its weights' names."""
    import transformer_engine.pytorch as te

    names = [name for name, entry in module.param_init_meta.items() if entry.fp8_meta_index is not None]
    with te.quantized_model_init(enabled=True, recipe=recipe):
        module.init_fp8_metadata(num_gemms=len(names))
    module.primary_weights_in_fp8 = True
    return names


def quantizer_of(module: Any, name: str) -> Any:
    """Return the quantizer for weight `name` of a TE module. `prepare_module` must be called before."""
    return module.quantizers["scaling_fwd"][module.param_init_meta[name].fp8_meta_index]


@torch.no_grad()
def hold_in_fp8(model: nn.Module, precision: Precision) -> int:
    """Replace frozen, unsharded weights of fp8 modules by fp8 tensors. Return the number of freed bytes."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor

    recipe, freed_bytes = precision.plan.recipe, 0
    modules: list[Any] = [module for module in model.modules() if module in precision.fp8_modules]
    for module in modules:
        names = prepare_module(module, recipe)
        for name in names:
            weight = getattr(module, name).detach()
            quantizer = quantizer_of(module, name)
            if isinstance(quantizer, Float8Quantizer):  # delayed scaling
                amax = weight.abs().amax().float()
                # Divide two tensors: torch divides a Python number by a tensor with its reciprocal, which rounds twice.
                scale = torch.full_like(amax, recipe.fp8_format.value.max_fwd) / amax
                quantizer.scale.copy_(torch.where(amax > 0, scale, 1.0))
            quantizer.set_usage(rowwise=True, columnwise=True)
            quantizer.internal = False
            setattr(module, name, Parameter(quantizer(weight), requires_grad=False))
            freed_bytes += weight.numel() * weight.element_size()
            free_memory_(weight)
        if all(isinstance(getattr(module, name), Float8Tensor) for name in names):
            keep_no_transposes(module, names)
    return freed_bytes


def keep_no_transposes(module: Any, names: list[str]) -> None:
    """Free the transposes of the fp8 weights `names` of `module`, now and after each dgrad, which creates them anew."""

    def drop(*_: object) -> None:
        for name in names:
            getattr(module, name).update_usage(columnwise_usage=False)

    def drop_before_and_after(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        drop()  # a failed pass may have left a transpose, which a captured graph has not computed
        if inputs[0].requires_grad:
            inputs[0].register_hook(drop)  # runs after dgrad, when the input's gradient is available

    for name in names:  # otherwise Transformer Engine's forward pass would create both layouts
        make_rowwise_only(getattr(module, name))
    drop()
    module.register_forward_pre_hook(drop_before_and_after)
