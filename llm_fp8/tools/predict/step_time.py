"""Seconds of an optimizer step, by part.

    GEMMs           6 n FLOPs per token and weight matrix of n entries (8 n where its layer is recomputed), over the
                    rate of its precision; and the extra bytes of fp32 sums, which wgrad GEMMs under FSDP accumulate
                    into
    attention       6 h l FLOPs per token and layer over its rate
    passes          bytes of norms, RoPE, SwiGLU, residuals and cross entropy over their bandwidth
    casts           bytes of fp8 casts, transposes and amax of activations and gradients over theirs
    weights         bytes per parameter of the optimizer, gradients that no GEMM accumulates, FSDP's copies, weight
                    casts
    communication   bytes between GPUs by what they lengthen a step, and waiting for the slowest GPU
    gap             a constant, and another per layer and micro-batch; with CUDA graphs one per fp8 layer

The GPU runs one kernel after the other, so a step is their sum; a host that launches too slowly is not in it. Bytes are
counted from the kernels that Transformer Engine 2.20 and this project launch for a layer.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from llm_fp8.models.build import TUNED_WIDTHS, cudnn_is_faster
from llm_fp8.optim.optimizers import bytes_per_parameter
from llm_fp8.tools.predict.calibration import (
    ATTENTION_TILE,
    DIAGONAL_TOKENS,
    FLASH_ATTENTION_4_SPEED_UP,
    GRAPH_GAP_S,
    HOST_S_PER_LAYER,
    LAYER_GAP_S,
    SMALL_GEMM_TOKENS,
    STEP_GAP_S,
    WAIT_SPREAD,
    Rates,
)
from llm_fp8.tools.predict.workload import StepWorkload
from te_llama import DecoderSpec

_WEIGHT_CAST_BYTES = {"delayed": 4, "current": 6, "block": 4}
"""Of one weight with both layouts: read in bf16, two fp8 copies written; current reads it once more for the amax."""
_FORWARD_CAST_BYTES = {"delayed": 3, "current": 5, "block": 3}
"""With the layout of the forward pass alone, where Transformer Engine keeps no casts; the backward pass casts again."""
_MASTER_CAST_BYTES = 9
"""--fp8_params, of one weight and step: the fp32 master weight read for the amax and for the cast, one byte written."""
_TRANSPOSE_BYTES = 2
"""--fp8_params, of one weight and micro-batch: for the backward pass."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of the parts of an optimizer step."""

    gemm_s: float
    attention_s: float
    passes_s: float
    casts_s: float
    weights_s: float
    communication_s: float
    gap_s: float
    """No kernel runs."""

    @property
    def total_s(self) -> float:
        """The step: one after the other."""
        return sum(dataclasses.astuple(self))


def norm_seconds(spec: DecoderSpec, recipe: str, rates: Rates, forward_only: bool = False) -> float:
    """Of a layer's norms per token, forward and backward. Delayed scaling's write two fp8 layouts, which takes as long
    as bf16.
    """

    def rate(width: int, forward: bool) -> float:
        by_cudnn = cudnn_is_faster(width) and not (forward and recipe == "current")
        return rates.pass_tb_s if by_cudnn or width in TUNED_WIDTHS else rates.general_norm_tb_s

    sizes = [(2 * spec.hidden_size, spec.hidden_size)]
    if spec.qk_norm:
        sizes.append((spec.q_size + spec.kv_size, spec.head_dim))
    backward = 0 if forward_only else 6
    return sum(n * (4 / rate(width, True) + backward / rate(width, False)) for n, width in sizes) / 1e12


def pass_seconds(spec: DecoderSpec, recipe: str, rates: Rates, forward_only: bool = False) -> float:
    """Of a layer's other memory-bound kernels per token, forward and backward."""
    h, f, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    half = 0.5 if forward_only else 1.0
    residuals, rope, copies = half * 2 * (6 + 6) * h, half * 8 * (q + 2 * kv), half * 8 * q  # copies: around attention
    found = (residuals + rope + copies) / rates.pass_tb_s
    # In delayed scaling one byte is written for each element, and in the backward pass two.
    forward, rate = (5, rates.swiglu_cast_tb_s) if recipe == "delayed" else (6, rates.pass_tb_s)
    return (found + (forward if forward_only else forward + 10) * f / rate) / 1e12


