"""torchao's fp8 training (--fp8_backend torchao): recipes, compiled layers, the modules' state.

`Float8Linear` takes the place of `nn.Linear`. It keeps the weight and casts it, the input and the gradient of the
output to fp8 for every GEMM; nothing is kept between steps. A cast is several small kernels, which torch.compile fuses
with their neighbours, so on a GPU each decoder layer is compiled. On a CPU the GEMMs are emulated
(`Float8LinearConfig.emulate`): operands are rounded to fp8 and multiplied in high precision, which shows fp8's effect
on the loss and nothing of its speed.

Tensorwise has one scale per tensor and gradients in e5m2, and is the only one whose weights FSDP2 can all-gather in
fp8; rowwise has one per row, powers of two, all in e4m3; rowwise_with_gw_hp the same with wgrad in bf16.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llm_fp8.config.recipes import recipe_names
from llm_fp8.precision.module_state import ModuleState
from llm_fp8.utils.torch_internals import compile_without_ddp_cuts, local_of, sharded_like


def build_config(scenario: str, emulate: bool) -> Any:
    """torchao's `Float8LinearConfig` of a scenario."""
    from torchao.float8 import Float8LinearConfig

    return dataclasses.replace(Float8LinearConfig.from_recipe_name(scenario), emulate=emulate)


def converted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> torchao's linear modules of `model`, by the class's name, so that nothing is imported."""
    return {name: module for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}


def compile_layers(layers: Iterable[nn.Module], recomputed: bool = False) -> None:
    """Compile each decoder layer in place, when it first runs; `recomputed`: under activation checkpointing."""
    if recomputed:
        compile_without_ddp_cuts()
    for layer in layers:
        layer.compile()


def read_state(modules: Iterable[nn.Module]) -> ModuleState:
    """The state of torchao's linear modules: in fp8 are those set up for it, not emulated, with an own `forward`."""
    known = {build_config(name, emulate=False): name for name in recipe_names("torchao")}
    # What others than this package set changes no scale: Accelerate pads, and both may all-gather in fp8.
    plain = dict(enable_fsdp_float8_all_gather=False, force_recompute_fp8_weight_in_bwd=False, pad_inner_dim=False)
    asked: list[Any] = list(modules)
    in_fp8 = [module.config for module in asked if not module.config.emulate and "forward" not in vars(module)]
    recipes: Counter[Any] = Counter(known.get(dataclasses.replace(config, **plain)) for config in in_fp8)
    return ModuleState(
        num_modules=len(asked),
        num_in_fp8=len(in_fp8),
        num_recipe_unreadable=recipes.pop(None, 0),
        recipes=dict(recipes),
        library="torchao",
    )


def unwrapped_shard(parameter: Tensor) -> Tensor:
    """A sharded parameter that torchao wraps for --fp8_params as a DTensor of its fp32 shard; any other as it is."""
    if not isinstance(parameter, DTensor):
        return parameter
    local: Any = local_of(parameter)
    if type(local).__name__ != "WeightWithDynamicFloat8CastTensor":
        return parameter
    shard: Tensor = local._tensor
    return sharded_like(shard.detach(), parameter)


def refresh_scales_(model: nn.Module) -> None:
    """Compute the scales of weights that are all-gathered in fp8 (if any), with one collective, after each update."""
    if any(unwrapped_shard(module.weight) is not module.weight for module in converted_modules(model).values()):  # type: ignore[arg-type]
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
