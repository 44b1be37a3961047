"""Record a step's CUDA kernels, classify them by name, and measure how long the GPU communicates and how long it idles.

    with profiled() as profile:
        ...one step...
    time_by_class(profile.kernels)   ->   {"gemm": KernelTime(count=387, time_s=0.05, names={...}), "attention": ...}
    gemm_kernels(profile.kernels)    ->   {"fp8": KernelTime(count=384, ...), "bf16": ...}

The names come from profiles of PyTorch, torch.compile and the fp8 back ends on an H200, and from the sources of
flash-linear-attention (0.6), causal-conv1d and mamba-ssm. A GEMM whose name does not show its operand types is
"unknown". A kernel that no rule matches is "other". It may be a GEMM in fp8, unless its name shows only wider types
(`unrecognised_kernels`). TE's norms and activations that write fp8 are not casts. NCCL's kernels include waiting.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

from llm_fp8.observability.metrics import throughput_summary

_Model = Literal["gemm", "attention", "linear_attention", "cast", "norm", "activation", "rope", "loss"]
KernelClass = Literal[_Model, Literal["optimizer", "communication", "copy", "elementwise", "solver", "other"]]
"""cast includes quantisation with its transposes, amax and scales. optimizer includes gradient norm and clipping. copy
includes fills, concatenation and casts between floating-point types. elementwise includes what torch.compile fuses.
linear_attention includes the convolutions and gates of its layers. solver means solving and factorising matrices."""

GemmKind = Literal["fp4", "fp8", "bf16", "fp16", "fp32", "other", "unknown"]
"""Type of a GEMM's operands, not of its result. fp32 includes TF32. other: fp64, complex numbers or integers."""
LOW_PRECISION: tuple[GemmKind, ...] = ("fp8", "fp4")  # operand types of the fp8 recipes
MIN_REPORTED_IDLE = 0.2  # smallest share of a step that a run reports

Interval = tuple[float, float]
KernelTimes: TypeAlias = Mapping[str, tuple[int, float]]
"""Kernel name -> number of launches and their total time in s."""


@dataclass
class KernelTime:
    count: int = 0
    time_s: float = 0.0
    names: dict[str, float] = field(default_factory=dict)
    """Kernel name -> time in s, the longest first."""


# Kernels that sum the parts of a split-K GEMM. Their time is GEMM time, but they do not count as GEMMs.
_PARTIAL_SUM = re.compile(r"splitk\w*reduce|reduce_1block_kernel|splitk_?reduction", re.IGNORECASE)