def cast_bytes(spec: DecoderSpec, recipe: str) -> tuple[float, float]:
    """Bytes per token and layer of casts, transposes and amax: forward and backward."""
    h, f, q, qkv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.q_size + 2 * spec.kv_size
    if recipe == "bf16":
        return 0.0, 0.0
    # A cast with its transpose reads 2 bytes and writes 2. Gradients of the outputs of qkv, projection, fc1, fc2.
    gradients = 4 * (qkv + h + 2 * f + h)
    if recipe == "delayed":
        # Norms and SwiGLU have cast already, forward and backward; the fp8 outputs of the forward pass are transposed.
        return 2 * h + 2 * h + 2 * f + 4 * q, gradients - 4 * 2 * f
    if recipe == "block":
        return 4 * (2 * h + q + f), gradients
    return 4 * (2 * h + q) + 5 * f + 2 * q, gradients + 2 * (h + 2 * f + h + qkv)


def head_cast_bytes(work: StepWorkload) -> float:
    """Bytes of a step's casts for an fp8 lm_head: input with an amax, the logits' transposed gradient, weight."""
    model, tokens = work.model, work.micro_batch_tokens * work.micro_batches
    if not work.fp8_lm_head_gemms:
        return 0.0
    weight_casts = 1 if work.keeps_casts else work.micro_batches
    return (
        tokens * (6 * model.spec.hidden_size + 2 * model.spec.vocab_size)
        + weight_casts * _WEIGHT_CAST_BYTES["current"] * model.head
    )


def update_bytes(work: StepWorkload) -> float:
    """Bytes that the optimizer and the gradient norm before it move on one GPU."""
    kept = bytes_per_parameter(work.optimizer)
    update = 2 * kept.total - kept.gradient  # everything is read, all but the gradient is written
    norm_and_clip = kept.gradient * (3 if work.optimizer == "adamw_fp32" else 1)  # ours clip as they read
    return work.model.num_parameters * (update + norm_and_clip) / (work.num_gpus if work.sharded else 1)


def offloaded_bytes(work: StepWorkload) -> float:
    """Bytes of optimizer state on the host (--offload_optimizer), which a step takes to the GPU and back."""
    return work.offload_optimizer * work.model.num_parameters * bytes_per_parameter(work.optimizer).state


def _summed_behind_gemms(work: StepWorkload) -> int:
    """Entries of layers' weights whose gradients are accumulated behind the GEMM: q, k and v of fp8 layers that keep no
    casts (`would_lose_main_grad` in llm_fp8/utils/te_internals.py).
    """
    if work.keeps_casts or work.fp8_weights:
        return 0
    spec = work.model.spec
    return work.fp8_layers * spec.hidden_size * (spec.q_size + 2 * spec.kv_size)


def gemm_accumulator_bytes(work: StepWorkload) -> float:
    """Bytes of a step that GEMMs move for sums in fp32, beyond those for sums in bf16, which their rates contain."""
    if not (work.sharded and work.accumulates):
        return 0.0
    return 4 * (work.micro_batches - 1) * (work.model.layer_weights - _summed_behind_gemms(work))


def weight_bytes(work: StepWorkload) -> float:
    """Bytes that a step moves for its weights on one GPU beside `update_bytes` and `fsdp_bytes`: accumulated gradients
    and casts.
    """
    kept = bytes_per_parameter(work.optimizer)
    parameters, repeats = work.model.num_parameters, work.micro_batches
    total = weight_cast_bytes(work)
    if work.sharded:
        # A tied embedding has two gradients.
        return total + 6 * work.model.head * repeats * work.model.spec.tied_embeddings
    # wgrad GEMMs accumulate those of the layers (llm_fp8/distributed/wgrad_fusion.py), except where DDP reduces.
    layers = work.model.layer_weights
    added = (parameters - layers + _summed_behind_gemms(work)) * (repeats - 1)
    added += work.model.head * repeats * work.model.spec.tied_embeddings
    if work.has_ddp:
        added += layers * min(work.reductions, repeats - 1)
        total += parameters * kept.gradient  # zeroed
        total += parameters * 2 * kept.gradient * work.reductions  # copied into buckets
    total += added * (2 * kept.gradient + 2)
    if work.optimizer == "adamw_fp32":
        total += repeats * 6 * parameters  # the weights' casts to bf16
    return total


