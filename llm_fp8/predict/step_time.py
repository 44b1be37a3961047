"""Seconds of an optimizer step, by part.

    GEMMs        6 n FLOPs per token and weight matrix of n entries (8 n where its layer is recomputed), over the rate of its precision
    attention    6 h l FLOPs per token and layer over cuDNN's rate
    passes       bytes of norms, RoPE, SwiGLU, residuals and cross entropy over their bandwidth
    casts        bytes of fp8 casts, transposes and maxima of activations and gradients over theirs
    weights      bytes per parameter of the optimizer, of gradients that are added up and of weight casts
    exchange     bytes between GPUs that lengthen the step

The GPU runs one kernel after the other, so a step is their sum. That the host may need longer to launch its kernels is not in it. Bytes are
counted from the kernels that Transformer Engine 2.20 launches for a layer (names and numbers seen in a profile of Llama-3.2-1B on an H200, in
every recipe), at 2 bytes per bf16 and 1 per fp8 element.
"""

from __future__ import annotations

from dataclasses import dataclass

from llm_fp8.optim import bytes_per_parameter
from llm_fp8.predict.calibration import DIAGONAL_TOKENS, SMALL_GEMM_TOKENS, Rates
from llm_fp8.predict.scenario import Scenario
from te_llama import DecoderSpec

_WEIGHT_CAST_BYTES = {"delayed": 4, "current": 6, "block": 4}
"""Of one weight with both layouts: read in bf16, two fp8 copies written; current reads it once more for the maximum."""
_FORWARD_CAST_BYTES = {"delayed": 3, "current": 5, "block": 3}
"""With the layout of the forward pass alone, all that Transformer Engine makes under FSDP; the backward pass casts again."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of the parts of an optimizer step."""

    gemm_s: float
    attention_s: float
    passes_s: float
    casts_s: float
    weights_s: float
    exchange_s: float

    @property
    def total_s(self) -> float:
        """The step: one after the other."""
        return self.gemm_s + self.attention_s + self.passes_s + self.casts_s + self.weights_s + self.exchange_s


def pass_bytes(spec: DecoderSpec, recipe: str) -> float:
    """Bytes per token and layer of the memory-bound kernels that a bf16 layer has too, forward and backward together.

    Delayed scaling's norms and SwiGLU write fp8, which saves them a byte per element. Split and RoPE are counted as Transformer Engine's kernels and
    the copies around them, which the bandwidths of `calibration` were measured with; `llm_fp8.rope_kernel` moves 8 (q + 2 kv) bytes instead.
    """
    h, f, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    norms, residuals, swiglu = 2 * (4 + 6) * h, 2 * (6 + 6) * h, (6 + 10) * f
    rope_and_split = 8 * (q + kv) + 8 * kv + 4 * (q + 2 * kv)
    around_attention = 15 * q  # dO * O, and the fp32 accumulators of dQ, dK and dV
    fused = 2 * h + f if recipe == "delayed" else 0
    if spec.qk_norm:
        norms += (4 + 6) * (q + kv)
    return norms + residuals + swiglu + rope_and_split + around_attention - fused


def forward_pass_bytes(spec: DecoderSpec) -> float:
    """The forward part of `pass_bytes`, which recomputation repeats."""
    h, f, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    return 2 * 4 * h + 2 * 6 * h + 6 * f + 4 * (q + kv) * (2 if spec.qk_norm else 1) + 4 * kv


def cast_bytes(spec: DecoderSpec, recipe: str) -> tuple[float, float]:
    """Bytes per token and layer of casts, transposes and maxima: forward and backward."""
    h, f, q, qkv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.q_size + 2 * spec.kv_size
    if recipe == "bf16":
        return 0.0, 0.0
    # A cast with its transpose reads 2 bytes and writes 2. Gradients: of the outputs of qkv, projection, fc1 (2 f) and fc2.
    gradients = 4 * (qkv + h + 2 * f + h)
    if recipe == "delayed":  # norms and SwiGLU have cast already; their fp8 outputs are transposed
        return 2 * h + 2 * h + 2 * f + 4 * q, gradients
    bias_sums = 4 * f  # fc1's bias gradient is summed though it has no bias
    if recipe == "block":
        return 4 * (2 * h + q + f), gradients + bias_sums
    maxima = 2 * (h + 2 * f + h + qkv)
    return 4 * (2 * h + q) + 5 * f + 2 * q, gradients + bias_sums + maxima


