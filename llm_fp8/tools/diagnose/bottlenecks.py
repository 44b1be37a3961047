"""From what was measured in a step to what costs most and the option that acts on it.

A rule is a pure function of `StepMeasurements`: the seconds that its option can save at most, or None. Fused attention,
which no option acts on, and lm_head's GEMMs, whose option changes what is computed, have no rule.

Times are held against two rates, because the first is out of reach and the second is not:

    lower bounds     model FLOPs at the vendor's dense peak of the operands' type, or at the measured rate where cards
                     clock beyond the data sheet; none for a GPU whose peak is not known
    measured rates   what large GEMMs reach on this GPU without a pause (llm_fp8/tools/gemm_rates.py). GEMMs between
                     which lies other work can be faster: a GPU at its power limit lowers its clocks

Of an fp8 layer, fprop runs with fast accumulation, dgrad and wgrad with split accumulation (Transformer Engine's
recipes on Hopper). Memory-bound work is held against the measured copy bandwidth, bytes read plus bytes written:

    weight casts                 per fp8 weight 2 bytes read (bf16), 1 written as it is and 1 transposed
    optimizer                    weights and optimizer state read and written, gradients read
    main-gradient accumulation   from the second micro-batch on two gradients read and one written, but for those that
                                 wgrad GEMMs accumulate
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llm_fp8.config.recipes import RECIPES
from llm_fp8.observability.metrics import PeakTflops
from llm_fp8.precision.modules import GEMMS_PER_WEIGHT
from llm_fp8.tools.diagnose.step_time import StepTime
from llm_fp8.tools.gemm_rates import MeasuredRates

WEIGHT_CAST_BYTES = 4


@dataclass(frozen=True)
class StepMeasurements:
    """What the rules read. Weights and parameters are counts of elements, times are seconds."""

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
    num_fp8_lm_head_gemms: int = 0
    """Of lm_head's three GEMMs in a micro-batch, those in fp8 (--fp8_lm_head)."""
    compiled: bool = False
    """The decoder layers are compiled, as under torchao."""

    @property
    def _has_fp8_peak(self) -> bool:
        return self.scenario not in RECIPES or RECIPES[self.scenario].has_fp8_peak

    def fp8_gemm_s(self, flops: float) -> float | None:
        """Seconds of these model FLOPs at the fp8 rates; None where they were not measured, and for fp4."""
        return self.rates.fp8_gemm_s(flops) if self._has_fp8_peak else None

    def bf16_gemm_s(self, flops: float) -> float:
        return self.rates.bf16_gemm_s(flops)

    def copy_s(self, num_bytes: float) -> float:
        """Seconds of reading and writing so many bytes in all."""
        return num_bytes / self.rates.copy_tb_s / 1e12

    def linear_flops(self, num_weights: int) -> float:
        """Model FLOPs of a step in layers with so many weights: 6 per weight and token."""
        return 6.0 * num_weights * self.num_tokens

    @property
    def gemms_at_measured_rates_s(self) -> float | None:
        """Seconds of the linear layers' model FLOPs at the measured rates; None where one of these is not known."""
        fp8 = self.fp8_gemm_s(self.linear_flops(self.num_fp8_weights)) if self.num_fp8_weights else 0.0
        head_s = self.head_gemm_s
        return (
            None
            if fp8 is None or head_s is None
            else self.bf16_gemm_s(self.linear_flops(self.num_bf16_weights)) + head_s + fp8
        )

    @property
    def head_gemm_s(self) -> float | None:
        return self.rates.head_gemm_s(self.linear_flops(self.num_head_weights), self.num_fp8_lm_head_gemms)

    @property
    def fp8_flops(self) -> float:
        return self.linear_flops(self.num_fp8_weights) + self._fp8_head_flops

    @property
    def bf16_flops(self) -> float:
        """Model FLOPs of a step in linear GEMMs outside fp8."""
        return self.linear_flops(self.num_bf16_weights + self.num_head_weights) - self._fp8_head_flops

    @property
    def _fp8_head_flops(self) -> float:
        return self.linear_flops(self.num_head_weights) * self.num_fp8_lm_head_gemms / GEMMS_PER_WEIGHT

    @property
    def gemm_bounds_s(self) -> dict[str, float]:
        """Operand type -> lower bound of the linear layers' GEMMs in seconds; empty where a peak is not known."""
        if self.peak is None:
            return {}
        bounds = {"bf16": self.bf16_flops / max(self.peak.bf16, self.rates.bf16_gemm_tflops) / 1e12}
        if self.num_fp8_weights:
            fast, split = self.rates.fp8_gemm_tflops, self.rates.fp8_split_gemm_tflops
            if self.peak.fp8 is None or not self._has_fp8_peak:
                return {}
            bounds["fp8"] = self.fp8_flops / max(self.peak.fp8, fast or 0.0, split or 0.0) / 1e12
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
        decoder = self.num_fp8_weights + self.num_bf16_weights
        again = self.recomputed_share / 3
        # Not by FLOPs: fp8 weights take less time than lm_head, which is never recomputed.
        head_s = self.head_gemm_s or self.bf16_gemm_s(self.linear_flops(self.num_head_weights))
        decoder_s = (
            self.gemms_at_measured_rates_s or self.bf16_gemm_s(self.linear_flops(decoder + self.num_head_weights))
        ) - head_s
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