def weight_cast_bytes(work: StepWorkload) -> float:
    """Bytes of a step's fp8 casts of the decoder's weights on one GPU."""
    if work.fp8_weights:
        per_weight = _MASTER_CAST_BYTES / work.num_gpus + _TRANSPOSE_BYTES * work.micro_batches
        return work.fp8_weights * per_weight
    casts: float = _WEIGHT_CAST_BYTES.get(work.recipe, 0)
    if not work.keeps_casts:
        casts = work.micro_batches * (casts + _FORWARD_CAST_BYTES.get(work.recipe, 0))
    return casts * work.fp8_layers * work.model.layer_linear


def fsdp_bytes(work: StepWorkload) -> float:
    """Bytes that FSDP2's own kernels move on one GPU in a step, between the model's.

    Gathered weights are copied out of the buffer. The first micro-batch's bf16 gradients are cast to an fp32 sum, those
    of the others are added where no GEMM does, and the sum is laid out for the reduction. Copies into buffers run
    beside the computation, on a stream of their own.
    """
    if not work.sharded:
        return 0.0
    parameters, of_layers = work.model.num_parameters, work.model.layer_weights
    outer = parameters - of_layers
    layer_gathers, outer_gathers = work.gathers
    copies = layer_gathers * (4 * of_layers - 2 * work.fp8_weights) + outer_gathers * 4 * outer
    if not work.accumulates:
        shards_added = (work.reductions - 1) * 12 * parameters / work.num_gpus
        return copies + work.reductions * 6 * parameters + shards_added  # cast as they are laid out
    sums = 6 * parameters + (work.micro_batches - 1) * 10 * (outer + _summed_behind_gemms(work))
    return copies + sums + 8 * parameters


def communicated_bytes(work: StepWorkload) -> float:
    """Bytes of the unsharded tensors that a step gathers from, or reduces over, the GPUs."""
    parameters, of_layers = work.model.num_parameters, work.model.layer_weights
    if work.mode == "ddp":  # an all-reduce is a reduce-scatter and an all-gather
        return parameters * 2 * bytes_per_parameter(work.optimizer).gradient * work.reductions
    if not work.sharded:
        return 0.0
    layer_gathers, outer_gathers = work.gathers
    gathered = layer_gathers * (2 * of_layers - work.fp8_weights) + outer_gathers * 2 * (parameters - of_layers)
    return gathered + 4 * parameters * work.reductions


def gap_seconds(work: StepWorkload) -> float:
    """Seconds of a step in which the GPU runs no kernel, on a host that launches fast enough."""
    if work.cuda_graphs:
        return GRAPH_GAP_S * work.fp8_layers * work.micro_batches
    return STEP_GAP_S + LAYER_GAP_S * work.model.spec.num_layers * work.micro_batches


def idle_share(num_gpus: int) -> float:
    """How much longer than the mean the step of the slowest of `num_gpus` is, over it: the largest of as many normal
    numbers (Blom's approximation).
    """
    return WAIT_SPREAD * statistics.NormalDist().inv_cdf((num_gpus - 0.375) / (num_gpus + 0.25))


