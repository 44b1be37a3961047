"""What the GPU ran: every CUDA kernel told by its name.

    with record_kernels() as recorded:
        ...one step...
    time_by_class(recorded)   ->   {"gemm": KernelTime(count=387, time_s=0.05, names={...}), "attention": ...}
    gemm_kernels(recorded)    ->   {"fp8": KernelTime(count=384, ...), "bf16": ...}

The names come from profiles of Transformer Engine, PyTorch, torch.compile and torchao on one H200; families that were
not met there (older cuBLAS, cutlass, Hopper's successors, other libraries of Triton kernels) are recognised by the way
their libraries name them. A GEMM whose operand types its name does not tell is "unknown", never something. A kernel
that no rule knows is "other", and may be anything, a GEMM too.

A kernel that does two things has one class. Of Transformer Engine's fused kernels, a norm or activation that writes fp8
counts as norm or activation. torch.compile gives kernels of the same code one name, that of the first, so of the
operations in such a name only those that leave no doubt decide: a norm's rsqrt, an activation's backward pass, and
after these what quantises.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch.profiler import ProfilerActivity, profile

KernelClass = Literal[
    "gemm",
    "attention",
    "cast",
    "norm",
    "activation",
    "rope",
    "loss",
    "optimizer",
    "communication",
    "copy",
    "elementwise",
    "other",
]
"""What a kernel is there for.

gemm: matrix products, and the sums that complete split ones. cast: quantising, its transposes, maxima and scales.
optimizer: also the norm and clipping of the gradients. copy: also setting memory to a value, concatenating, and
changing between floating-point types. elementwise: whatever else PyTorch's own pointwise, reducing and indexing kernels
do.
"""
KERNEL_CLASSES: tuple[KernelClass, ...] = get_args(KernelClass)

GemmKind = Literal["fp4", "fp8", "bf16", "fp16", "fp32", "unknown"]
"""The type of a GEMM's operands (not of its result); fp32 includes TF32, which multiplies fp32 operands."""
LOW_PRECISION: tuple[GemmKind, ...] = ("fp8", "fp4")
"""What the fp8 scenarios multiply in; fp4 is that of nvfp4 alone."""

_GPU = torch.autograd.DeviceType.CUDA

Interval = tuple[float, float]
KernelTimes: TypeAlias = Mapping[str, tuple[int, float]]
"""Kernel name -> how often it ran and for how many seconds in all."""


@dataclass
class KernelTime:
    """Kernels taken together."""

    count: int = 0
    time_s: float = 0.0
    names: dict[str, float] = field(default_factory=dict)
    """Kernel name -> seconds, the longest first."""


def _words(*words: str) -> re.Pattern[str]:
    """Matches names that hold one of these patterns, whatever the case."""
    return re.compile("|".join(words), re.IGNORECASE)


_COMPILED = re.compile(r"^triton_(?:poi|red|per|for|mix|unk)_fused_(?P<operations>.*?)(?:_\d+)?$")
"""A pointwise or reducing kernel of torch.compile; its name lists what was fused."""
_COMPILED_TEMPLATE = re.compile(r"^triton_(?:tem_|mm|bmm|addmm)")
"""A matrix product or attention of torch.compile."""

_GEMM = _words(
    r"gemm", r"nvjet", r"gemv", r"cublaslt", r"splitk", r"matmul", r"^dot_kernel", r"dot_kernel<", r"wgmma_mm"
)
_PARTIAL_SUM = _words(r"splitk\w*reduce", r"reduce_1block_kernel", r"splitk_?reduction")
"""Adds up the parts of a split GEMM: its time belongs to the GEMM, but it is none itself."""

