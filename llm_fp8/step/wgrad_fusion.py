"""Fused weight-gradient accumulation: the wgrad GEMMs of later micro-batches add to the earlier gradients.

autograd adds a micro-batch's gradient to `.grad` with another kernel after the GEMM. This kernel moves 6 bytes per bf16
element, and the new gradient needs memory. A GEMM can add by itself: D = A B + C with C and D the same buffer, the
*main gradient* (Transformer Engine's `fuse_wgrad_accumulation`). A weight's gradient in a step of n micro-batches:

    step                             one process, DDP               FSDP2
    1. first micro-batch             autograd makes `.grad`         FSDP2 makes it unsharded fp32 from the bf16 `.grad`
    2. micro-batches 2 to n          the wgrad GEMM adds to it, as `weight.main_grad`, which `FusedWgradAccumulation`
                                     finds in `.grad`               finds by `fsdp.unsharded_gradients`
    3. reduction, last micro-batch   DDP all-reduces (`strategy`);  `fsdp.MemorySavingReduceScatter` releases
                                     autograd adds there            `main_grad`; `.grad` is then the shard
    4. clip, step, zero              `DistributedStrategy.step` uses and drops `.grad`

`main_grad` exists in step 2 only, since it would keep dropped gradients in memory. In bf16 the GEMM gives the same bits
as autograd (H200, cuBLAS 13), because it rounds before it adds.

Transformer Engine 2.20 (module/linear.py, layernorm_linear.py, layernorm_mlp.py) reads `fuse_wgrad_accumulation` in the
forward pass (a recomputed one too) and `main_grad` in the backward pass, and gives autograd None for the weight. With
`is_first_microbatch=True` the GEMM overwrites, so gradients must be dropped after each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.precision.coverage import linear_weights


class FusedWgradAccumulation:
    """Makes the wgrad GEMMs of TE's linear modules in `model` accumulate. autograd's hooks (DDP's) are not called."""

    def __init__(self, model: nn.Module, strategy: DistributedStrategy) -> None:
        """`model`: as prepared by the strategy."""
        self._strategy, self._find_main_grad = strategy, strategy.main_grads(model)
        modules: list[Any] = [module for module in model.modules() if hasattr(module, "fuse_wgrad_accumulation")]
        trained = [(module, [w for w in linear_weights(module) if w.requires_grad]) for module in modules]
        self._trained = [(module, weights) for module, weights in trained if weights]

    def weights(self) -> list[Tensor]:
        """Return the trained weights of these modules, each once. GEMMs accumulate only contiguous gradients."""
        return list(dict.fromkeys(weight for _, weights in self._trained for weight in weights))

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Enclose a micro-batch's passes; `last`: the last of its step. Gradients end up where autograd puts them."""
        if self._find_main_grad is None or self._strategy.reduces_by_hooks(last):
            yield
            return
        fused: list[tuple[Any, list[Tensor]]] = []
        try:
            for module, weights in self._trained:
                self._set_main_grads(module, weights, fused)
            yield
        finally:
            for module, weights in fused:
                module.fuse_wgrad_accumulation = False
                for weight in weights:
                    vars(weight).pop("main_grad", None)

    def _set_main_grads(self, module: Any, weights: list[Tensor], fused: list[tuple[Any, list[Tensor]]]) -> None:
        """Make `module` add to the main gradients of its weights, if it can for all of them, and append it to `fused`.
        This is a function of its own because the locals of `micro_batch` would keep released main gradients alive.
        """
        if _would_lose_main_grad(module):
            return
        assert self._find_main_grad is not None
        pairs = [self._find_main_grad(weight) for weight in weights]
        # A GEMM needs a contiguous gradient, and a transposed weight has a transposed one.
        if not all(main_grad is not None and main_grad.is_contiguous() for _, main_grad in pairs):
            return
        fused.append((module, [weight for weight, _ in pairs]))
        module.fuse_wgrad_accumulation = True
        for weight, main_grad in pairs:
            weight.main_grad = main_grad  # type: ignore[attr-defined]


def _would_lose_main_grad(module: Any) -> bool:
    """Return True for a LayerNormLinear that drops its fp8 casts: such a module cannot add to a main gradient."""
    casts_anew = getattr(module, "is_fsdp2", False) and getattr(module, "fp8", False)
    return type(module).__name__ == "LayerNormLinear" and casts_anew and not module.primary_weights_in_fp8