def step_time(work: StepWorkload, rates: Rates) -> StepTime:
    """Predict an optimizer step on a GPU of these rates. Raises KeyError for an fp8 recipe that they lack."""
    spec, recipe, tokens = work.model.spec, work.recipe, work.micro_batch_tokens
    step_tokens = tokens * work.micro_batches
    layers, fp8_layers, again = spec.num_layers, work.fp8_layers, work.recomputed_layers
    small = (tokens + SMALL_GEMM_TOKENS) / tokens
    again_share = again / layers
    layer_flops = (6 + 2 * again_share) * work.model.layer_linear * step_tokens * small
    gemm_s = (layers - fp8_layers) * layer_flops / (rates.bf16_gemm_tflops * 1e12)
    head_flops = 6 * work.model.head * step_tokens * small
    in_fp8 = work.fp8_lm_head_gemms / 3
    gemm_s += (1 - in_fp8) * head_flops / ((rates.bf16_head_tflops if fp8_layers else rates.bf16_gemm_tflops) * 1e12)
    casts_s = 0.0
    if in_fp8:
        gemm_s += in_fp8 * head_flops / (rates.fp8_gemm_tflops[recipe] * 1e12)
        casts_s += head_cast_bytes(work) / (rates.cast_tb_s["current"] * 1e12)
    if fp8_layers:
        gemm_s += fp8_layers * layer_flops / (rates.fp8_gemm_tflops[recipe] * 1e12)
        forward, backward = cast_bytes(spec, recipe)
        cast = fp8_layers * step_tokens * (forward * (1 + again_share) + backward)
        casts_s += cast / (rates.cast_tb_s[recipe] * 1e12)
    gemm_s += gemm_accumulator_bytes(work) / (rates.weight_tb_s * 1e12)
    partial_tile = ATTENTION_TILE / 2 / work.mean_length if work.mean_length % ATTENTION_TILE else 0.0
    computed_tokens = step_tokens * (1 + partial_tile)
    attention = (6 + 2 * again_share) * spec.q_size * (work.mean_length + DIAGONAL_TOKENS) * computed_tokens * layers
    attention_rate = rates.attention_rate(spec.head_dim) * (FLASH_ATTENTION_4_SPEED_UP if work.flash_attention_4 else 1)

    def of_layers(seconds: Callable[..., float]) -> float:
        """Of the step, `seconds` being those of a layer and token: recomputed layers run the forward part again."""
        forward, whole = (
            fp8_layers / layers * seconds(spec, recipe, rates, forward_only)
            + (1 - fp8_layers / layers) * seconds(spec, "bf16", rates, forward_only)
            for forward_only in (True, False)
        )
        return step_tokens * (layers * whole + again * forward)

    # The logits are read twice and their gradient written over them, in bf16 or fp8.
    loss_s = (5 if in_fp8 else 6) * spec.vocab_size * step_tokens / (rates.loss_tb_s * 1e12)
    update_rate = rates.eight_bit_tb_s if work.optimizer == "adamw_8bit" else rates.weight_tb_s
    weights_s = update_bytes(work) / (update_rate * 1e12) + weight_bytes(work) / (rates.weight_tb_s * 1e12)
    weights_s += offloaded_bytes(work) / (rates.host_tb_s * 1e12)
    alone = StepTime(
        gemm_s=gemm_s,
        attention_s=attention / (attention_rate * 1e12),
        passes_s=of_layers(norm_seconds) + of_layers(pass_seconds) + loss_s,
        casts_s=casts_s,
        weights_s=weights_s + fsdp_bytes(work) / (rates.fsdp_tb_s * 1e12),
        communication_s=0.0,
        gap_s=gap_seconds(work),
    )
    if work.num_gpus == 1:
        return alone
    transfer_s = communicated_bytes(work) / (rates.communication_tb_s * 1e12)
    return dataclasses.replace(alone, communication_s=transfer_s + idle_share(work.num_gpus) * alone.total_s)


def host_seconds(work: StepWorkload) -> float:
    """The host's seconds to launch the kernels of a step's layers and micro-batches in fp8, on the slowest recorded
    machine (`HOST_S_PER_LAYER`); 0 with CUDA graphs, of which each micro-batch launches one.
    """
    if work.cuda_graphs:
        return 0.0
    kept_s, recomputed_s = HOST_S_PER_LAYER[work.mode]
    kept = work.model.spec.num_layers - work.recomputed_layers
    return work.micro_batches * (kept * kept_s + work.recomputed_layers * recomputed_s)