_RULES: tuple[tuple[KernelClass, re.Pattern[str]], ...] = (
    ("communication", _words(r"nccl", r"nvshmem", r"multimem_", r"userbuffers", r"deep_?ep::")),
    ("copy", _words(r"^memcpy", r"^memset")),
    (
        "attention",
        _words(
            r"sdpa",
            r"fmha",
            r"flash",
            r"attn",
            r"attention",
            r"compute_dot_do_o",
            r"convert_dq_to",
            r"qkv_tma_setup",
            r"\bthd_\w*kernel",
            r"convert_(?:thd_to_bshd|bshd_to_thd)",
            r"scaled_\w*softmax",
            r"softmax_warp_(?:for|back)ward<[^>]*?\d, false",
            r"cunn_softmax(?:for|back)ward\w*<[^>]*:softmax(?:for|back)wardepilogue",
        ),
    ),
    ("gemm", _GEMM),
    (
        "optimizer",
        _words(
            r"^_(?:eight_bit_)?update_kernel$", r"adam", r"lpnorm", r"multi_tensor_l2norm", r"optimizer", r"lamb_|lion_"
        ),
    ),
    ("loss", _words(r"cross_entropy", r"nll_loss", r"log_?softmax", r"softmax", r"element_mul_kernel")),
    ("rope", _words(r"rope", r"rotary")),
    ("norm", _words(r"rms_?norm", r"layer_?norm", r"^ln_(tma_)?(fwd|bwd)_", r"cuComputeGradGammaBeta", r"gammabeta")),
    (
        "activation",
        _words(
            r"gated_act",
            r"silu",
            r"swiglu",
            r"gelu",
            r"geglu",
            r"\bd?act_kernel",
            r"_fg_kernel",
            r"_dfg_kernel",
            r"d?swish",
        ),
    ),
    (
        "cast",
        _words(
            r"cast_transpose",
            r"block_scaled_\w*cast",
            r"quantize",
            r"(?<![a-z])transpose_(?:optimized_|\w*)?kernel",
            r"amax",
            r"scale_update",
            r"scale_from",
            r"mxfp8",
            r"nvfp4",
            r"fp4",
            r"fp8",
            r"float8",
            r"hadamard",
            r"swizzle",
            r"transformer_engine::.*identity",
        ),
    ),
    (
        "copy",
        _words(
            r"copy_kernel",
            r"catarray",
            r"chunk_cat",
            r"split_with_sizes_copy",
            r"fillfunctor",
            r"copyfunctor",
            r"batch_memcpy",
        ),
    ),
    ("optimizer", _words(r"multi_tensor_apply")),
    (
        "elementwise",
        _words(r"at::native", r"at_cuda_detail", r"elementwise", r"\bcub::", r"thrust::", r"reduce_\w*kernel"),
    ),
)
"""The first that matches a name decides: attention before GEMMs, since its kernels are built of them, and so on."""

_OPERAND = re.compile(
    r"""(?P<fp4> e2m1 | (?:nv|mx)?fp4 | float4 )
      | (?P<fp8> e4m3 | e5m2 | f(?:loat|p)8 )
      | (?P<bf16> bf16 | bfloat16 )
      | (?P<unknown> f(?:loat|p)?64 | double | complex | (?<![a-z0-9])(?:[su]|u?int)(?:4|8)(?![0-9a-z]) | igemm | [dzc]gemm | i\d+gemm )
      | (?P<fp16> f16 | fp16 | half | hgemm | h\d{3,}gemm )
      | (?P<fp32> tf32 | f32 | fp32 | sgemm(?!_[a-z]*\d+_(?:bf|f)) | float(?![_0-9]) )""",
    re.IGNORECASE | re.VERBOSE,
)
"""The types that a GEMM's name gives; the first of them is an operand's."""
_NVJET = re.compile(r"nvjet_(?:sm\d+[a-z]*_)?(?P<types>[a-z]+)_", re.IGNORECASE)
_NVJET_KINDS: dict[str, GemmKind] = {"q": "fp8", "r": "fp8", "t": "bf16", "h": "fp16", "s": "fp32"}
"""cuBLAS 12 and 13 call their kernels nvjet_[sm<capability>_]<types>_...: q is e4m3, r e5m2, t bf16, h fp16, s fp32,
the operands first.
"""


@functools.cache
def kernel_class(name: str) -> KernelClass:
    """What the kernel of this name is there for."""
    if compiled := _COMPILED.match(name):
        return _class_of_compiled(compiled["operations"])
    if _COMPILED_TEMPLATE.match(name):
        return "attention" if re.search(r"attention|flex|sdpa", name) else "gemm"
    return next((found for found, pattern in _RULES if pattern.search(name)), "other")


