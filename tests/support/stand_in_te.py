"""Replacements in plain torch for the Transformer Engine modules that te_llama.py uses.

With them the TE decoder runs without Transformer Engine and without a GPU. Shapes, parameter names and signatures are
Transformer Engine's, and the computation follows its documentation, without fp8. With `fuse_wgrad_accumulation`, weight
gradients are written to the tensors to which the GEMMs of Transformer Engine 2.20 write them (`_FusedWgrad`).
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn


def _parameter(*shape: int, params_dtype: torch.dtype, device: str) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))


def _check_dtypes(module: nn.Module, inputs: Tensor) -> None:
    """Check that all parameters have the dtype of `inputs`, as TE does. Under torch.autocast, check nothing."""
    if not torch.is_autocast_enabled("cpu"):
        for name, parameter in module.named_parameters():
            assert parameter.dtype == inputs.dtype, (
                f"Found input dtype: {inputs.dtype} and {name!r} dtype: {parameter.dtype}"
            )


class _FusedWgrad(torch.autograd.Function):
    """A linear layer whose backward pass writes the weight gradient as TE does with `fuse_wgrad_accumulation`.

    The gradient is added to `weight.main_grad`, computed in fp32 and rounded once. It replaces `main_grad` if, in the
    forward pass, `is_first_microbatch` or `weight.overwrite_main_grad` was true. autograd gets None as the gradient of
    the weight or, if the weight has `grad_added_to_main_grad`, NaN: Transformer Engine leaves that memory undefined.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None
    ) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else inputs.dtype
        ctx.accumulate = not is_first_microbatch and not getattr(weight, "overwrite_main_grad", False)
        ctx.weight, ctx.has_bias, ctx.input_dtype = weight, bias is not None, inputs.dtype
        ctx.save_for_backward(inputs.to(dtype), weight.to(dtype))
        with torch.autocast("cpu", enabled=False):
            return F.linear(inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        main_grad = ctx.weight.main_grad
        ctx.weight.main_grad = main_grad
        assert main_grad.is_contiguous(), "Output tensor is not contiguous."
        rows = gradient.flatten(0, -2)
        product = rows.float().t() @ inputs.flatten(0, -2).float()
        main_grad.copy_(product + main_grad.float() if ctx.accumulate else product)
        dummy = None
        if hasattr(ctx.weight, "grad_added_to_main_grad"):
            ctx.weight.grad_added_to_main_grad = True
            dummy = torch.full_like(ctx.weight, float("nan"))
        return (gradient @ weight).to(ctx.input_dtype), dummy, rows.sum(0) if ctx.has_bias else None, None


class _LinearModule(nn.Module):
    """Base class of the modules that multiply by weights."""

    fuse_wgrad_accumulation = False

    @property
    def is_fsdp2(self) -> bool:
        """Return `_is_fsdp2`, by default True. In Transformer Engine it is True only if FSDP2 shards the module."""
        return bool(vars(self).setdefault("_is_fsdp2", True))

    def product(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, is_first_microbatch: bool | None) -> Tensor:
        if self.fuse_wgrad_accumulation and weight.requires_grad and torch.is_grad_enabled():
            return _FusedWgrad.apply(inputs, weight, bias, is_first_microbatch)
        return F.linear(inputs, weight, bias)


class Linear(_LinearModule):
    def __init__(self, in_features: int, out_features: int, bias: bool = True, **shared: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = _parameter(out_features, in_features, **shared)
        self.bias = _parameter(out_features, **shared) if bias else None

    def forward(self, inputs: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        _check_dtypes(self, inputs)
        return self.product(inputs, self.weight, self.bias, is_first_microbatch)


def _normed(inputs: Tensor, gain: Tensor, eps: float, zero_centered_gamma: bool) -> Tensor:
    """Return the RMSNorm of `inputs`. If `zero_centered_gamma`, the factor is 1 + gain, computed in fp32 as in TE."""
    if not zero_centered_gamma:
        return F.rms_norm(inputs, gain.shape, gain, eps)
    return F.rms_norm(inputs.float(), gain.shape, gain.float() + 1, eps).to(inputs.dtype)


class RMSNorm(nn.RMSNorm):
    def __init__(self, normalized_shape: int, zero_centered_gamma: bool = False, **options: Any) -> None:
        super().__init__(normalized_shape, **options)
        self.zero_centered_gamma = zero_centered_gamma

    def forward(self, inputs: Tensor) -> Tensor:
        return _normed(inputs, self.weight, self.eps, self.zero_centered_gamma)


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float,
        bias: bool,
        normalization: str,
        zero_centered_gamma: bool = False,
        **shared: Any,
    ) -> None:
        assert normalization == "RMSNorm"
        super().__init__(in_features, out_features, bias, **shared)
        self.norm_options, self.return_layernorm_output = (eps, zero_centered_gamma), False
        self.layer_norm_weight = _parameter(in_features, **shared)

    def forward(self, inputs: Tensor, is_first_microbatch: bool | None = None) -> Any:
        normed = _normed(inputs, self.layer_norm_weight, *self.norm_options)
        output = super().forward(normed, is_first_microbatch)
        return (output, normed) if self.return_layernorm_output else output


class LayerNormMLP(_LinearModule):
    def __init__(
        self,
        size: int,
        inner: int,
        eps: float,
        bias: bool,
        normalization: str,
        activation: str,
        zero_centered_gamma: bool = False,
        **shared: Any,
    ) -> None:
        assert normalization == "RMSNorm"
        super().__init__()
        self.norm_options, self.activation = (eps, zero_centered_gamma), activation
        self.layer_norm_weight = _parameter(size, **shared)
        self.fc1_weight, self.fc2_weight = _parameter(2 * inner, size, **shared), _parameter(size, inner, **shared)
        self.fc1_bias = _parameter(2 * inner, **shared) if bias else None
        self.fc2_bias = _parameter(size, **shared) if bias else None

    def forward(self, inputs: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        _check_dtypes(self, inputs)
        normed = _normed(inputs, self.layer_norm_weight, *self.norm_options)
        from transformer_engine.pytorch.module import layernorm_mlp  # late: a test may have replaced its table

        gate_and_up = self.product(normed, self.fc1_weight, self.fc1_bias, is_first_microbatch)
        activated = layernorm_mlp._get_act_func_supported_list()[self.activation][0](gate_and_up, None)
        return self.product(activated, self.fc2_weight, self.fc2_bias, is_first_microbatch)


class DotProductAttention(nn.Module):
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_gqa_groups: int,
        softmax_scale: float,
        window_size: tuple[int, int],
        **_: Any,
    ) -> None:
        super().__init__()
        self.groups, self.scale = num_heads // num_gqa_groups, softmax_scale
        self.num_before, _ = window_size  # earlier positions that are attended to, -1 for all

    def forward(self, q: Tensor, k: Tensor, v: Tensor, qkv_format: str, cu_seqlens_q: Tensor, **_: Any) -> Tensor:
        """Return attention [..., heads * d] of q, k, v [tokens, heads, d] if `qkv_format` is "thd", or [B, S, heads, d]
        if it is "bshd". `cu_seqlens_q` are cumulative lengths of documents or, for "bshd", of rows without padding.
        """
        output = torch.zeros(*q.shape[:-2], q.shape[-2] * q.shape[-1], dtype=q.dtype)
        bounds = cu_seqlens_q.tolist()
        for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
            rows: Any = slice(start, stop) if qkv_format == "thd" else (number, slice(0, stop - start))
            heads = [x[rows].transpose(0, 1) for x in (q, k, v)]
            heads[1:] = [x.repeat_interleave(self.groups, dim=0) for x in heads[1:]]
            masks: dict[str, Any] = {"is_causal": True}
            if self.num_before >= 0:
                causal = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
                masks = {"attn_mask": causal.triu(-self.num_before)}
            attended = F.scaled_dot_product_attention(*heads, **masks, scale=self.scale)
            output[rows] = attended.transpose(0, 1).flatten(1)
        return output


def apply_rotary_pos_emb(
    x: Tensor, freqs: Tensor, tensor_format: str, interleaved: bool, cu_seqlens: Tensor | None, **_: Any
) -> Tensor:
    """Return x [tokens, heads, d] or [B, S, heads, d], of which the first r columns are rotated by the angles `freqs`
    [positions, 1, 1, r]. Positions count from 0 in every document or row.
    """
    positions = torch.arange(x.shape[-3])
    if cu_seqlens is not None:
        positions = positions - cu_seqlens[torch.searchsorted(cu_seqlens, positions, right=True) - 1]
    angles = freqs[positions].flatten(1).unsqueeze(1)
    x, rest = x.split((angles.shape[-1], x.shape[-1] - angles.shape[-1]), dim=-1)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = torch.stack((-second, first), dim=-1 if interleaved else -2).flatten(-2)
    rotated = x * angles.cos() + turned * angles.sin()
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def swiglu(gate_and_up: Tensor, quantizer: None) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def geglu(gate_and_up: Tensor, quantizer: None) -> Tensor:
    """Return GEGLU with GELU's tanh approximation, as in the kernel `nvte_geglu`."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


dswiglu, dgeglu = object(), object()  # Transformer Engine's backward functions, which no CPU test calls


class SwiGLU(nn.Module):
    def forward(self, gate_and_up: Tensor) -> Tensor:
        return swiglu(gate_and_up, None)


class GEGLU(nn.Module):
    def forward(self, gate_and_up: Tensor) -> Tensor:
        return geglu(gate_and_up, None)


def activations(recipe: Any = None) -> dict[str, tuple[Any, ...]]:
    """Return {name: (forward, backward, backward with a cast)} of LayerNormMLP's activations. The third is None."""
    return {"geglu": (geglu, dgeglu, None), "swiglu": (swiglu, dswiglu, None)}


def install_modules(monkeypatch: pytest.MonkeyPatch, contents: dict[str, dict[str, Any]]) -> None:
    """Make new modules importable until the test ends. `contents` maps names of modules, a parent before its children,
    to {name: value} of the module's members.
    """
    for name, members in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)  # read by importlib.util.find_spec
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def install_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `transformer_engine` by the classes of this module and allow --use_te on a CPU, until the test ends."""
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {
            **{kind.__name__: kind for kind in (RMSNorm, Linear, LayerNormLinear, LayerNormMLP, DotProductAttention)},
            "checkpoint": torch.utils.checkpoint.checkpoint,
            "ops": SimpleNamespace(SwiGLU=SwiGLU, GEGLU=GEGLU),
        },
        "transformer_engine.pytorch.quantization": {
            "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False)
        },
        "transformer_engine.pytorch.attention": {},
        "transformer_engine.pytorch.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
        "transformer_engine.pytorch.attention.dot_product_attention": {
            "_attention_backends": {f"use_{kind}_attention": kind == "fused" for kind in ("fused", "flash", "unfused")}
        },
        "transformer_engine.pytorch.module": {},
        "transformer_engine.pytorch.module.layernorm_mlp": {"_get_act_func_supported_list": activations},
    }
    install_modules(monkeypatch, contents)
    monkeypatch.setattr("llm_fp8.settle.settle.check_machine", lambda *_, **__: None)
