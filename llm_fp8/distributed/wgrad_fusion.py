"""Weight gradients of several micro-batches, summed by the GEMMs that compute them.

autograd adds a micro-batch's gradient to `.grad` with a kernel of its own, after the GEMM wrote it to memory of its
own: 6 bytes of traffic for each bf16 element, and room for the new gradient. A GEMM can do it on the way, D = A B + C
with C and D the same buffer, which Transformer Engine's linear modules offer as `fuse_wgrad_accumulation`. This is all
that the project knows about it:

- In the first micro-batch of a step the modules do as ever: autograd takes the tensor that the GEMM wrote as `.grad`.
  So no buffer is set to zero or kept between steps, and a step of one micro-batch is what it was.
- In the others a weight whose `.grad` is there has it as `main_grad` too. The GEMM adds to it and Transformer Engine
  gives autograd None for the weight. `main_grad` is taken away again behind the micro-batch, or when a GPU's part of
  the sum is exchanged before, for it would keep the memory of dropped gradients.
- Where parameters are split over GPUs the sum stands elsewhere than in `.grad`: whoever keeps it says where
  (`FindMainGrad`).

On an H200 (cuBLAS 13) a sum in bf16 has the bits of autograd's: the GEMM rounds its product to bf16 before it adds.
Into a sum in fp32 the products of these micro-batches go without being rounded to the compute dtype at all.

What Transformer Engine 2.20 does with it (module/linear.py, layernorm_linear.py, layernorm_mlp.py):
- `fuse_wgrad_accumulation` is read in the forward pass, also a recomputed one, `main_grad` in the backward pass. Frozen
  weights need none.
- With `is_first_microbatch=True` the GEMM overwrites. So this needs gradients to be dropped behind each step, as
  `DistributedStrategy.step` does, and the seam (`llm_fp8.precision.context`) to say True in no later micro-batch. It
  does for the frozen model of a LoRA run, which has no weight gradients.
- A weight that has an attribute `grad_added_to_main_grad` gets a dummy gradient instead of None. It is Megatron's, and
  not set here.
- Biases and norms are left to autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn

from llm_fp8.precision.modules import linear_weights

FindMainGrad: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""A module's weight -> the tensor that its forward passes see in its place, and the sum of its gradients so far:
None where there is none yet.
"""


def in_grad(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """The `FindMainGrad` of weights that are whole: autograd's."""
    return weight, weight.grad


class FusedWgradAccumulation:
    """Lets Transformer Engine's linear modules in `model` add to the gradients that are there; with no such module it
    does nothing.

    Whatever waits for autograd to accumulate a weight's gradient (DDP's exchange, DeepSpeed, hooks) is not called for
    these weights.
    """

    def __init__(self, model: nn.Module, find_sum: FindMainGrad = in_grad) -> None:
        modules: list[Any] = [module for module in model.modules() if hasattr(module, "fuse_wgrad_accumulation")]
        trained = [(module, [w for w in linear_weights(module) if w.requires_grad]) for module in modules]
        self._trained = [(module, weights) for module, weights in trained if weights]
        self._find_sum = find_sum

    def weights(self) -> list[Tensor]:
        """The trained weights whose gradients of further micro-batches are added by GEMMs, as long as these
        gradients are contiguous; each once.
        """
        return list({id(weight): weight for _, weights in self._trained for weight in weights}.values())

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Encloses forward and backward of a micro-batch; gradients are then where they would be without it, whoever
        added them.
        """
        adding: list[tuple[Any, list[Tensor]]] = []
        try:
            for module, weights in self._trained:
                self._lend_main_grads(module, weights, adding)
            yield
        finally:
            for module, weights in adding:
                module.fuse_wgrad_accumulation = False
                for weight in weights:
                    release_main_grad(weight)

    def _lend_main_grads(self, module: Any, weights: list[Tensor], adding: list[tuple[Any, list[Tensor]]]) -> None:
        """Let `module` add to the sums of its weights, if it can to all of them, and note it in `adding`, with the
        tensors that have the sums.

        Nothing else may hold on to a sum until the micro-batch is over: an exchange lets go of it before
        (`release_main_grad`).
        """
        sums = [self._find_sum(weight) for weight in weights]
        if not all(_can_be_added_to(total) for _, total in sums):
            return
        adding.append((module, [weight for weight, _ in sums]))
        module.fuse_wgrad_accumulation = True
        for weight, total in sums:
            weight.main_grad = total  # type: ignore[attr-defined]


def release_main_grad(weight: Tensor) -> None:
    """Take away what a module added to the gradient of `weight` by, if it is there: its backward pass is over."""
    vars(weight).pop("main_grad", None)


def _can_be_added_to(total: Tensor | None) -> bool:
    """Whether there is a gradient that a GEMM can write to; one of a transposed weight is transposed too."""
    return total is not None and total.is_contiguous()
