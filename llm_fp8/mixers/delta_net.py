"""Gated delta net (Qwen3.5's linear attention; Yang et al. 2024, arXiv:2412.06464), without its linear layers.

Of a token's projections qkv, z, b and a, and for each head of v, with an fp32 state S [d_k, d_v] that is 0 before a
document's first token:

    q, k, v = SiLU(causal convolution of qkv);  q and k are divided by their norms, and q by sqrt(d_k)
    g = -exp(A_log) softplus(a + dt_bias)       beta = sigmoid(b)
    S <- exp(g) S;  S <- S + beta k (v - k^T S)^T
    output = RMSNorm(q^T S) * SiLU(z)

The recurrence runs in chunks of tokens, by flash-linear-attention's kernels (0.6), or by transformers' torch code.
"""

from __future__ import annotations

import functools
import inspect
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from llm_fp8.utils.output import say
from llm_fp8.utils.ranks import LaunchRanks
from llm_fp8.utils.torch_internals import wrap_forward

_CHUNK = 64  # tokens of a document that flash-linear-attention's kernels compute together
SAMPLE = 8192  # tokens with which kernels are timed
_FUNCTIONS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")  # for which transformers prefers optional packages


class DeltaNetSizes(NamedTuple):
    """Sizes of a gated delta net. Each head of q and k serves `num_heads` / `num_key_heads` heads of v."""

    num_key_heads: int
    num_heads: int
    key_head_dim: int
    head_dim: int
    conv_width: int

    @classmethod
    def of(cls, config: Any) -> DeltaNetSizes:
        """Return the sizes in the language model's config."""
        heads = (config.linear_num_key_heads, config.linear_num_value_heads)
        return cls(*heads, config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Numbers of features of q, k and v."""
        key_size = self.num_key_heads * self.key_head_dim
        return key_size, key_size, self.num_heads * self.head_dim

    @property
    def projections(self) -> dict[str, int]:
        """Hugging Face's name of each input projection -> number of its output features."""
        sizes = {"qkv": sum(self.qkv_sizes), "z": self.qkv_sizes[2], "b": self.num_heads, "a": self.num_heads}
        return {f"in_proj_{name}": size for name, size in sizes.items()}

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name of each parameter outside linear layers -> its shape."""
        conv = (self.projections["in_proj_qkv"], 1, self.conv_width)
        heads = (self.num_heads,)
        return {"dt_bias": heads, "A_log": heads, "conv1d.weight": conv, "norm.weight": (self.head_dim,)}

    @property
    def saved_bytes(self) -> int:
        """Bytes per token that a bf16 net saves for the backward pass with flash-linear-attention's kernels, without
        the input of the output projection. Read from version 0.6's Python code:

            causal_conv1d           bf16: the projections' joint output, of which its input is a view
            chunk_gated_delta_rule  bf16: normalised q and k, copies of v and beta, the inverse A [heads, 64]
                                    fp32: reciprocal norms of q and k, sums of g in chunks
            rms_norm_gated          bf16: its input and a copy of z; fp32: reciprocal norms
            g in torch              fp32: input and output of softplus
        """
        q, k, v = self.qkv_sizes
        bf16 = sum(self.projections.values()) + q + k + 3 * v + (_CHUNK + 1) * self.num_heads
        fp32 = 2 * self.num_key_heads + 4 * self.num_heads
        return 2 * bf16 + 4 * fp32

    @property
    def backward_bytes(self) -> int:
        """Bytes per token by which memory grows from the backward pass of the output projection to the peak in that of
        chunk_gated_delta_rule. With both, Qwen3.5-4B's estimated peaks are within 0.1% of those measured.

        In bf16 there are w, dw and dk for the heads of v, the states before chunks and their gradients (more for unused
        `chunks`, in CUDA graphs up to 1 GiB), gradients of q and k (k twice), and six tensors of the size of v: u,
        updated v, dv twice, gradients of z and the output. The norm's input and gate (2 v) are freed, 6 per head stay.
        """
        q, k, v = self.qkv_sizes
        w = self.num_heads * self.key_head_dim
        return 2 * (3 * w + 2 * w * self.head_dim // _CHUNK + q + 2 * k + (6 - 2) * v) + 6 * self.num_heads

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split `qkv` [B, S, size] into views q, k [B, S, key heads, d_k] and v [B, S, heads, d_v]."""
        q, k, v = qkv.split(self.qkv_sizes, dim=-1)
        dims = (self.key_head_dim, self.key_head_dim, self.head_dim)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in zip((q, k, v), dims, strict=True))
        return q, k, v


class _Columns(nn.Module):
    """In place of a projection: returns its columns of the projections' joint output."""

    def __init__(self, start: int, size: int) -> None:
        super().__init__()
        self.start, self.size = start, size

    def forward(self, fused: Tensor) -> Tensor:
        return fused.narrow(-1, self.start, self.size)