Rule = Callable[[StepMeasurements], Bottleneck | None]


def unfused_attention(facts: StepMeasurements) -> Bottleneck | None:
    """Attention in several kernels, with the whole score matrix in memory."""
    if facts.attention != "unfused":
        return None
    lost_s = facts.time.class_s("attention") - facts.bounds_s.get("attention", 0.0)
    return Bottleneck(
        "unfused attention",
        max(lost_s, 0.0),
        "no fused kernel ran; this counts the softmax kernels alone, attention's matrix products are among the GEMMs",
        "let Transformer Engine use the cuDNN that torch brought: unset CUDNN_HOME, CUDNN_PATH, NVTE_FUSED_ATTN and "
        "NVTE_FLASH_ATTN, and do not put a system cuDNN on LD_LIBRARY_PATH; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints "
        "why it is refused"
        if facts.use_te
        else "--attn_implementation sdpa or flash_attention_2, or --use_te",
        is_fault=True,
    )


def layers_outside_fp8(facts: StepMeasurements) -> Bottleneck | None:
    flops = facts.linear_flops(facts.num_bf16_weights)
    fp8_s = facts.fp8_gemm_s(flops)
    if not flops or fp8_s is None:
        return None
    share = facts.num_bf16_weights / (facts.num_bf16_weights + facts.num_fp8_weights)
    if facts.scenario is None:
        advice = "--mixed_precision fp8 --use_te"
    elif facts.use_te:
        advice = "fewer --fp8_first_bf16_layers and --fp8_last_bf16_layers, if the loss stays the same"
    else:
        advice = "--use_te for architectures that it has; what is outside fp8 and why stands in the table of layers"
    return Bottleneck(
        "linear layers outside fp8",
        facts.bf16_gemm_s(flops) - fp8_s,
        f"{share:.0%} of the decoder's linear FLOPs are not in fp8",
        advice,
    )


def gemms_below_measured_rate(facts: StepMeasurements) -> Bottleneck | None:
    reachable_s = facts.gemms_at_measured_rates_s
    if facts.attention == "unfused" or reachable_s is None:
        return None  # attention's GEMMs cannot be told from the layers'
    lost_s = facts.time.class_s("gemm") - facts.recomputed_gemm_s - reachable_s
    tokens = facts.num_tokens // facts.num_micro_batches
    return Bottleneck(
        "GEMMs below the measured rate",
        lost_s,
        f"the linear layers' GEMMs take {reachable_s * 1e3:.1f} ms at the measured rates; a micro-batch has "
        f"{tokens} tokens",
        "more tokens in a micro-batch (--batch_size, --max_seq_length) as far as memory allows",
    )


