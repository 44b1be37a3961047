"""The lm_head's GEMMs in fp8 (--fp8_lm_head), for `llm_fp8.kernels.cross_entropy`.

For hidden states `x [T, h]`, the weight `W [V, h]` and `g [T, V]`, the gradient with respect to the logits:

    logits = x W^T  [T, V]          grad_hidden = g W  [T, h]          grad_weight = g^T x  [V, h]

`gradients` computes the last two in fp8, which leaves the loss unchanged; `all` computes all three. Results are bf16,
accumulated in fp32, for the gradients with Transformer Engine's split accumulation, as in its own recipes. V and h must
be multiples of 16; tokens are padded with rows of zeros.

    x, W    E4M3, by its own amax (current scaling)
    g       E5M2, by a bound. g = grad_output * (softmax - one_hot) with softmax - one_hot in [-1, 1], so |grad_output|
            bounds it: no pass over [T, V] for an amax. Where some token is predicted badly the bound is nearly reached.

Most probabilities are tiny: E4M3 flushes those below 2e-6 to zero, E5M2 those below 1e-10. With E4M3 the rows of W for
seldom predicted tokens would get no gradient, and Adam no update. E5M2 rounds each entry by up to an eighth, with
errors that do not add up over tokens.

Memory beside bf16's: the cast of W, kept for the step, one byte per weight, two for `all`, which needs both layouts. g
(T V bytes) is transposed between its GEMMs, after the bf16 logits (2 T V) were freed: at most 3 T V bytes at once.
On a CPU the same rounding is emulated: torch casts with the same scales and multiplies in fp32 or fp64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llm_fp8.config.recipes import FP8_SIZE_MULTIPLE
from llm_fp8.kernels import softmax

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPERAND_FORMAT, GRADIENT_FORMAT = E4M3, E5M2

Layout = Literal["TN", "NN", "NT"]
"""As BLAS names it for column-major (A, B): TN is B A^T, NN is B A, NT is B^T A."""


class Fp8Head:
    """The lm_head `module` and the cast of its weight, kept between micro-batches. `is_first_microbatch`, set by
    `Precision.context`: True casts the weight and keeps the cast, False takes the kept one, None does neither.
    """

    def __init__(self, module: nn.Module, gemms: Literal["gradients", "all"]) -> None:
        self.module = module
        self.computes_logits = gemms == "all"
        self.is_first_microbatch: bool | None = None
        self.keeps_cast = True
        """False: the weight is cast in every micro-batch, for CUDA graphs, which cannot follow a kept cast to a new
        place.
        """
        self._kept: Any = None

    def num_gemms_of(self, of: int) -> int:
        """How many of the `of` GEMMs of a micro-batch (3, or 2 where the lm_head is frozen) run in fp8."""
        return of if self.computes_logits else of - 1

    def cast_weight(self, weight: Tensor, first_microbatch: bool | None) -> Any:
        """`weight` in fp8, cast or kept."""
        if first_microbatch is False and self._kept is not None:
            return self._kept
        self._kept = None  # frees its memory for the new one
        cast = cast_to_fp8(weight, rowwise=self.computes_logits)
        self._kept = cast if self.keeps_cast and first_microbatch is not None else None
        return cast


class Fp8Gemms:
    """The GEMMs of one forward and backward pass, in the order of the calls."""

    def __init__(self, head: Fp8Head) -> None:
        self._head, self._first_microbatch = head, head.is_first_microbatch
        self._weight: Any = None
        self._hidden: Any = None

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """`hidden @ weight.T`: [T, h], [V, h] -> [T, V] in their dtype."""
        if not self._head.computes_logits:
            return hidden @ weight.t()
        self._hidden = cast_to_fp8(_padded(hidden))
        return multiply(self._cast_of(weight), self._hidden, "TN", hidden.dtype)[: hidden.shape[0]]

    def grad_logits(self, logits: Tensor, statistics: Tensor, labels: Tensor, grad_output: Tensor) -> Any:
        """The gradient with respect to `logits`, an operand for `gradients`. Frees `logits`."""
        in_fp8 = gradient_in_one_kernel if softmax.use_triton(logits) else gradient_in_two_steps
        grad = in_fp8(logits, statistics, labels, grad_output)
        # Autograd does not see that they are freed; this makes a second backward pass an error.
        torch.autograd.graph.increment_version(logits)
        logits.untyped_storage().resize_(0)
        return grad

    def gradients(
        self, grad_logits: Any, hidden: Tensor, weight: Tensor, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """`grad_logits @ weight` [T, h] and `grad_logits.T @ hidden` [V, h] in their dtype; None where not `needed`."""
        num_tokens, dtype = hidden.shape[0], hidden.dtype
        grad_hidden = grad_weight = None
        if needed[0]:
            grad_hidden = multiply(self._cast_of(weight), grad_logits, "NN", dtype)[:num_tokens]
        if needed[1]:
            keep_columnwise_alone(grad_logits)  # in place
            cast = self._hidden if self._hidden is not None else cast_to_fp8(_padded(hidden), rowwise=False)
            grad_weight = multiply(cast, grad_logits, "NT", dtype)
        self._hidden = None
        return grad_hidden, grad_weight

    def _cast_of(self, weight: Tensor) -> Any:
        if self._weight is None:
            self._weight = self._head.cast_weight(weight, self._first_microbatch)
        return self._weight

    def end(self) -> None:
        """Free the casts of this pass: autograd's node outlives its backward pass."""
        self._weight = self._hidden = None


