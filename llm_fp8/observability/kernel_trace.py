"""CUDA kernels that the GPU ran, classified by name.

    with record_kernels() as recorded:
        ...one step...
    times = kernel_times(recorded)
    time_by_class(times)   ->   {"gemm": KernelTime(count=387, time_s=0.05, names={...}), "attention": ...}
    gemm_kernels(times)    ->   {"fp8": KernelTime(count=384, ...), "bf16": ...}

The names come from profiles of PyTorch, torch.compile and the back ends of fp8 on an H200. A GEMM whose name does not
tell its operand types is "unknown"; a kernel that no rule matches is "other", possibly a GEMM. A norm or activation of
TE that writes fp8 is no cast.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

_Model = Literal["gemm", "attention", "cast", "norm", "activation", "rope", "loss"]
KernelClass = Literal[_Model, Literal["optimizer", "communication", "copy", "elementwise", "other"]]
"""cast: quantisation, its transposes, amax and scales. optimizer: also gradient norm and clipping. copy: also fills,
concatenation and casts between floating-point types. elementwise: also what torch.compile fuses."""

GemmKind = Literal["fp4", "fp8", "bf16", "fp16", "fp32", "unknown"]
"""Operand type of a GEMM (not of its result); fp32 includes TF32."""
LOW_PRECISION: tuple[GemmKind, ...] = ("fp8", "fp4")  # of the fp8 recipes

Interval = tuple[float, float]
KernelTimes: TypeAlias = Mapping[str, tuple[int, float]]
"""Kernel name -> number of runs and total seconds."""


@dataclass
class KernelTime:
    count: int = 0
    time_s: float = 0.0
    names: dict[str, float] = field(default_factory=dict)
    """Kernel name -> seconds, the longest first."""


def _names(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


# torch.compile's: pointwise or reducing kernels, named by the fused operations; those that quantise; GEMMs, attention.
_COMPILED = re.compile(r"^triton_(?:poi|red|per|for|mix|unk)_fused_")
_COMPILED_CAST = re.compile(r"_scaled_mm|_abs_(?:\w+_)?max_|_clamp_(?:\w+_)?reciprocal_")
_COMPILED_TEMPLATE = re.compile(r"^triton_(?:tem_|mm|bmm|addmm)")
# Reduces the parts of a split-K GEMM: its time belongs to the GEMM, but it is none itself.
_PARTIAL_SUM = _names(r"splitk\w*reduce|reduce_1block_kernel|splitk_?reduction")

_RULES: tuple[tuple[KernelClass, re.Pattern[str]], ...] = (
    ("communication", _names(r"nccl|nvshmem|multimem_|userbuffers|deep_?ep::")),
    ("copy", _names(r"^memcpy|^memset")),
    (
        "attention",
        _names(
            r"sdpa|fmha|flash|attn|attention|compute_dot_do_o|\bmatmul_d[qkv]\b|convert_dq_to|qkv_tma_setup|"
            r"\bthd_\w*kernel|convert_(?:thd_to_bshd|bshd_to_thd)|scaled_\w*softmax|"
            r"softmax_warp_(?:for|back)ward<[^>]*?\d, false|"
            r"cunn_softmax(?:for|back)ward\w*<[^>]*:softmax(?:for|back)wardepilogue"
        ),
    ),
    ("elementwise", _names(r"prepare_grouped_gemm")),  # lists the matrices for the grouped GEMM that follows
    ("cast", _names(r"rht_gemm")),  # TE's NVFP4 casts, whose Hadamard transform is a GEMM of 16 columns
    ("gemm", _names(r"gemm|nvjet|gemv|cublaslt|splitk|matmul|^dot_kernel|dot_kernel<|wgmma_mm")),
    ("optimizer", _names(r"^_(?:eight_bit_)?update_kernel$|adam|lpnorm|multi_tensor_l2norm|optimizer|lamb_|lion_")),
    ("loss", _names(r"cross_entropy|nll_loss|log_?softmax|softmax|element_mul_kernel")),
    ("rope", _names(r"rope|rotary")),
    ("norm", _names(r"rms_?norm|layer_?norm|^ln_(tma_)?(fwd|bwd)_|cuComputeGradGammaBeta|gammabeta")),
    ("activation", _names(r"gated_act|silu|swiglu|gelu|geglu|\bd?act_kernel|_fg_kernel|_dfg_kernel|d?swish")),
    (
        "cast",
        _names(
            r"cast_transpose|block_scaled_\w*cast|quantize|(?<![a-z])transpose_(?:optimized_|\w*)?kernel|amax|"
            r"scale_update|scale_from|mxfp8|nvfp4|fp4|fp8|float8|hadamard|swizzle|transformer_engine::.*identity"
        ),
    ),
    ("copy", _names(r"copy_kernel|catarray|chunk_cat|split_with_sizes_copy|fillfunctor|copyfunctor|batch_memcpy")),
    ("optimizer", _names(r"multi_tensor_apply")),
    (
        "elementwise",
        _names(r"at::(?:native|cuda)|at_cuda_detail|indexing_backward|elementwise|\bcub::|thrust::|reduce_\w*kernel"),
    ),
)
"""Rules in order; the first match decides. Attention precedes GEMMs, since its kernels are built of them."""

_OPERAND = re.compile(
    r"""(?P<fp4> e2m1 | (?:nv|mx)?fp4 | float4 | ue\dm\dx(?:e2m1|f4) )
      | (?P<fp8> e4m3 | e5m2 | f(?:loat|p)8 | (?<![a-wyz])f8(?!\d) )
      | (?P<bf16> bf16 | bfloat16 )
      | (?P<unknown> f(?:loat|p)?64 | double | complex | (?<![a-z0-9])(?:[su]|u?int)(?:4|8)(?![0-9a-z])
          | igemm | [dzc]gemm | i\d+gemm )
      | (?P<fp16> f16 | fp16 | half | hgemm | h\d{3,}gemm )
      | (?P<fp32> tf32 | f32 | fp32 | sgemm(?!_[a-z]*\d+_(?:bf|f)) | float(?![_0-9]) )""",
    re.IGNORECASE | re.VERBOSE,
)
"""Pattern of types in a GEMM's name; the first match is the operand's type, after its scales' type: ue4m3xf4."""
_NVJET = re.compile(r"nvjet_(?:sm\d+[a-z]*_)?(?P<types>[a-z]+)_", re.IGNORECASE)
_NVJET_KINDS: dict[str, GemmKind] = {"o": "fp4", "q": "fp8", "r": "fp8", "t": "bf16", "h": "fp16", "s": "fp32"}
"""Letters in cuBLAS 12's and 13's nvjet_[sm<capability>_]<types>_..., operands first; q is e4m3 and r e5m2."""