_COMPILED = r"^triton_(?:poi|red|per|for|mix|unk)_fused(?=_)"  # torch.compile names a kernel by the fused operations
_COMPILED_TEMPLATE = r"^triton_(?:tem_|mm|bmm|addmm)"
_RULES: tuple[tuple[KernelClass, str], ...] = (
    ("cast", rf"{_COMPILED}.*(?:_scaled_mm|_abs_(?:\w+_)?max_|_clamp_(?:\w+_)?reciprocal_)"),
    ("elementwise", _COMPILED),
    ("attention", rf"{_COMPILED_TEMPLATE}.*(?:attention|flex|sdpa)"),
    ("gemm", _COMPILED_TEMPLATE),
    (
        "gemm",
        r"^(?!.*(?:quant|cast|rht_|swizzle))(?=.*(?:e[45]m[23]|fp8|float8)).*(?:gemm|(?<!scaled)_mm(?:\b|_)|linear)",
    ),
    ("communication", r"nccl|nvshmem|multimem_|userbuffers|deep_?ep::"),
    ("copy", r"^memcpy|^memset"),
    (
        "attention",
        r"sdpa|fmha|flash|attn|attention|compute_dot_do_o|\bmatmul_d[qkv]\b|convert_dq_to|qkv_tma_setup|"
        r"\bthd_\w*kernel|convert_(?:thd_to_bshd|bshd_to_thd)|scaled_\w*softmax|"
        r"softmax_warp_(?:for|back)ward<[^>]*?\d, false|"
        r"cunn_softmax(?:for|back)ward\w*<[^>]*:softmax(?:for|back)wardepilogue",
    ),
    (
        "linear_attention",
        r"^(?:chunk|fused_recurrent|fused_chunk|parallel)_\w+|^recompute_w_u_|^prepare_\w*wy_repr|^solve_tril_|"
        r"^merge_16x16_to_|^(?:gdn|kda)_gate_|^fused_beta_sigmoid_|causal_conv1d|selective_scan|"
        r"^_(?:bmm_)?(?:chunk|state)_\w+_kernel$",
    ),
    ("solver", r"trsm|trsv|cusolver|magma|(?<![a-z])(?:getr[fs]|potr[fs]|geqrf)"),
    ("elementwise", r"prepare_grouped_gemm"),  # lists the matrices for the grouped GEMM that follows
    ("elementwise", r"^_bmm_outer_product_kernel$"),  # torch 2.13's bmm over one column, without tensor cores
    ("cast", r"rht_gemm"),  # TE's NVFP4 casts, whose Hadamard transform is a GEMM of 16 columns
    ("gemm", r"gemm|nvjet|gemv|cublaslt|splitk|matmul|^dot_kernel|dot_kernel<|wgmma_mm"),
    ("optimizer", r"^_(?:eight_bit_)?update_kernel$|adam|lpnorm|multi_tensor_l2norm|optimizer|lamb_|lion_"),
    ("loss", r"cross_entropy|nll_loss|log_?softmax|softmax|element_mul_kernel"),
    ("rope", r"rope|rotary"),
    ("norm", r"rms_?norm|^l2norm_|layer_?norm|^ln_(tma_)?(fwd|bwd)_|cuComputeGradGammaBeta|gammabeta"),
    ("activation", r"gated_act|silu|swiglu|gelu|geglu|\bd?act_kernel|_fg_kernel|_dfg_kernel|d?swish"),
    (
        "cast",
        r"cast_transpose|block_scaled_\w*cast|quantize|(?<![a-z])transpose_(?:optimized_|\w*)?kernel|amax|"
        r"scale_update|scale_from|mxfp8|nvfp4|fp4|fp8|float8|hadamard|swizzle|transformer_engine::.*identity",
    ),
    ("copy", r"copy_kernel|catarray|chunk_cat|split_with_sizes_copy|fillfunctor|copyfunctor|batch_memcpy"),
    ("optimizer", r"multi_tensor_apply"),
    (
        "elementwise",
        r"at::(?:native|cuda)|at_cuda_detail|indexing_backward|elementwise|\bcub::|thrust::|reduce_\w*kernel",
    ),
)
"""Case-insensitive patterns. The first match decides. Attention precedes GEMM, since its kernels contain GEMMs."""

_OPERAND = re.compile(
    r"""(?P<fp4> e2m1 | (?:nv|mx)?fp4 | float4 | ue\dm\dx(?:e2m1|f4) )
      | (?P<fp8> e4m3 | e5m2 | f(?:loat|p)8 | (?<![a-wyz])f8(?!\d) )
      | (?P<bf16> bf16 | bfloat16 )
      | (?P<other> f(?:loat|p)?64 | double | complex | (?<![a-z0-9])(?:[su]|u?int)(?:4|8)(?![0-9a-z])
          | igemm | [dzc]\d*gemm | i\d+gemm )
      | (?P<fp16> f16 | fp16 | half | hgemm | h\d{3,}gemm )
      | (?P<fp32> tf32 | f32 | fp32 | sgemm(?!_[a-z]*\d+_(?:bf|f)) | float(?![_0-9]) )""",
    re.IGNORECASE | re.VERBOSE,
)
"""The first match in a GEMM's name is its operand type. The type of the scales may precede it, as in ue4m3xf4."""
_NVJET = re.compile(r"nvjet_(?:sm\d+[a-z]*_)?(?P<types>[a-z]+)_", re.IGNORECASE)
_NVJET_KINDS: dict[str, GemmKind] = {"o": "fp4", "q": "fp8", "r": "fp8", "t": "bf16", "h": "fp16", "s": "fp32"}
"""First letter of <types> in nvjet_[sm<capability>_]<types>_... (cuBLAS 12, 13) -> operand type. q: e4m3, r: e5m2."""


LOW_PRECISION_NAME = re.compile(r"e4m3|e5m2|e2m1|nvfp4|mxfp4", re.IGNORECASE)
"""Matches a kernel of any class that reads or writes fp8 or fp4. TE's namespace fp8 has kernels for bf16 too."""


@functools.cache
def kernel_class(name: str) -> KernelClass:
    return next((kind for kind, pattern in _RULES if re.search(pattern, name, re.IGNORECASE)), "other")


