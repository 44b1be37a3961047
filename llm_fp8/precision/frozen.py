"""Frozen weights held in fp8 only: of the model beside adapters an fp8 run keeps what its GEMMs read, and nothing else.

Otherwise a module keeps the bf16 weight (2 bytes per element) beside its fp8 casts (1 byte for each of two layouts,
which Hopper's GEMMs need). The casts of a frozen weight never change, so the GEMMs read the same bits. Under delayed
scaling the scale is that of the weight's own amax, as the second cast of a frozen weight has it.

Where a tensor has one scale, its second layout, for dgrad, is its transpose. Transformer Engine makes it in the
backward pass where it is missing, and it is dropped when dgrad is done: a byte per weight is left.
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
    """Bring a TE module into the state that `te.quantized_model_init` builds; returns the names of its weights."""
    import transformer_engine.pytorch as te

    names = [name for name, entry in module.param_init_meta.items() if entry.fp8_meta_index is not None]
    with te.quantized_model_init(enabled=True, recipe=recipe):
        module.init_fp8_metadata(num_gemms=len(names))
    module.primary_weights_in_fp8 = True
    return names


def quantizer_of(module: Any, name: str) -> Any:
    """The quantizer with which a TE module that is prepared casts the weight of this name."""
    return module.quantizers["scaling_fwd"][module.param_init_meta[name].fp8_meta_index]


@torch.no_grad()
def hold_in_fp8(model: nn.Module, precision: Precision) -> int:
    """Replace the weights of the fp8 modules in `model`, which are frozen and not sharded, by their fp8 form; returns
    the bytes of the replaced ones, which are freed.
    """
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer, Float8Tensor

    recipe, dropped = precision.plan.recipe, 0
    modules: list[Any] = [module for module in model.modules() if module in precision.fp8_modules]
    for module in modules:
        names = prepare_module(module, recipe)
        for name in names:
            weight = getattr(module, name).detach()
            quantizer = quantizer_of(module, name)
            if isinstance(quantizer, Float8Quantizer):  # delayed scaling
                amax = weight.abs().amax().float()
                # Not a Python number by a tensor, which torch computes by the reciprocal and rounds twice.
                scale = torch.full_like(amax, recipe.fp8_format.value.max_fwd) / amax
                quantizer.scale.copy_(torch.where(amax > 0, scale, 1.0))
            quantizer.set_usage(rowwise=True, columnwise=True)
            quantizer.internal = False
            setattr(module, name, Parameter(quantizer(weight), requires_grad=False))
            dropped += weight.numel() * weight.element_size()
            free_memory_(weight)
        if all(isinstance(getattr(module, name), Float8Tensor) for name in names):
            keep_no_transposes(module, names)
    return dropped


def keep_no_transposes(module: Any, names: list[str]) -> None:
    """Keep the weights of these names without their transposes but during dgrad."""

    def drop(*_: object) -> None:
        for name in names:
            getattr(module, name).update_usage(columnwise_usage=False)

    def drop_before_and_after(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        drop()  # what a failed pass left; inside a captured graph it was never computed
        if inputs[0].requires_grad:
            inputs[0].register_hook(drop)  # called with its gradient, of which dgrad is a part

    for name in names:  # of which Transformer Engine's forward pass makes what the quantizer says
        make_rowwise_only(getattr(module, name))
    drop()
    module.register_forward_pre_hook(drop_before_and_after)
