"""Fused weight-gradient accumulation: the wgrad GEMMs of later micro-batches add to the gradients of earlier ones.

Without fusion, autograd adds a micro-batch's gradient to `.grad` with another kernel. This moves 6 bytes per bf16
element, and the new gradient needs memory. A GEMM can also add: D = A B + C, with one buffer for C and D, the *main
gradient* (Transformer Engine's `fuse_wgrad_accumulation`). In a step of n micro-batches, a weight's gradient is:

    phase                            one process, DDP               FSDP2
    1. first micro-batch             autograd creates `.grad`       FSDP2 casts `.grad` (bf16) to unsharded fp32
    2. micro-batches 2 to n          the wgrad GEMM adds to `weight.main_grad`, which `FusedWgradAccumulation` sets to
                                     `.grad`                        the result of `FsdpStrategy.main_grads`
    3. reduction, last micro-batch   DDP all-reduces (`strategy`),  `fsdp.MemorySavingReduceScatter` deletes
                                     and autograd adds              `main_grad`; then `.grad` is the shard
    4. clip, step, zero              `DistributedStrategy.step` uses `.grad` and sets it to None

`main_grad` exists in phase 2 only, since it would keep the gradient's memory allocated. In bf16 the GEMM gives the same
bits as autograd (H200, cuBLAS 13), because it rounds before it adds.

Transformer Engine 2.20 (module/linear.py, layernorm_linear.py, layernorm_mlp.py) reads `fuse_wgrad_accumulation` in the
forward pass (and in recomputation) and `main_grad` in the backward pass, and returns None to autograd as the weight's
gradient. With `is_first_microbatch=True` the GEMM overwrites, so gradients must be None after each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from llm_fp8.distributed.strategy import DistributedStrategy
from llm_fp8.precision.coverage import linear_weights


class FusedWgradAccumulation:
    """Makes the wgrad GEMMs of TE's linear modules add to existing gradients. Such additions do not run DDP's hooks."""

    def __init__(self, model: nn.Module, strategy: DistributedStrategy) -> None:
        """`model` is the model that the strategy prepared."""
        self._strategy, self._find_main_grad = strategy, strategy.main_grads(model)
        modules: list[Any] = [module for module in model.modules() if hasattr(module, "fuse_wgrad_accumulation")]
        trained = [(module, [w for w in linear_weights(module) if w.requires_grad]) for module in modules]
        self._trained = [(module, weights) for module, weights in trained if weights]

    def weights(self) -> list[Tensor]:
        """Return the trained weights of TE's linear modules, without duplicates."""
        return list(dict.fromkeys(weight for _, weights in self._trained for weight in weights))

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Return the context for the passes of a micro-batch. `last` is True for the last micro-batch of a step."""
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
        """Make the GEMMs of `module` add to the main gradients of its `weights`, if that works for all of them. Then
        append the module and its gathered weights to `fused`. In `micro_batch`, local variables would keep gradients.
        """
        if _would_lose_main_grad(module):
            return
        assert self._find_main_grad is not None
        pairs = [self._find_main_grad(weight) for weight in weights]
        # A GEMM needs a contiguous gradient, but the gradient of a transposed weight is transposed.
        if not all(main_grad is not None and main_grad.is_contiguous() for _, main_grad in pairs):
            return
        fused.append((module, [weight for weight, _ in pairs]))
        module.fuse_wgrad_accumulation = True
        for weight, main_grad in pairs:
            weight.main_grad = main_grad  # type: ignore[attr-defined]


def _would_lose_main_grad(module: Any) -> bool:
    """Return True for a LayerNormLinear that does not store its fp8 casts: it cannot add to a main gradient."""
    casts_anew = getattr(module, "is_fsdp2", False) and getattr(module, "fp8", False)
    return type(module).__name__ == "LayerNormLinear" and casts_anew and not module.primary_weights_in_fp8
