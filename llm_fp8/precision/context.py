"""The precision of a run's computation. All passes of the model use one autocast context:

    plan = with_recipe(settled.precision, config.precision, device)
    precision = Precision(plan, config.precision, device, parameter_dtype)
    precision.attach(model, decoder_layers)                 # chooses the fp8 modules
    with precision.context(first_microbatch=True):          # training enters te.autocast only here
        loss_sum, aux = model(batch)

A bf16 run differs from an fp8 run only in that `plan.recipe` is None. Then te.autocast is not entered, so no fp8 kernel
runs. The back ends (`te`, `torchao`) implement the differences between the libraries that compute in fp8.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from llm_fp8.config.options import PrecisionConfig
from llm_fp8.config.recipes import row_of
from llm_fp8.models.experts import compute_experts
from llm_fp8.precision.coverage import ModuleState, bf16_modules
from llm_fp8.precision.plan import PrecisionPlan
from llm_fp8.precision.te import TEBackend
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.te_internals import defer_scale_updates, keep_weight_casts, update_scales

if TYPE_CHECKING:
    from llm_fp8.precision.torchao import TorchaoBackend


def backend_class(name: str | None) -> type[TEBackend | TorchaoBackend]:
    """Return the class of the back end `name`. If `name` is None (no fp8), it is Transformer Engine's."""
    if name != "torchao":
        return TEBackend
    from llm_fp8.precision.torchao import TorchaoBackend

    return TorchaoBackend


def backend_in(model: nn.Module) -> TEBackend | TorchaoBackend:
    """Return torchao's back end if `model` has its linear modules, else Transformer Engine's."""
    is_torchao = any(type(module).__name__ == "Float8Linear" for module in model.modules())
    return backend_class("torchao" if is_torchao else "te")()


def with_recipe(plan: PrecisionPlan, options: PrecisionConfig, device: torch.device) -> PrecisionPlan:
    """Return `plan` with its back end's recipe object for `device`, or unchanged without fp8. Raise `UserError` if the
    back end's library, or a compiler that it requires, is not installed.
    """
    if plan.effective_scenario is None:
        return plan
    recipe = backend_class(plan.backend).build_recipe(options, row_of(plan.effective_scenario), device)
    return dataclasses.replace(plan, recipe=recipe)


class Precision:
    """The autocast context of a forward pass and the back end that computes in fp8."""

    def __init__(
        self, plan: PrecisionPlan, options: PrecisionConfig, device: torch.device, parameter_dtype: torch.dtype
    ) -> None:
        self.plan, self._options, self._device = plan, options, device
        self.backend = backend_class(plan.backend)(plan.recipe, plan.effective_scenario)
        # With parameters already in the compute dtype, torch.autocast would only add casts.
        self._torch_autocast = parameter_dtype != plan.compute_dtype
        self._caching_modules: list[nn.Module] = []
        self._fp8_modules: dict[str, nn.Module] = {}
        self._linears: dict[str, nn.Module] = {}  # all linear modules of the back end
        self._num_casts_to_come: int | None = None

    def attach(
        self, model: nn.Module, decoder_layers: nn.ModuleList, converts: bool = False, fp8_params: bool = False
    ) -> dict[str, str]:
        """Choose the fp8 modules of `model`. Return name -> reason for each linear layer that does not compute in fp8.
        If `converts`, first replace the linear layers of a Hugging Face decoder by fp8 modules. With `fp8_params`, FSDP
        can gather their weights in fp8. Make experts compute in the compute dtype. Raise `UserError` if none is fp8.
        """
        reasons = dict[str, str]()
        if converts and self.plan.in_fp8:
            in_bf16 = bf16_modules(self._options, model, decoder_layers)
            reasons = self.backend.convert(model, in_bf16, fp8_params)
        compute_experts(model, self.plan.compute_dtype if self._torch_autocast else None)
        self._caching_modules = [m for m in model.modules() if hasattr(m, "is_first_microbatch")]
        if not self.plan.in_fp8:
            self.backend = backend_in(model)  # the certificate checks that its modules are not in fp8
            self._linears = self.backend.linears_of(model)
            return {}
        self._linears = self.backend.linears_of(model)
        in_bf16 = bf16_modules(self._options, model, decoder_layers)  # again, since conversion replaced modules
        self._fp8_modules, misfits = self.backend.choose(self._linears, in_bf16)
        if self._options.fp8_recast_weights:
            keep_weight_casts(model.modules(), keep=False)
        if not self._fp8_modules:
            why = next(iter(misfits.values()), "no linear layer of the model can run in fp8")
            if patterns := self._options.fp8_bf16_modules:
                why = f"--fp8_bf16_modules {patterns} keeps every linear layer in bf16"
            raise UserError(f"--mixed_precision fp8: {why}, so nothing would run in fp8; use --mixed_precision bf16.")
        return reasons | misfits

    @property
    def fp8_modules(self) -> frozenset[nn.Module]:
        """The modules whose GEMMs run in fp8."""
        return frozenset(self._fp8_modules.values())

    @property
    def scales_lag(self) -> bool:
        """True if a tensor's scale is computed from earlier passes (delayed scaling)."""
        return row_of(self.plan.effective_scenario).scales_lag

    def module_state(self) -> ModuleState:
        """Return the state of the fp8 modules or, in a run without fp8, of all linear modules of the back end."""
        return self.backend.state((self._fp8_modules if self.plan.in_fp8 else self._linears).values())

    def keep_casts_of_frozen_weights(self) -> None:
        """Cast frozen weights in the next training pass, or the next two with delayed scaling; then reuse the casts."""
        self._num_casts_to_come = 2 if self.scales_lag else 1

    @contextlib.contextmanager
    def context(self, first_microbatch: bool | None) -> Iterator[None]:
        """Return the context for one forward pass of the model.

        If `first_microbatch` is True, the pass casts weights to fp8 and stores the casts. Use False for the other
        micro-batches of a step, which use the stored casts. Use None for evaluation and for steps of one micro-batch:
        casts are then not stored, to save memory. After `keep_casts_of_frozen_weights`, training ignores the value.
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
            if self.plan.in_fp8:
                stack.enter_context(self.backend.autocast())
            yield

    def defer_scale_updates(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which passes do not update delayed scales. The caller must then call `update_scales`."""
        return defer_scale_updates() if self.scales_lag else contextlib.nullcontext()

    def update_scales(self) -> None:
        """Update the scales of delayed scaling on all ranks from the passes since the last update."""
        if self.scales_lag:
            update_scales()

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the back end that carry over to the next pass, i.e. the state of delayed scaling."""
        return self.backend.state_tensors(self._fp8_modules) if self.scales_lag else {}

    @contextlib.contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Restore scales and amax histories after the block, which TE would update even without gradients."""
        current = list(self.state_tensors().values())
        saved = [tensor.clone() for tensor in current]
        try:
            yield
        finally:
            if current:
                torch._foreach_copy_(current, saved)