@functools.cache
def kernel_class(name: str) -> KernelClass:
    if _COMPILED.match(name):
        return "cast" if _COMPILED_CAST.search(name) else "elementwise"
    if _COMPILED_TEMPLATE.match(name):
        return "attention" if re.search(r"attention|flex|sdpa", name) else "gemm"
    return next((kind for kind, pattern in _RULES if pattern.search(name)), "other")


def gemm_kind(name: str) -> GemmKind | None:
    """Return the operand type of a GEMM kernel, "unknown" if its name does not tell; None for any other kernel."""
    if kernel_class(name) != "gemm" or _PARTIAL_SUM.search(name):
        return None
    if nvjet := _NVJET.search(name):
        return _NVJET_KINDS.get(nvjet["types"][0].lower(), "unknown")
    if "_scaled_mm" in name:  # torch.compile's, whose operands are fp8
        return "fp8"
    operand = _OPERAND.search(name)
    return operand.lastgroup if operand else "unknown"  # type: ignore[return-value]


@contextlib.contextmanager
def record_kernels() -> Iterator[profile]:
    """Record the CUDA kernels of the enclosed code, which ends with a synchronisation; readable afterwards."""
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        yield recorded
        torch.cuda.synchronize()


def kernel_intervals(recorded: Any) -> list[tuple[str, Interval]]:
    """Return name, start and end (seconds from the start) of the GPU's work in a finished `torch.profiler.profile`."""
    # The profiler's own events: building `recorded.events()` takes longer than the recorded step.
    results = recorded.profiler.kineto_results
    started_ns = results.trace_start_ns()
    return [
        (event.name(), ((event.start_ns() - started_ns) / 1e9, (event.end_ns() - started_ns) / 1e9))
        for event in results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    ]


def kernel_times(recorded: Any) -> KernelTimes:
    """Sum count and seconds of each kernel in a finished `torch.profiler.profile`."""
    times: dict[str, tuple[int, float]] = {}
    for name, (start, end) in kernel_intervals(recorded):
        count, time_s = times.get(name, (0, 0.0))
        times[name] = (count + 1, time_s + end - start)
    return times


def time_by_class(times: KernelTimes) -> dict[KernelClass, KernelTime]:
    """Group all kernels by class, the longest first."""
    return _grouped((kernel_class(name), name, *counted) for name, counted in times.items())


def gemm_kernels(times: KernelTimes) -> dict[GemmKind, KernelTime]:
    """Group the GEMM kernels by operand type, the longest first."""
    kinds = ((gemm_kind(name), name, *counted) for name, counted in times.items())
    return _grouped(kernel for kernel in kinds if kernel[0] is not None)


def _grouped(kernels: Iterable[tuple[Any, str, int, float]]) -> dict[Any, KernelTime]:
    """Sum (group, name, count, seconds) of kernels by group, the longest first."""
    groups: dict[Any, KernelTime] = {}
    for group, name, count, time_s in sorted(kernels, key=lambda kernel: -kernel[3]):
        total = groups.setdefault(group, KernelTime())
        total.count += count
        total.time_s += time_s
        total.names[name] = time_s
    return dict(sorted(groups.items(), key=lambda group: -group[1].time_s))
