"""Back end for Transformer Engine's fp8 (--fp8_backend te): linear modules, autocast and state between passes."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import Recipe, row_of
from llm_fp8.precision.coverage import ModuleState, linear_weights, linears_left, plain_linears, size_misfit
from llm_fp8.utils.te_internals import require_te
from llm_fp8.utils.torch_internals import wrap_forward

TUNED_WIDTHS = (512, 768, 1024, 2048, 4096, 8192)  # hidden sizes for which TE 2.20 has tuned RMSNorm kernels
HOPPER = 9  # major compute capability of the GPUs on which TE's and cuDNN's kernels were compared
VARIABLES = ("NVTE_NORM_FWD_USE_CUDNN", "NVTE_NORM_BWD_USE_CUDNN")


def prepare_te_decoder(hidden_size: int, device: torch.device) -> None:
    """Import Transformer Engine. Set environment variables that choose its kernels, unless the user has set them."""
    require_te("--use_te")
    # TE would choose an installed flash-attn 4, a beta whose dQ was wrong for a head_dim of 80.
    os.environ.setdefault("NVTE_FLASH_ATTN_V4", "0")
    if device.type == "cuda":
        choose_norm_backend(hidden_size, torch.cuda.get_device_capability(device)[0], os.environ)


def choose_norm_backend(width: int, major_capability: int, environ: MutableMapping[str, str]) -> None:
    """Set variables in `environ` that select cuDNN's RMSNorm if it is faster. Existing variables are not changed.

    For a `width` outside `TUNED_WIDTHS`, TE runs a general kernel. On an H200 with 16,384 tokens of width 3,072 it took
    316 us (forward and backward with quantisation), and cuDNN's took 117 us (benchmarks/LOG.md). But cuDNN plans for up
    to a second for each new number of tokens, which is longer than the time saved in small models.
    """
    if width > 1024 and width not in TUNED_WIDTHS and major_capability == HOPPER:
        for name in VARIABLES:
            environ.setdefault(name, "1")


def format_name(recipe: Any) -> str | None:
    """Return the name of a Transformer Engine recipe's fp8 format, such as "HYBRID", or None if it has none."""
    return getattr(getattr(recipe, "fp8_format", None), "name", None)


