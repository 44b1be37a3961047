"""In which precision a run computes: resolved once, entered in one autocast context.

    plan = resolve_precision(config.precision, device)      # asked for -> what this machine gives, and why
    precision = Precision(plan, config.precision, device, parameter_dtype)
    precision.attach(model, decoder_layers)                 # finds the fp8 modules; keeps some in bf16
    with precision.context(first_microbatch=True):          # the only place that enters te.autocast
        loss_sum, aux = model(batch)

A bf16 run and an fp8 run differ in `plan.recipe` alone: None means that te.autocast is not entered and no fp8 kernel
can run. torchao's modules compute in fp8 by themselves: nothing is entered for them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import RECIPES, size_multiple
from llm_fp8.models.experts import expert_weights
from llm_fp8.models.layer_forward import wrap_forward
from llm_fp8.precision.convert import bf16_modules
from llm_fp8.precision.module_state import ModuleState, read_te_state
from llm_fp8.precision.modules import linear_weights, size_misfit, te_linears
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.precision.torchao import converted_modules, read_state
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.te_internals import forget_weight_casts, keep_weight_casts, put_off_scale_updates, update_scales


class Precision:
    """The autocast context of a forward pass, and what TE keeps between passes."""

    def __init__(
        self, plan: PrecisionPlan, options: PrecisionConfig, device: torch.device, parameter_dtype: torch.dtype
    ) -> None:
        self.plan, self._options, self._device = plan, options, device
        # With parameters already in the compute dtype, torch.autocast would only add casts.
        self._torch_autocast = parameter_dtype != plan.compute_dtype
        self._caching_modules: list[nn.Module] = []
        self._fp8_modules: dict[str, nn.Module] = {}
        self._te_linears: dict[str, nn.Module] = {}
        self._torchao_linears: dict[str, nn.Module] = {}
        self.misfits: dict[str, str] = {}
        """Name of a TE module that stays in bf16 -> why the recipe cannot compute it."""
        self._num_casts_to_come: int | None = None
        self.in_fp8 = plan.recipe is not None
        """Whether passes compute in fp8 now."""

    def attach(self, model: nn.Module, decoder_layers: nn.ModuleList) -> None:
        """Find the fp8 modules of `model`, converted already; `UserError` where nothing would be in fp8. From now on
        experts compute in the compute dtype too.
        """
        experts = list(filter(expert_weights, model.modules())) if self._torch_autocast else ()
        for module in experts:
            wrap_forward(module, functools.partial(torch.compiler.disable(self._with_experts_cast), module))
        self._caching_modules = [m for m in model.modules() if hasattr(m, "is_first_microbatch")]
        self._te_linears = te_linears(model)
        self._torchao_linears = converted_modules(model)
        if self.plan.recipe is None:
            return
        if self.plan.backend == "torchao":
            self._fp8_modules = self._torchao_linears
        else:
            self._find_te_modules(model, decoder_layers)
        if not self._fp8_modules:
            why = next(iter(self.misfits.values()), "no linear layer of the model can run in fp8")
            if kept := self._options.fp8_bf16_modules:
                why = f"--fp8_bf16_modules {kept} keeps every linear layer in bf16"
            raise UserError(f"--mixed_precision fp8: {why}, so nothing would run in fp8; use --mixed_precision bf16.")

    def _find_te_modules(self, model: nn.Module, decoder_layers: nn.ModuleList) -> None:
        kept: set[nn.Module] = set()
        for module in bf16_modules(self._options, model, decoder_layers):
            kept.update(module.modules())
            wrap_forward(module, self.without_fp8)
        multiple = size_multiple(self.plan.effective_scenario)
        for name, module in self._te_linears.items():
            if module in kept:
                continue
            if misfit := size_misfit(module, multiple):
                self.misfits[name] = misfit
                wrap_forward(module, self.without_fp8)
            else:
                self._fp8_modules[name] = module
        if self._options.fp8_recast_weights:
            keep_weight_casts(model, keep=False)

    @property
    def fp8_modules(self) -> frozenset[nn.Module]:
        """The modules whose GEMMs run in fp8; never lm_head."""
        return frozenset(self._fp8_modules.values())

    @property
    def has_ended(self) -> bool:
        """Whether `end_fp8` was called."""
        return self.plan.recipe is not None and not self.in_fp8

    def end_fp8(self) -> None:
        """Compute in bf16 from now on, with the same modules and weights (--fp8_until)."""
        self.in_fp8, self._num_casts_to_come = False, None
        if self.plan.backend == "torchao":
            for module in self._fp8_modules.values():
                module.forward = functools.partial(nn.Linear.forward, module)  # type: ignore[arg-type]
            torch.compiler.reset()  # compiled layers have fp8 in them
        else:
            forget_weight_casts(self._fp8_modules.values())

    @property
    def scales_lag(self) -> bool:
        """Whether a tensor's scale comes from earlier passes (delayed scaling)."""
        scenario = self.plan.effective_scenario
        return scenario is not None and RECIPES[scenario].scales_lag

    def module_state(self) -> ModuleState:
        """State of the modules in fp8; in a run without fp8 of all linear ones of Transformer Engine or torchao."""
        if self._torchao_linears:
            return read_state(self._torchao_linears.values())
        return read_te_state((self._fp8_modules if self.in_fp8 else self._te_linears).values())

    def keep_casts_of_frozen_weights(self) -> None:
        """From now on frozen weights are cast to fp8 once; under delayed scaling again after the first pass."""
        self._num_casts_to_come = 2 if self.scales_lag else 1

    def _te_autocast(self, enabled: bool) -> contextlib.AbstractContextManager[Any]:
        import transformer_engine.pytorch as te

        return te.autocast(enabled=enabled, recipe=self.plan.te_recipe)

    def without_fp8(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` of a Transformer Engine module outside fp8."""
        with self._te_autocast(enabled=False):
            return forward(*args, **kwargs)

    def _with_experts_cast(self, experts: nn.Module, forward: Any, hidden: Tensor, *routing: Any, **others: Any) -> Any:
        """Call `forward` of `experts` on casts of input and weights, which torch.autocast does not make for grouped
        GEMMs (torch 2.13); gradients reach the weights in the weights' dtype.
        """
        if not torch.is_autocast_enabled(hidden.device.type):
            return forward(hidden, *routing, **others)
        dtype = self.plan.compute_dtype
        casts = {name: weight.to(dtype) for name, weight in experts.named_parameters(recurse=False)}
        # An entry of the instance hides the parameter of that name.
        vars(experts).update(casts)
        try:
            return forward(hidden.to(dtype), *routing, **others)
        finally:
            for name in casts:
                del vars(experts)[name]

    @contextlib.contextmanager
    def context(self, first_microbatch: bool | None) -> Iterator[None]:
        """Enclose one forward pass of the model.

        `first_microbatch`: True casts weights to fp8 and keeps the casts for the step's other micro-batches, which pass
        False. None neither uses nor keeps casts: for evaluation, and for steps of one micro-batch, where keeping costs
        memory and saves nothing. After `keep_casts_of_frozen_weights` training passes ignore it.
        """
        if self._options.fp8_recast_weights:
            first_microbatch = None
        if self._num_casts_to_come is not None and torch.is_grad_enabled():
            first_microbatch = self._num_casts_to_come > 0
            self._num_casts_to_come = max(0, self._num_casts_to_come - 1)
        for module in self._caching_modules:
            module.is_first_microbatch = first_microbatch  # type: ignore[assignment]
        with contextlib.ExitStack() as stack:
            if self._torch_autocast:
                stack.enter_context(torch.autocast(self._device.type, self.plan.compute_dtype))
            if self.plan.te_recipe is not None and self.in_fp8:
                stack.enter_context(self._te_autocast(enabled=True))
            yield

    def put_off_scale_updates(self) -> contextlib.AbstractContextManager[None]:
        """Encloses forward and backward passes that update no scale of delayed scaling; `update_scales` does."""
        return put_off_scale_updates() if self.scales_lag and self.in_fp8 else contextlib.nullcontext()

    def update_scales(self) -> None:
        """Update the scales by what the passes since the last update have seen, on all ranks."""
        if self.scales_lag and self.in_fp8:
            update_scales()

    def state_tensors(self) -> dict[str, Tensor]:
        """Delayed scaling's fp32 tensors: scales [num_tensors], amax histories [history, num_tensors]; else empty."""
        state: dict[str, Tensor] = {}
        if not self.scales_lag:
            return state
        module: Any
        # Without no_grad, leaving the autocast would count as a forward pass and shift the histories.
        with torch.no_grad(), self._te_autocast(enabled=True):
            for name, module in self._fp8_modules.items():
                if self.in_fp8:  # else it would say that the module computes in fp8
                    module.init_fp8_metadata(num_gemms=len(linear_weights(module)))
                for direction in ("scaling_fwd", "scaling_bwd"):
                    meta = module.fp8_meta[direction]
                    state[f"{name}.{direction}.scale"] = meta.scale
                    state[f"{name}.{direction}.amax_history"] = meta.amax_history
        return state

    @contextlib.contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Keep scales and amax histories across passes that are not training: TE notes amax without gradients too."""
        current = list(self.state_tensors().values())
        kept = [tensor.clone() for tensor in current]
        try:
            yield
        finally:
            if current:
                torch._foreach_copy_(current, kept)