def weight_bytes(scenario: Scenario) -> float:
    """Bytes that an optimizer step moves for its weights on one GPU, exchange left out."""
    kept = bytes_per_parameter(scenario.optimizer)
    parameters, repeats = scenario.model.num_parameters, scenario.micro_batches
    shards = scenario.num_gpus if scenario.sharded else 1
    update = 2 * kept.total - kept.gradient  # everything is read, all but the gradient is written
    norm_and_clip = kept.gradient * (3 if scenario.optimizer == "adamw_fp32" else 1)  # ours clip as they read
    total = parameters * (update + norm_and_clip) / shards
    fp8_entries = scenario.fp8_layers * scenario.model.layer_linear
    if not scenario.sharded:
        total += parameters * (kept.gradient + (repeats - 1) * (2 * kept.gradient + 2))  # cleared, then added to
        if scenario.optimizer == "adamw_fp32":
            total += repeats * 6 * parameters  # the weights' casts to bf16
        if scenario.mode == "ddp":
            total += parameters * 2 * kept.gradient  # copied into buckets
        return total + _WEIGHT_CAST_BYTES.get(scenario.recipe, 0) * fp8_entries
    gathers = 2 if scenario.mode == "fsdp_full" else 1
    reductions = repeats if scenario.sync_every_micro_batch else 1
    total += parameters * repeats * (gathers * (6 / shards + 4))  # fp32 shards cast to bf16, copied out of the gathered buffer
    total += parameters * ((repeats - reductions) * 10 + reductions * 8)  # gradients added up in fp32, laid out for the reduction
    if scenario.recipe != "bf16":
        total += repeats * (_FORWARD_CAST_BYTES[scenario.recipe] + _WEIGHT_CAST_BYTES[scenario.recipe]) * fp8_entries
    return total


def exchanged_bytes(scenario: Scenario) -> float:
    """Bytes of the whole tensors that are gathered from, or reduced over, the GPUs in a step."""
    parameters = scenario.model.num_parameters
    if scenario.mode == "ddp":
        return parameters * 2 * bytes_per_parameter(scenario.optimizer).gradient  # an all-reduce is a reduction and a gathering
    if not scenario.sharded:
        return 0.0
    gathers = 2 if scenario.mode == "fsdp_full" else 1
    reductions = scenario.micro_batches if scenario.sync_every_micro_batch else 1
    return parameters * (2 * gathers * scenario.micro_batches + 4 * reductions)


def step_time(scenario: Scenario, rates: Rates) -> StepTime:
    """Predict an optimizer step on a GPU of these rates. Raises KeyError for an fp8 recipe where they have no fp8 rate."""
    spec, tokens = scenario.model.spec, scenario.micro_batch_tokens
    step_tokens = tokens * scenario.micro_batches
    layers, fp8_layers, again = spec.num_layers, scenario.fp8_layers, scenario.recomputed_layers
    small = (tokens + SMALL_GEMM_TOKENS) / tokens
    again_share = again / layers
    layer_flops = (6 + 2 * again_share) * scenario.model.layer_linear * step_tokens * small
    gemm_s = (layers - fp8_layers) * layer_flops / (rates.bf16_gemm_tflops * 1e12)
    head_rate = rates.bf16_head_tflops if fp8_layers else rates.bf16_gemm_tflops
    gemm_s += 6 * scenario.model.head * step_tokens * small / (head_rate * 1e12)
    casts_s = 0.0
    if fp8_layers:
        gemm_s += fp8_layers * layer_flops / (rates.fp8_gemm_tflops[scenario.recipe] * 1e12)
        forward, backward = cast_bytes(spec, scenario.recipe)
        cast = fp8_layers * step_tokens * (forward * (1 + again_share) + backward)
        casts_s = cast / (rates.cast_tb_s[scenario.recipe] * 1e12)
    attention = (6 + 2 * again_share) * spec.q_size * (scenario.mean_length + DIAGONAL_TOKENS) * step_tokens * layers
    in_bf16 = layers - fp8_layers
    passes = step_tokens * (
        fp8_layers * pass_bytes(spec, scenario.recipe)
        + in_bf16 * pass_bytes(spec, "bf16")
        + again * forward_pass_bytes(spec)
        + 6 * spec.vocab_size  # the logits are read twice and written once
    )
    return StepTime(
        gemm_s=gemm_s,
        attention_s=attention / (rates.attention_rate(spec.head_dim) * 1e12),
        passes_s=passes / (rates.pass_tb_s * 1e12),
        casts_s=casts_s,
        weights_s=weight_bytes(scenario) / (rates.weight_tb_s * 1e12),
        exchange_s=exchanged_bytes(scenario) / (rates.exchange_tb_s * 1e12),
    )