def gemm_kind(name: str) -> GemmKind | None:
    """Return the operand type of a GEMM kernel ("unknown" if `name` does not show it), or None for any other kernel."""
    if kernel_class(name) != "gemm" or _PARTIAL_SUM.search(name):
        return None
    if nvjet := _NVJET.search(name):
        return _NVJET_KINDS.get(nvjet["types"][0].lower(), "unknown")
    if "_scaled_mm" in name:  # torch.compile's name of an fp8 GEMM
        return "fp8"
    # CUTLASS names the result's type first, before "gemm_". Words like "double-buffered" show no type.
    operands = [*_OPERAND.finditer(name.partition("gemm_")[2]), *_OPERAND.finditer(name)]
    kinds: list[Any] = sorted((operand.lastgroup for operand in operands), key=lambda kind: kind == "other")
    return kinds[0] if kinds else "unknown"


@contextlib.contextmanager
def record_kernels() -> Iterator[profile]:
    """Record the CUDA kernels of the block and wait until they end. The profile is complete after the block."""
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        yield recorded
        torch.cuda.synchronize()


def kernel_intervals(recorded: Any) -> list[tuple[str, Interval]]:
    """Return (name, (start, end)) of each kernel and memory copy in a finished profile, in s since recording began."""
    # Read the profiler's raw events: building `recorded.events()` takes longer than the recorded step.
    results = recorded.profiler.kineto_results
    started_ns = results.trace_start_ns()
    return [
        (event.name(), ((event.start_ns() - started_ns) / 1e9, (event.end_ns() - started_ns) / 1e9))
        for event in results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and not event.is_user_annotation()
    ]


def kernel_times(recorded: Any) -> KernelTimes:
    """Return the count and the total time of each kernel in `recorded`, a finished `torch.profiler.profile`."""
    times: dict[str, tuple[int, float]] = {}
    for name, (start, end) in kernel_intervals(recorded):
        count, time_s = times.get(name, (0, 0.0))
        times[name] = (count + 1, time_s + end - start)
    return times


def time_by_class(times: KernelTimes) -> dict[KernelClass, KernelTime]:
    """Sum count and time of all kernels by class. The class with the longest time comes first."""
    return _grouped(times, kernel_class)


def gemm_kernels(times: KernelTimes) -> dict[GemmKind, KernelTime]:
    """Sum count and time of the GEMM kernels by operand type. The type with the longest time comes first."""
    return _grouped(times, gemm_kind)


def unrecognised_kernels(times: KernelTimes) -> KernelTime:
    """Sum count and time of the kernels that match no rule, except those whose names show only types wider than fp8."""

    def group(name: str) -> Literal["other"] | None:
        shown = {str(operand.lastgroup) for operand in _OPERAND.finditer(name)}
        # An 8-bit integer may hold fp8, and the type in a GEMM's name may be that of its result.
        may_be_gemm = re.search(r"gemm|mm_|linear|matmul|char|int8", name, re.IGNORECASE)
        is_wider = bool(shown) and shown.isdisjoint(LOW_PRECISION) and not may_be_gemm
        return "other" if kernel_class(name) == "other" and not is_wider else None

    return _grouped(times, group).get("other", KernelTime())


def attention_library(kernels: KernelTimes) -> str:
    """Return the library whose kernel took the most time in torch's SDPA, or 'math' if no attention kernel ran."""
    attention = time_by_class(kernels).get("attention")
    if attention is None:
        return "math"
    longest = next(iter(attention.names)).lower()
    libraries = {"cudnn": "cuDNN", "flash": "flash", "fmha_cutlass": "memory-efficient"}
    return next((name for part, name in libraries.items() if part in longest), "an unknown library")


def _grouped(times: KernelTimes, group_of: Callable[[str], Any]) -> dict[Any, KernelTime]:
    """Sum count and time of kernels by `group_of(name)`. Skip the group None. The longest total time comes first."""
    groups: dict[Any, KernelTime] = {}
    for name, (count, time_s) in sorted(times.items(), key=lambda kernel: -kernel[1][1]):
        if (group := group_of(name)) is not None:
            total = groups.setdefault(group, KernelTime())
            total.count += count
            total.time_s += time_s
            total.names[name] = time_s
    return dict(sorted(groups.items(), key=lambda group: -group[1].time_s))


