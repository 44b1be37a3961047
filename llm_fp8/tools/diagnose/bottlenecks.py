"""Where the time of an optimizer step goes, what costs most, and the option that acts on it.

Recording slows the host and not the kernels. So kernels are those of a recorded step, and gaps are what unrecorded
steps take beyond them.

A bottleneck is the time that its option can save at most. Fused attention, which no option acts on, and lm_head's
GEMMs, whose option changes what is computed, are none. Times are compared with two rates:

    lower bounds     model FLOPs at the vendor's dense peak of the operands' type, or at the measured rate where cards
                     clock beyond the data sheet; none for a GPU whose peak is not known
    measured rates   what large GEMMs reach on this GPU without a pause (llm_fp8/tools/gemm_rates.py). GEMMs with other
                     work between them can be faster: a GPU at its power limit lowers its clocks

Memory-bound work is compared with the measured copy bandwidth, bytes read plus bytes written:

    weight casts                 per fp8 weight 2 bytes read (bf16), 1 written as it is and 1 transposed
    optimizer                    weights and optimizer state read and written, gradients read
    main-gradient accumulation   from the second micro-batch on two gradients read and one written, but for those that
                                 wgrad GEMMs accumulate
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llm_fp8.config.recipes import RECIPES
from llm_fp8.observability.kernel_trace import KernelTime, gemm_kernels, kernel_intervals, kernel_times, time_by_class
from llm_fp8.observability.metrics import PeakTflops
from llm_fp8.observability.step_profile import covered, length
from llm_fp8.tools.gemm_rates import MeasuredRates

_FUSED_ATTENTION = re.compile(r"flash|fmha|sdpa", re.IGNORECASE)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    step_s: float
    """Of the median step that was not recorded."""
    recorded_span_s: float
    """From the first kernel's start to the last one's end, in the recorded step."""
    busy_s: float
    """In which at least one kernel of the recorded step ran."""
    classes: dict[str, KernelTime]
    """By kernel class, the longest first."""
    gemms: dict[str, KernelTime]
    """The GEMMs by the type of their operands."""

    @property
    def gap_s(self) -> float:
        """GPU idle in an unrecorded step; 0 where the recorded step's kernels alone took longer."""
        return max(0.0, self.step_s - self.busy_s)

    @property
    def overlap_s(self) -> float:
        """Concurrent kernels, counted twice by `classes`: classes + gaps - overlap = step, where there are gaps."""
        return sum(taken.time_s for taken in self.classes.values()) - self.busy_s

    def class_s(self, *names: str) -> float:
        return sum(self.classes[name].time_s for name in names if name in self.classes)

    def names(self, kernel_class: str) -> dict[str, float]:
        """Kernel name -> seconds."""
        return self.classes.get(kernel_class, KernelTime()).names

    @property
    def has_fused_attention(self) -> bool:
        """Whether a kernel that computes attention as one ran: cuDNN's, flash-attn's or torch's own."""
        return any(map(_FUSED_ATTENTION.search, self.names("attention")))


def step_time(recorded: Any, step_s: float) -> StepTime:
    """The times in a `torch.profiler.profile` of one step; `step_s`: of unrecorded ones. ValueError if it is empty."""
    intervals = [interval for _, interval in kernel_intervals(recorded)]
    if not intervals:
        raise ValueError("the recorded step holds no GPU kernel")
    union = covered(intervals)
    times = kernel_times(recorded)
    return StepTime(
        step_s=step_s,
        recorded_span_s=union[-1][1] - union[0][0],
        busy_s=length(union),
        classes={str(name): taken for name, taken in time_by_class(times).items()},
        gemms={str(name): taken for name, taken in gemm_kernels(times).items()},
    )