class TEBackend:
    """Back end for Transformer Engine. `recipe` is None in a run without fp8, whose decoder may still be TE's."""

    recomputes_fprop = True  # a recomputed layer runs its fprop GEMMs again

    def __init__(self, recipe: Any = None, scenario: str | None = None) -> None:
        self.recipe, self.scenario = recipe, scenario

    @staticmethod
    def build_recipe(options: PrecisionConfig, recipe: Recipe, device: torch.device) -> Any:
        """Return Transformer Engine's recipe object for `device`. Options that the recipe does not have are ignored."""
        from transformer_engine.common import recipe as te_recipes

        keywords = dict(recipe.defaults)
        keywords |= {name: value for name in recipe.options if (value := getattr(options, name)) is not None}
        if "fp8_format" in keywords:
            keywords["fp8_format"] = getattr(te_recipes.Format, keywords["fp8_format"])
        library: Any = te_recipes
        if not hasattr(te_recipes, recipe.recipe_class):
            from llm_fp8.precision import backward as library
        built = getattr(library, recipe.recipe_class)(**keywords)
        # Later GPUs use powers of two as scales, as in MXFP8.
        if recipe.fp32_scales_on_hopper and torch.cuda.get_device_capability(device) == (9, 0):
            for operand in ("fwd_inp", "fwd_weight", "bwd_grad"):
                setattr(built, f"fp8_quant_{operand}", te_recipes.QParams(power_2_scale=False))
        return built

    def linears_of(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return name -> linear module of Transformer Engine in `model`, including fused modules."""
        return {name: m for name, m in model.named_modules() if hasattr(m, "fp8_meta") and linear_weights(m)}

    def convert(self, model: nn.Module, in_bf16: Iterable[nn.Module] = (), fp8_params: bool = False) -> dict[str, str]:
        """Replace `nn.Linear` modules of `model` by TE's, in place. Return name -> reason for each `nn.Linear` that
        stays. This back end uses neither `in_bf16` (see `choose`) nor `fp8_params`.
        """
        te = require_te("--mixed_precision fp8")

        class SwappedLinear(te.Linear):  # type: ignore[name-defined]
            """te.Linear with the call signature of nn.Linear; `is_first_microbatch` is as in `TEDecoderLayer`."""

            is_first_microbatch: bool | None = None

            def forward(self, inputs: Any) -> Any:
                return super().forward(inputs, is_first_microbatch=self.is_first_microbatch)

        left = linears_left(model, row_of(self.scenario).size_multiple)
        for name, linear in plain_linears(model).items():
            if name in left:
                continue
            sizes, bias, dtype = (linear.in_features, linear.out_features), linear.bias, linear.weight.dtype
            swapped = SwappedLinear(*sizes, bias=bias is not None, params_dtype=dtype, device="meta")
            swapped.weight = linear.weight
            if bias is not None:
                swapped.bias = bias
            model.set_submodule(name, swapped)
        return left

    def choose(
        self, linears: dict[str, nn.Module], in_bf16: Sequence[nn.Module]
    ) -> tuple[dict[str, nn.Module], dict[str, str]]:
        """Return the modules in `linears` that compute in fp8, and name -> reason for each module with sizes that the
        recipe does not support. Make the latter modules, and those `in_bf16`, compute in bf16.
        """
        inside = {inner for module in in_bf16 for inner in module.modules()}
        multiple = row_of(self.scenario).size_multiple
        others = {name: module for name, module in linears.items() if module not in inside}
        misfits = {name: misfit for name, module in others.items() if (misfit := size_misfit(module, multiple))}
        for module in (*in_bf16, *(others[name] for name in misfits)):
            wrap_forward(module, functools.partial(self.call_in_bf16, module))
        return {name: module for name, module in others.items() if name not in misfits}, misfits

    def state(self, modules: Iterable[nn.Module]) -> ModuleState:
        """Return the state of `modules` after the last step. Reading amax histories synchronises the host."""
        linears = list(modules)
        metas: list[Any] = [module.fp8_meta for module in linears if getattr(module, "fp8", False)]
        forward = [getattr(meta.get("scaling_fwd"), "amax_history", None) for meta in metas]
        histories = [history.amax() for history in forward if history is not None]
        largest = torch.stack(histories).tolist() if histories else []
        return ModuleState(
            num_modules=len(linears),
            num_in_fp8=len(metas),
            recipes=dict(Counter(type(meta["recipe"]).__name__ for meta in metas)),
            formats=dict(Counter(name for meta in metas if (name := format_name(meta["recipe"])))),
            num_without_amax=sum(not value > 0 for value in largest),
        )

    def autocast(self, enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which passes compute in fp8, or without fp8 if not `enabled`."""
        import transformer_engine.pytorch as te

        return te.autocast(enabled=enabled, recipe=self.recipe)

    def call_in_bf16(self, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` of `module` in bf16."""
        with self.autocast(enabled=False):
            return forward(*args, **kwargs)

    def state_tensors(self, modules: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return delayed scaling's tensors, fp32: scales [num_tensors], amax histories [history, num_tensors]."""
        state: dict[str, Tensor] = {}
        # With gradients enabled, the end of the autocast would count as a forward pass and shift the histories.
        with torch.no_grad(), self.autocast():
            for name, module in modules.items():
                module.init_fp8_metadata(num_gemms=len(linear_weights(module)))
                for direction in ("scaling_fwd", "scaling_bwd"):
                    meta, prefix = module.fp8_meta[direction], f"{name}.{direction}"
                    state |= {f"{prefix}.scale": meta.scale, f"{prefix}.amax_history": meta.amax_history}
        return state

    def unwrapped_shard(self, parameter: Tensor) -> Tensor:
        """Return `parameter` unchanged, since Transformer Engine does not wrap parameters."""
        return parameter

    def refresh_scales_(self, model: nn.Module) -> None:
        """Do nothing, since no weight is cast before the all-gather."""