def covered_s(intervals: Iterable[Interval]) -> float:
    """Return how many seconds the intervals cover. Time in which several of them overlap counts once."""
    total_s, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total_s += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total_s


@dataclass
class StepProfile:
    """The work of the GPU in one step. `profiled` sets the fields when its block ends."""

    span_s: float = 0.0  # from the first kernel's start to the last one's end
    communication_s: float = 0.0  # time in which communication kernels ran
    exposed_communication_s: float = 0.0  # the part of communication_s in which no other kernel ran
    work_s: float = 0.0  # time in which kernels other than communication ran
    kernels: KernelTimes = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """Return the step's metrics by key of metrics.jsonl. Omit shares of GEMMs or communication if none ran."""
        gemms = gemm_kernels(self.kernels)
        in_fp8 = [times for kind, times in gemms.items() if kind in LOW_PRECISION]
        figures: dict[str, float] = {
            "num_gemm_kernels": sum(times.count for times in gemms.values()),
            "num_fp8_gemm_kernels": sum(times.count for times in in_fp8),
            "num_unknown_gemm_kernels": gemms["unknown"].count if "unknown" in gemms else 0,
        }
        if gemms:
            time_s = sum(times.time_s for times in gemms.values())
            figures["fp8_gemm_time_share"] = sum(times.time_s for times in in_fp8) / time_s
        if self.communication_s:
            figures["communication_share"] = self.communication_s / self.span_s
            figures["exposed_communication_share"] = self.exposed_communication_s / self.span_s
        return figures

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values for summary.json. In `time_s_by_class`, overlapping kernels all count in full."""
        return {
            **{name: value for name, value in vars(self).items() if name != "kernels"},
            "gemm_kernels": {kind: times.count for kind, times in gemm_kernels(self.kernels).items()},
            "time_s_by_class": {name: times.time_s for name, times in time_by_class(self.kernels).items()},
        }

    def gpu_idle(self, steps: list[dict[str, Any]]) -> dict[str, float] | None:
        """Return the entry `gpu_idle` of summary.json, or None if no kernel was recorded or no step was measured.

        `work_s` is the time in which kernels other than communication ran in the recorded step. Recording slows the
        host, so `step_time_s` is the median of unrecorded `steps`. `share` is 1 - work_s / step_time_s, but at least 0.
        `gemm_share` is the time of GEMM kernels / step_time_s: the speed as a share of that of the GEMMs alone.
        """
        step_time_s = throughput_summary(steps).get("median_step_time_s")
        if not self.work_s or not step_time_s:
            return None
        share = max(0.0, 1 - self.work_s / step_time_s)
        gemm_s = sum(times.time_s for times in gemm_kernels(self.kernels).values())
        return {"work_s": self.work_s, "step_time_s": step_time_s, "share": share, "gemm_share": gemm_s / step_time_s}


@contextlib.contextmanager
def profiled(trace: Path | None = None) -> Iterator[StepProfile]:
    """Record the CUDA kernels of the step in the block. Write them to the file `trace`, if set, as a Chrome trace."""
    result = StepProfile()
    torch.cuda.synchronize()
    with record_kernels() as recorded:
        yield result
    if trace is not None:
        recorded.export_chrome_trace(str(trace))
    intervals = kernel_intervals(recorded)
    spans = [span for _, span in intervals]
    if spans:
        result.span_s = max(end for _, end in spans) - min(start for start, _ in spans)
    result.communication_s = covered_s(span for name, span in intervals if kernel_class(name) == "communication")
    result.work_s = covered_s(span for name, span in intervals if kernel_class(name) != "communication")
    result.exposed_communication_s = covered_s(spans) - result.work_s
    result.kernels = kernel_times(recorded)


def describe_gpu_idle(idle: dict[str, Any] | None, mode: str) -> str | None:
    """Return advice if `idle`, from `gpu_idle`, shows much idle time, else None. `mode` is the sharding mode."""
    if idle is None or idle["share"] < MIN_REPORTED_IDLE:
        return None
    sharding = "" if mode in ("single", "ddp") else ", or try --sharding_mode fsdp_grad or ddp"
    share = f"the GPU computes nothing during {idle['share']:.0%} of a step, which fp8 cannot shorten"
    return f"{share}: raise --batch_size or --max_seq_length, or recompute less{sharding}"