def _padded_length(num_tokens: int) -> int:
    """The next multiple of `FP8_SIZE_MULTIPLE` that is not zero."""
    return max(1, -(-num_tokens // FP8_SIZE_MULTIPLE)) * FP8_SIZE_MULTIPLE


def _padded(rows: Tensor) -> Tensor:
    """`rows` with rows of zeros behind them, to `_padded_length`."""
    missing = _padded_length(len(rows)) - len(rows)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


@dataclass(frozen=True)
class EmulatedOperand:
    """A tensor in fp8: `values` times `scale_inverse`."""

    values: Tensor
    scale_inverse: Tensor

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype) * self.scale_inverse.to(dtype)


def gradient_in_two_steps(logits: Tensor, statistics: Tensor, labels: Tensor, grad_output: Tensor) -> Any:
    """The gradient as a row-wise operand with T padded rows: written over the logits in their dtype, then cast."""
    softmax.to_gradient_(logits, statistics, labels, grad_output)
    return cast_to_fp8(_padded(logits), GRADIENT_FORMAT, columnwise=False, amax=grad_output.detach().abs())


def gradient_in_one_kernel(logits: Tensor, statistics: Tensor, labels: Tensor, grad_output: Tensor) -> Any:
    """The same, rounded once to fp8 and with the logits unchanged; where `softmax.use_triton`."""
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    from llm_fp8.kernels.fp8_gradients_triton import softmax_gradient_cast

    scale = _scale(grad_output.detach().abs(), GRADIENT_FORMAT)
    values = softmax_gradient_cast(
        logits, statistics, labels, grad_output, scale, _padded_length(logits.shape[0]), GRADIENT_FORMAT
    )
    return Float8TensorStorage(
        data=values.view(torch.uint8),
        fp8_scale_inv=scale.reciprocal(),
        fp8_dtype=DType.kFloat8E5M2,
        fake_dtype=logits.dtype,
    )


def cast_to_fp8(
    tensor: Tensor,
    fp8_format: torch.dtype = OPERAND_FORMAT,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax: Tensor | None = None,
) -> Any:
    """`tensor [n, m]`, bf16 or fp32, as an operand of `multiply` in `fp8_format` (`E4M3` or `E5M2`).

    `rowwise`, `columnwise`: the layouts to keep. B in TN and NN and A in TN are read row-wise, the others column-wise.
    `amax`: 0-dim, maps to the format's largest value; larger entries are clipped. Default: the tensor's own.
    """
    if not tensor.is_cuda:
        return emulated_cast(tensor, fp8_format, amax)
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    te_format = {E4M3: DType.kFloat8E4M3, E5M2: DType.kFloat8E5M2}[fp8_format]
    quantizer: Any
    if amax is None:
        quantizer = Float8CurrentScalingQuantizer(te_format, tensor.device, columnwise=columnwise)
    else:
        # Delayed scaling's quantizer takes a given scale; the amax that it records is not used.
        recorded = torch.zeros(1, dtype=torch.float32, device=tensor.device)
        quantizer = Float8Quantizer(_scale(amax, fp8_format), recorded, te_format, columnwise=columnwise)
    quantizer.internal = True  # plain data, which autograd does not see
    operand = quantizer(tensor.detach().contiguous())
    if not rowwise:  # Transformer Engine makes the column-wise layout only beside the row-wise one
        keep_columnwise_alone(operand)
    return operand


def multiply(left: Any, right: Any, layout: Layout, out_dtype: torch.dtype) -> Tensor:
    """The GEMM of two operands, accumulated in fp32 and rounded once to `out_dtype`; see `Layout`."""
    if not isinstance(left, EmulatedOperand):
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        grad = layout != "TN"
        return general_gemm(left, right, out_dtype=out_dtype, layout=layout, grad=grad, use_split_accumulator=grad)[0]
    wide = torch.promote_types(out_dtype, torch.float32)
    a, b = left.dequantized(wide), right.dequantized(wide)
    product = b @ a.t() if layout == "TN" else b @ a if layout == "NN" else b.t() @ a
    return product.to(out_dtype)


def keep_columnwise_alone(operand: Any) -> None:
    """Transpose a row-wise operand and drop the row-wise layout, in place."""
    if not isinstance(operand, EmulatedOperand):  # which has no layout
        operand.update_usage(rowwise_usage=False, columnwise_usage=True)


def _scale(amax: Tensor, fp8_format: torch.dtype) -> Tensor:
    """fp32 [1]; 1 for a tensor of zeros, as in Transformer Engine. NaN and infinity stay, so that the run stops."""
    amax = amax.float()
    return torch.where(amax == 0, 1.0, torch.finfo(fp8_format).max / amax).reshape(1)


def emulated_cast(tensor: Tensor, fp8_format: torch.dtype, amax: Tensor | None = None) -> EmulatedOperand:
    """Transformer Engine's cast in torch: scaled in fp32, clipped to the format's range, rounded to nearest even."""
    scale = _scale(tensor.abs().amax() if amax is None else amax, fp8_format)
    limit = torch.finfo(fp8_format).max
    return EmulatedOperand((tensor.float() * scale).clamp(-limit, limit).to(fp8_format), 1 / scale)