@dataclass(frozen=True)
class StepMeasurements:
    """What bottlenecks are found from. Weights are counts of elements."""

    time: StepTime
    rates: MeasuredRates
    peak: PeakTflops | None
    """Of the vendor; None for a GPU that is not in the table."""
    num_fp8_weights: int
    num_bf16_weights: int
    """Linear weights of the decoder layers that are not in fp8."""
    num_head_weights: int
    """Of lm_head, whatever it computes in."""
    num_tokens: int
    """Of the step, padding included."""
    num_micro_batches: int
    attention_flops: float
    """Model FLOPs of the step's attention."""
    recomputed_share: float
    """Share of the decoder layers whose forward pass is recomputed."""
    weight_bytes: int
    gradient_bytes: int
    added_gradient_bytes: int
    """Of these, all that wgrad GEMMs do not accumulate (`llm_fp8.distributed.wgrad_fusion`)."""
    optimizer_bytes: int
    scenario: str | None
    """The fp8 recipe that runs; None outside fp8."""
    use_te: bool
    attention: str | None
    """'unfused', or the name of what runs."""
    compiled: bool = False
    """The decoder layers are compiled, as under torchao."""

    @property
    def _has_fp8_peak(self) -> bool:
        return self.scenario not in RECIPES or RECIPES[self.scenario].has_fp8_peak

    def fp8_gemm_s(self, flops: float) -> float | None:
        """Seconds of these model FLOPs at the fp8 rates; None where they were not measured, and for fp4."""
        return self.rates.fp8_gemm_s(flops) if self._has_fp8_peak else None

    def copy_s(self, num_bytes: float) -> float:
        return num_bytes / self.rates.copy_tb_s / 1e12

    def linear_flops(self, num_weights: int) -> float:
        """Model FLOPs of a step in layers with so many weights: 6 per weight and token."""
        return 6.0 * num_weights * self.num_tokens

    @property
    def head_gemm_s(self) -> float | None:
        """Seconds of lm_head's model FLOPs at the measured rates."""
        return self.rates.bf16_gemm_s(self.linear_flops(self.num_head_weights))

    @property
    def gemms_at_measured_rates_s(self) -> float | None:
        """Seconds of the linear layers' model FLOPs at the measured rates; None where one of these is not known."""
        fp8_s = self.fp8_gemm_s(self.linear_flops(self.num_fp8_weights)) if self.num_fp8_weights else 0.0
        head_s = self.head_gemm_s
        if fp8_s is None or head_s is None:
            return None
        return self.rates.bf16_gemm_s(self.linear_flops(self.num_bf16_weights)) + head_s + fp8_s

    @property
    def gemm_bounds_s(self) -> dict[str, float]:
        """Operand type -> lower bound of the linear layers' GEMMs in seconds; empty where a peak is not known."""
        if self.peak is None:
            return {}
        rates = self.rates
        bf16_flops = self.linear_flops(self.num_bf16_weights + self.num_head_weights)
        bounds = {"bf16": bf16_flops / max(self.peak.bf16, rates.bf16_gemm_tflops) / 1e12}
        if self.num_fp8_weights:
            if self.peak.fp8 is None or not self._has_fp8_peak:
                return {}
            fp8_tflops = max(self.peak.fp8, rates.fp8_gemm_tflops or 0.0, rates.fp8_split_gemm_tflops or 0.0)
            bounds["fp8"] = self.linear_flops(self.num_fp8_weights) / fp8_tflops / 1e12
        return bounds

    @property
    def bounds_s(self) -> dict[str, float]:
        """Kernel class -> lower bound in seconds, of the classes whose FLOPs or bytes are known."""
        bounds = {"optimizer": self.copy_s(2 * (self.weight_bytes + self.optimizer_bytes) + self.gradient_bytes)}
        if self.gemm_bounds_s:
            bounds["gemm"] = sum(self.gemm_bounds_s.values())
        if self.peak is not None:
            bounds["attention"] = self.attention_flops / max(self.peak.bf16, self.rates.bf16_gemm_tflops) / 1e12
        return bounds

    @property
    def recomputed_gemm_s(self) -> float:
        """The part of the GEMMs' time that recomputation takes: a third of a recomputed weight's model FLOPs."""
        num_weights = self.num_fp8_weights + self.num_bf16_weights + self.num_head_weights
        again = self.recomputed_share / 3
        # Not by FLOPs: fp8 weights take less time than lm_head, which is never recomputed.
        head_s = self.head_gemm_s or self.rates.bf16_gemm_s(self.linear_flops(self.num_head_weights))
        all_s = self.gemms_at_measured_rates_s or self.rates.bf16_gemm_s(self.linear_flops(num_weights))
        decoder_s = all_s - head_s
        return self.time.class_s("gemm") * again * decoder_s / ((1 + again) * decoder_s + head_s)


@dataclass(frozen=True)
class Bottleneck:
    name: str
    lost_s: float
    """The most that the option can take away, in seconds of this step."""
    cause: str
    advice: str
    is_fault: bool = False
    """Broken rather than slow: comes first whatever its size."""


def ranked_bottlenecks(facts: StepMeasurements) -> list[Bottleneck]:
    """What an option acts on: faults first, then by size; what loses no time is left out."""
    found = [one for one in _bottlenecks(facts) if one.is_fault or one.lost_s > 0]
    return sorted(found, key=lambda one: (not one.is_fault, -one.lost_s))