def recomputation(facts: StepMeasurements) -> Bottleneck | None:
    if not facts.recomputed_share:
        return None
    return Bottleneck(
        "recomputation",
        facts.recomputed_gemm_s,
        f"{facts.recomputed_share:.0%} of the decoder layers recompute their forward pass; this counts its GEMMs alone",
        "drop --gradient_checkpointing, or raise --gradient_checkpointing_every, if memory allows",
    )


def weight_casts(facts: StepMeasurements) -> Bottleneck | None:
    if not facts.num_fp8_weights or facts.compiled:  # torchao casts them for every GEMM, fused with other work
        return None
    lost_s = min(facts.time.class_s("cast"), facts.copy_s(WEIGHT_CAST_BYTES * facts.num_fp8_weights))
    return Bottleneck(
        "casts of the weights",
        lost_s,
        f"the weights are cast to fp8 once a step, which has {facts.num_micro_batches} micro-batches; worked out from "
        "their bytes",
        "more micro-batches per step (--gradient_accumulation_steps)",
    )


def amax_of_current_scaling(facts: StepMeasurements) -> Bottleneck | None:
    """The extra pass over every tensor that current scaling takes."""
    if facts.scenario != "current":
        return None
    return Bottleneck(
        "amax of current scaling",
        facts.time.named_s("cast", "amax"),
        "current scaling reads every tensor once more, for its amax",
        "--fp8_scenario delayed, which takes its scales from past steps (docs/precision.md)",
    )


def optimizer_step(facts: StepMeasurements) -> Bottleneck | None:
    bound_ms = facts.bounds_s["optimizer"] * 1e3
    return Bottleneck(
        "optimizer",
        facts.time.class_s("optimizer"),
        f"it runs once a step of {facts.num_tokens} tokens; its bytes alone take {bound_ms:.1f} ms",
        "more tokens per step (--gradient_accumulation_steps, --batch_size)",
    )


def gaps(facts: StepMeasurements) -> Bottleneck | None:
    """The step is launch-bound."""
    return Bottleneck(
        "gaps between kernels",
        facts.time.gap_s,
        "the GPU is idle until the host launches the next kernel",
        "more work per kernel: a larger --batch_size or longer rows (--max_seq_length)",
    )


def unfused_pointwise(facts: StepMeasurements) -> Bottleneck | None:
    """Norms, activations, RoPE, copies and pointwise kernels of the Hugging Face decoder."""
    if facts.use_te or facts.compiled:
        return None
    return Bottleneck(
        "unfused pointwise kernels",
        facts.time.class_s("norm", "activation", "rope", "copy", "elementwise"),
        "the Hugging Face decoder runs norms, activations, RoPE, copies and additions as kernels of their own",
        "--use_te, whose modules fuse most of them",
    )


def main_grads(facts: StepMeasurements) -> Bottleneck | None:
    """Accumulation of micro-batches' gradients, where no wgrad GEMM does it."""
    num_bytes = 3 * facts.added_gradient_bytes * (facts.num_micro_batches - 1)
    lost_s = min(facts.time.class_s("elementwise"), facts.copy_s(num_bytes))
    return Bottleneck(
        "main-gradient accumulation",
        lost_s,
        "every micro-batch after the first adds its gradients to those before; worked out from their bytes",
        "fewer, larger micro-batches (--batch_size) as far as memory allows",
    )


RULES: tuple[Rule, ...] = (
    unfused_attention,
    layers_outside_fp8,
    gemms_below_measured_rate,
    recomputation,
    weight_casts,
    amax_of_current_scaling,
    optimizer_step,
    gaps,
    unfused_pointwise,
    main_grads,
)


def ranked_bottlenecks(facts: StepMeasurements) -> list[Bottleneck]:
    """What an option acts on: faults first, then by size; rules that find no time lost are left out."""
    found = [one for rule in RULES if (one := rule(facts)) is not None and (one.is_fault or one.lost_s > 0)]
    return sorted(found, key=lambda one: (not one.is_fault, -one.lost_s))