def _class_of_compiled(operations: str) -> KernelClass:
    """The class of a fused kernel of torch.compile by the operations in its name, as in '_to_copy_abs_max_mul_silu'."""

    def has(*wanted: str) -> bool:
        return all(re.search(rf"(?:^|_){operation}(?:_|$)", operations) for operation in wanted)

    if has("rsqrt") or (has("div", "expand", "pow") and not has("neg")):
        return "norm"
    if has("silu_backward") or has("gelu_backward"):
        return "activation"
    if has("_scaled_mm") or has("abs", "a?max") or has("clamp", "reciprocal"):
        return "cast"
    if has("_log_softmax") or has("nll_loss(?:_forward|_backward)?") or has("_log_softmax_backward_data"):
        return "loss"
    if has("silu") or has("gelu"):
        return "activation"
    if has("neg", "slice(?:_backward)?"):
        return "rope"
    if has("_foreach_\\w+") or has("sqrt", "lerp"):
        return "optimizer"
    if re.search(r"attention|softmax", operations):
        return "attention"
    words = re.sub(
        r"_unsafe_view|_to_copy|transpose|unsqueeze|clone|view|copy_?|cat|slice|expand|(?<![a-z])t(?![a-z])",
        "",
        operations,
    )
    return "copy" if not words.strip("_") else "elementwise"


def gemm_kind(name: str) -> GemmKind | None:
    """The operand type of a GEMM kernel, "unknown" where its name does not tell; None for any other kernel."""
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
    """Record the CUDA kernels of the enclosed code; what it yields can be read when the block has ended. Waits for
    the GPU at its end.
    """
    with contextlib.ExitStack() as recording:
        with warnings.catch_warnings():
            # Of a recording with several cycles. With acc_events=True, which it advises, every event is made into a
            # Python object at the end.
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            recorded = recording.enter_context(profile(activities=[ProfilerActivity.CUDA]))
        yield recorded
        torch.cuda.synchronize()


def kernel_intervals(recorded: Any) -> list[tuple[str, Interval]]:
    """Name, start and end (seconds since the recording's start) of everything that the GPU ran in a finished
    `torch.profiler.profile`.

    Reads the profiler's own events: what `recorded.events()` makes of them takes longer than the recorded step.
    """
    results = recorded.profiler.kineto_results
    started_ns = results.trace_start_ns()
    return [
        (event.name(), ((event.start_ns() - started_ns) / 1e9, (event.end_ns() - started_ns) / 1e9))
        for event in results.events()
        if event.device_type() == _GPU and not event.is_user_annotation()
    ]


def kernel_times(recorded: Any) -> KernelTimes:
    """Count and seconds of each kernel in a finished `torch.profiler.profile`; a mapping of that kind is given back."""
    if isinstance(recorded, Mapping):
        return recorded
    times: dict[str, tuple[int, float]] = {}
    for name, (start, end) in kernel_intervals(recorded):
        count, time_s = times.get(name, (0, 0.0))
        times[name] = (count + 1, time_s + end - start)
    return times


def time_by_class(recorded: Any) -> dict[KernelClass, KernelTime]:
    """Everything that ran in `recorded` (as in `kernel_times`) by class, the longest first; classes that did not run
    are absent.
    """
    return _grouped((kernel_class(name), name, *counted) for name, counted in kernel_times(recorded).items())


def gemm_kernels(recorded: Any) -> dict[GemmKind, KernelTime]:
    """The GEMM kernels of `recorded` (as in `kernel_times`) by operand type, the longest first; types that did not
    run are absent.
    """
    kinds = ((gemm_kind(name), name, *counted) for name, counted in kernel_times(recorded).items())
    return _grouped(found for found in kinds if found[0] is not None)


def _grouped(kernels: Iterable[tuple[Any, str, int, float]]) -> dict[Any, KernelTime]:
    """Group, name, count and seconds of kernels -> the groups."""
    groups: dict[Any, KernelTime] = {}
    for group, name, count, time_s in sorted(kernels, key=lambda kernel: -kernel[3]):
        taken = groups.setdefault(group, KernelTime())
        taken.count += count
        taken.time_s += time_s
        taken.names[name] = taken.names.get(name, 0.0) + time_s
    return dict(sorted(groups.items(), key=lambda group: -group[1].time_s))
