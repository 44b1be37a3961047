"""Back end for torchao's fp8 training (--fp8_backend torchao): recipes, conversion, the state of modules.

`Float8Linear` replaces `nn.Linear`. For every GEMM it casts the operands (weight, input, output gradient) to fp8 and
stores nothing between steps. A cast runs several small kernels, which torch.compile fuses with neighbouring operations
(`llm_fp8.step.compiled`). On a CPU the GEMMs are emulated: operands are rounded to fp8 and multiplied in high
precision, which shows the effect of fp8 on the loss but not on speed.

Gradients are e5m2 in the recipe `tensorwise`, with which alone FSDP2 can all-gather weights in fp8; else e4m3.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import Recipe, recipe_names
from llm_fp8.precision.coverage import ModuleState, linears_left, plain_linears
from llm_fp8.utils.packages import GPU_REQUIREMENTS, OptionalPackage
from llm_fp8.utils.torch_internals import local_of, sharded_like, unwrapped_by_torchao

TORCHAO = OptionalPackage("torchao", "torchao.float8", f"pip install torchao -c {GPU_REQUIREMENTS}")


def build_config(scenario: str, emulate: bool) -> Any:
    """Return torchao's `Float8LinearConfig` for the recipe `scenario`. If `emulate`, GEMMs run in high precision."""
    from torchao.float8 import Float8LinearConfig

    return dataclasses.replace(Float8LinearConfig.from_recipe_name(scenario), emulate=emulate)


class TorchaoBackend:
    """Back end for torchao, with the methods of `TEBackend`. Its modules need no autocast and store no scales."""

    recomputes_fprop = False  # torch.compile chooses what is recomputed

    def __init__(self, recipe: Any = None, scenario: str | None = None) -> None:
        self.recipe = recipe

    @staticmethod
    def build_recipe(options: PrecisionConfig, recipe: Recipe, device: torch.device) -> Any:
        TORCHAO.require("--fp8_backend torchao")
        return build_config(recipe.recipe_class, emulate=device.type != "cuda")

    def linears_of(self, model: nn.Module) -> dict[str, nn.Module]:
        return {name: module for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}

    def convert(self, model: nn.Module, in_bf16: Iterable[nn.Module] = (), fp8_params: bool = False) -> dict[str, str]:
        from torchao.float8 import convert_to_float8_training

        config = dataclasses.replace(self.recipe, enable_fsdp_float8_all_gather=fp8_params)
        inside = {inner for module in in_bf16 for inner in module.modules()}
        linears = plain_linears(model)
        left = {name: "kept in bf16" for name, linear in linears.items() if linear in inside} | linears_left(model)
        chosen = linears.keys() - left.keys()
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)
        if config.emulate:
            for module in self.linears_of(model).values():
                module.register_forward_pre_hook(_cast_input)
        return left

    def choose(self, linears: dict[str, nn.Module], *_: Any) -> tuple[dict[str, nn.Module], dict[str, str]]:
        return linears, {}

    def state(self, modules: Iterable[nn.Module]) -> ModuleState:
        """Return the state of `modules`. A module with emulated GEMMs or a replaced forward function is not in fp8."""
        known = {build_config(name, emulate=False): name for name in recipe_names("torchao")}
        # Accelerate and --fp8_params change these settings, which do not affect scales.
        plain = dict(enable_fsdp_float8_all_gather=False, force_recompute_fp8_weight_in_bwd=False, pad_inner_dim=False)
        linears: list[Any] = list(modules)
        in_fp8 = [module.config for module in linears if not module.config.emulate and "forward" not in vars(module)]
        recipes: Counter[Any] = Counter(known.get(dataclasses.replace(config, **plain)) for config in in_fp8)
        return ModuleState(
            num_modules=len(linears),
            num_in_fp8=len(in_fp8),
            num_recipe_unreadable=recipes.pop(None, 0),
            recipes=dict(recipes),
            library="torchao",
        )

    def autocast(self, enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def call_in_bf16(self, module: Any, forward: Any, *args: Any) -> Any:
        return nn.Linear.forward(module, *args)

    def state_tensors(self, *_: Any) -> dict[str, Tensor]:
        return {}

    def unwrapped_shard(self, parameter: Tensor) -> Tensor:
        """Return `parameter`, or its fp32 shard as a DTensor if torchao wraps the parameter for --fp8_params."""
        local: Any = local_of(parameter)
        if not isinstance(parameter, DTensor) or type(local).__name__ != "WeightWithDynamicFloat8CastTensor":
            return parameter
        return sharded_like(unwrapped_by_torchao(local).detach(), parameter)

    def refresh_scales_(self, model: nn.Module) -> None:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)


def _cast_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook that casts the input to the dtype of CPU autocast, since torchao applies only GPU autocast."""
    device_type = inputs[0].device.type
    if device_type == "cuda" or not torch.is_autocast_enabled(device_type):
        return None
    return (inputs[0].to(torch.get_autocast_dtype(device_type)), *inputs[1:])