class DeltaNet(modeling_qwen3_5.Qwen3_5GatedDeltaNet):
    """Hugging Face's module without linear layers: input are the outputs of its projections, side by side."""

    def __init__(
        self, sizes: DeltaNetSizes, norm_eps: float, layer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        config: Any = Qwen3_5TextConfig(
            linear_num_key_heads=sizes.num_key_heads,
            linear_num_value_heads=sizes.num_heads,
            linear_key_head_dim=sizes.key_head_dim,
            linear_value_head_dim=sizes.head_dim,
            linear_conv_kernel_dim=sizes.conv_width,
            rms_norm_eps=norm_eps,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        )
        with torch.device("meta"):
            super().__init__(config, 0)
        self.layer_idx, self.sizes = layer, sizes
        start = 0
        for name, size in sizes.projections.items():
            setattr(self, name, _Columns(start, size))
            start += size
        self.out_proj = nn.Identity()  # type: ignore[assignment]
        self.to(dtype).to_empty(device=device)

    def forward(
        self, fused: Tensor, cu_seqlens: Tensor | None = None, mask: Tensor | None = None, cache: Any = None
    ) -> Tensor:
        """Return the input [B, S, heads * d] of the output projection for `fused` [B, S, sum of projections].

        With `cu_seqlens` int32 [n + 1], each document begins with an empty state: a row if n == B, else B is 1 and
        documents are packed. Without, Hugging Face's code runs, with its padding `mask` [B, S] and cache.
        """
        if cu_seqlens is None:
            context: Tensor = super().forward(fused, cache, mask)
            return context
        bounds = cu_seqlens if len(cu_seqlens) - 1 != len(fused) else None
        qkv, z, b, a = fused.split(list(self.sizes.projections.values()), dim=-1)
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        usable = problem_of_kernels(self.sizes, fused.device, fused.dtype) is None
        mix = mix_by_kernels if usable else mix_by_torch
        return mix(self, qkv, z.unflatten(-1, (-1, self.sizes.head_dim)), g, b.sigmoid(), bounds).flatten(2)


def mix_by_torch(net: DeltaNet, qkv: Tensor, z: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the output of the net's gated norm [B, S, heads, d], in the dtype of `qkv`, by transformers' torch code.

    Args:
        qkv: [B, S, size], the convolution's input.
        z: [B, S, heads, d], the gate of the norm.
        g: fp32 [B, S, heads], the logarithm of the state's decay.
        beta: [B, S, heads], the fraction of the state's prediction that v replaces.
        cu_seqlens: int32 [n + 1], starts of packed documents and S, with B = 1. None if each row is a document.
    """
    sizes, weight = net.sizes, net.conv1d.weight
    delta_rule = inspect.unwrap(modeling_qwen3_5.torch_chunk_gated_delta_rule)
    lengths = [qkv.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    documents = zip(*(tensor.split(lengths, dim=1) for tensor in (qkv, g, beta)), strict=True)
    outputs = []
    for inputs, decay, step in documents:
        if (length := inputs.shape[1]) == 0:
            continue
        columns, padding = inputs.transpose(1, 2), sizes.conv_width - 1
        mixed = F.conv1d(columns, weight, padding=padding, groups=len(weight))[..., :length]
        q, k, v = sizes.heads(F.silu(mixed).transpose(1, 2))
        q, k = (x.repeat_interleave(sizes.num_heads // sizes.num_key_heads, dim=2) for x in (q, k))
        outputs.append(delta_rule(q, k, v, g=decay, beta=step, use_qk_l2norm_in_kernel=True)[0])
    normed: Tensor = net.norm(torch.cat(outputs, dim=1), z)
    return normed


def mix_by_kernels(net: DeltaNet, qkv: Tensor, z: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the result of `mix_by_torch` with flash-linear-attention's kernels."""
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    packed = {} if cu_seqlens is None else chunks(cu_seqlens, qkv.shape[1])
    mixed, _ = causal_conv1d(qkv, net.conv1d.weight.squeeze(1), activation="silu", **packed)
    q, k, v = net.sizes.heads(mixed)
    output, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **packed)
    normed: Tensor = rms_norm_gated(output, z, net.norm.weight, None, eps=net.norm.variance_epsilon)
    return normed


def chunks(cu_seqlens: Tensor, num_tokens: int) -> dict[str, Tensor]:
    """Return what flash-linear-attention's kernels need of n packed documents with bounds `cu_seqlens` int32 [n + 1]:
    the bounds with an empty document at the end, and int32 [num_tokens // 64 + n, 2] each chunk's document and its
    place therein. That is the largest number of chunks. Unused ones are the empty document's, for which kernels store
    nothing. The package itself would wait for the GPU to count chunks, and cache them though CUDA graphs change bounds.
    """
    bounds = torch.cat([cu_seqlens, cu_seqlens[-1:]])
    counts = (bounds.diff() + _CHUNK - 1) // _CHUNK
    ends = counts.cumsum(0)
    number = torch.arange(num_tokens // _CHUNK + len(cu_seqlens) - 1, device=bounds.device)
    document = torch.searchsorted(ends, number, right=True).clamp_max(len(counts) - 1)
    place = number - (ends - counts)[document]
    return {"cu_seqlens": bounds, "chunk_indices": torch.stack([document, place], dim=1).to(bounds.dtype)}


@functools.cache
def problem_of_kernels(sizes: DeltaNetSizes, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why flash-linear-attention cannot compute in `dtype` on `device`, or None if it can.

    Two documents run forward and backward, since the package refuses some pairs of GPU and Triton. Triton then compiles
    the kernels in all their variants, which a line says, and keeps the fastest. Most kernels keep it for inputs of any
    length, so the documents are as long as a micro-batch. The kernels for fp32 are not used, as they round to TF32.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return f"it has no exact kernels for {str(dtype).removeprefix('torch.')} on {device.type}"
    os.environ.setdefault("FLA_FLASH_QLA", "0")  # a package that would ignore `chunk_indices`
    net = DeltaNet(sizes, 1e-6, 0, dtype, device)
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    like: dict[str, Any] = {"dtype": dtype, "device": device, "requires_grad": True}
    qkv = torch.ones(1, SAMPLE, sum(sizes.qkv_sizes), **like)
    z = torch.ones(1, SAMPLE, sizes.num_heads, sizes.head_dim, **like)
    g, beta = (torch.zeros(1, SAMPLE, sizes.num_heads, **like | {"dtype": kind}) for kind in (torch.float32, dtype))
    try:
        import fla  # noqa: F401  # if it is missing, there is nothing to compile

        compile_variants_in_threads()
        with torch.enable_grad():
            cu_seqlens = torch.tensor([0, 5000, SAMPLE], dtype=torch.int32, device=device)
            mix_by_kernels(net, qkv, z, g, beta, cu_seqlens).sum().backward()
    except Exception as error:  # missing, too old or new, or a failure of Triton: each has its own class
        return " ".join(str(error).split()) or type(error).__name__
    return None


@functools.cache
def compile_variants_in_threads() -> None:
    """From now on let Triton compile all variants of a kernel in threads before it times them. Print why it waits."""
    from triton import AsyncCompileMode  # of Triton 3.6 and 3.7
    from triton.runtime.autotuner import Autotuner

    if LaunchRanks.from_environment(os.environ).rank == 0:
        say("gated delta rule: Triton compiles and times its kernels, on a new machine for a minute or more")
    prune = Autotuner.prune_configs

    def prune_and_compile(self: Any, arguments: dict[str, Any]) -> list[Any]:
        variants: list[Any] = prune(self, arguments)
        with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for variant in variants:
                self.fn.run(*self.nargs.values(), **{**arguments, **variant.all_kwargs(), "warmup": True})
        return variants

    Autotuner.prune_configs = prune_and_compile


def describe_kernels(problem: str | None) -> str:
    """Return a line to print when a run starts: the code that computes the gated delta rule, and why."""
    if problem is None:
        return "gated delta rule: flash-linear-attention's kernels"
    slow = "several times slower than flash-linear-attention's kernels"
    return f"WARNING: the gated delta rule falls back to transformers' torch code, which is {slow}: {problem}"


def separate_documents(model: nn.Module, cu_seqlens: Tensor) -> None:
    """Make Hugging Face's gated delta nets compute packed [1, S, h] by document, with kernels where `DeltaNet` does."""
    lengths = cu_seqlens.diff().tolist()

    def by_document(sizes: DeltaNetSizes, forward: Any, hidden_states: Tensor, **arguments: Any) -> Any:
        if problem_of_kernels(sizes, hidden_states.device, hidden_states.dtype) is not None:
            with _torch_code():
                return torch.cat([forward(part, **arguments) for part in hidden_states.split(lengths, 1)], dim=1)
        convolve = modeling_qwen3_5.causal_conv1d_fn

        def convolve_by_document(columns: Tensor, *weights: Any, **options: Any) -> Tensor:
            return torch.cat([convolve(part, *weights, **options) for part in columns.split(lengths, -1)], dim=-1)

        # The delta rule's kernels take the documents together; for single ones Triton would compile other variants.
        with patch.object(modeling_qwen3_5, "causal_conv1d_fn", convolve_by_document):
            return forward(hidden_states, cu_seq_lens_q=cu_seqlens, **arguments)

    for net in model.modules():
        if isinstance(net, modeling_qwen3_5.Qwen3_5GatedDeltaNet):
            heads = (net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim)
            wrap_forward(net, functools.partial(by_document, DeltaNetSizes(*heads, net.conv_kernel_size)))


def _torch_code() -> Any:
    """Return a context in which Hugging Face's gated delta nets run torch code, even if kernels are installed."""
    return patch.multiple(modeling_qwen3_5, **{n: inspect.unwrap(getattr(modeling_qwen3_5, n)) for n in _FUNCTIONS})