def _bottlenecks(facts: StepMeasurements) -> Iterator[Bottleneck]:
    step = facts.time
    unfused = facts.attention == "unfused"
    if unfused:
        yield Bottleneck(
            "unfused attention",
            max(step.class_s("attention") - facts.bounds_s.get("attention", 0.0), 0.0),
            "no fused kernel ran; this counts the softmax kernels alone, attention's GEMMs are among the GEMMs",
            "let Transformer Engine use the cuDNN that torch brought: unset CUDNN_HOME, CUDNN_PATH, NVTE_FUSED_ATTN "
            "and NVTE_FLASH_ATTN, and do not put a system cuDNN on LD_LIBRARY_PATH; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 "
            "prints why it is refused"
            if facts.use_te
            else "--attn_implementation sdpa or flash_attention_2, or --use_te",
            is_fault=True,
        )
    bf16_flops = facts.linear_flops(facts.num_bf16_weights)
    fp8_s = facts.fp8_gemm_s(bf16_flops)
    if bf16_flops and fp8_s is not None:
        share = facts.num_bf16_weights / (facts.num_bf16_weights + facts.num_fp8_weights)
        yield Bottleneck(
            "linear layers outside fp8",
            facts.rates.bf16_gemm_s(bf16_flops) - fp8_s,
            f"{share:.0%} of the decoder's linear FLOPs are not in fp8",
            "--mixed_precision fp8 --use_te"
            if facts.scenario is None
            else "fewer --fp8_bf16_modules, if the loss stays the same"
            if facts.use_te
            else "--use_te for architectures that it has; what is outside fp8 and why stands in the table of layers",
        )
    reachable_s = facts.gemms_at_measured_rates_s
    if reachable_s is not None and not unfused:  # GEMMs of unfused attention cannot be told from the layers'
        yield Bottleneck(
            "GEMMs below the measured rate",
            step.class_s("gemm") - facts.recomputed_gemm_s - reachable_s,
            f"the linear layers' GEMMs take {reachable_s * 1e3:.1f} ms at the measured rates; a micro-batch has "
            f"{facts.num_tokens // facts.num_micro_batches} tokens",
            "more tokens in a micro-batch (--batch_size, --max_seq_length) as far as memory allows",
        )
    yield Bottleneck(
        "recomputation",
        facts.recomputed_gemm_s,
        f"{facts.recomputed_share:.0%} of the decoder layers recompute their forward pass; this counts its GEMMs alone",
        "drop --gradient_checkpointing, or give it a larger number, if memory allows",
    )
    if not facts.compiled:  # torchao casts the weights for every GEMM, fused with other work
        yield Bottleneck(
            "casts of the weights",
            min(step.class_s("cast"), facts.copy_s(4 * facts.num_fp8_weights)),
            f"the weights are cast to fp8 once a step, which has {facts.num_micro_batches} micro-batches; worked out "
            "from their bytes",
            "more micro-batches per step (--gradient_accumulation_steps)",
        )
    if facts.scenario == "current":
        yield Bottleneck(
            "amax of current scaling",
            sum(time_s for name, time_s in step.names("cast").items() if "amax" in name),
            "current scaling reads every tensor once more, for its amax",
            "--fp8_scenario delayed, which takes its scales from past steps (docs/precision.md)",
        )
    yield Bottleneck(
        "optimizer",
        step.class_s("optimizer"),
        f"it runs once a step of {facts.num_tokens} tokens; its bytes alone take "
        f"{facts.bounds_s['optimizer'] * 1e3:.1f} ms",
        "more tokens per step (--gradient_accumulation_steps, --batch_size)",
    )
    yield Bottleneck(
        "gaps between kernels",
        step.gap_s,
        "the GPU is idle until the host launches the next kernel",
        "more work per kernel: a larger --batch_size or longer sequences (--max_seq_length)",
    )
    if not facts.use_te and not facts.compiled:
        yield Bottleneck(
            "unfused pointwise kernels",
            step.class_s("norm", "activation", "rope", "copy", "elementwise"),
            "the Hugging Face decoder runs norms, activations, RoPE, copies and additions as kernels of their own",
            "--use_te, whose modules fuse most of them",
        )
    added_bytes = 3 * facts.added_gradient_bytes * (facts.num_micro_batches - 1)
    yield Bottleneck(
        "main-gradient accumulation",
        min(step.class_s("elementwise"), facts.copy_s(added_bytes)),
        "every micro-batch after the first adds its gradients to those before; worked out from their bytes",
        "fewer, larger micro-batches (--batch_size) as far as memory allows",
    )
