"""Peak memory of a GPU's tensors, by part.

The peak is at the start of the last micro-batch's backward pass: every layer's saved tensors, the logits and the
gradient of the output head exist at once, beside weights, optimizer state and the gradients of earlier micro-batches.
Of layers that are computed again there are the inputs alone; one of them in full follows when what the head took is
free. With a single micro-batch there are no such gradients yet, and the end of the backward pass, with all gradients
and no activations, may be the peak instead.

What a layer saves per token (TE 2.20; `prepare_for_saving` in LayerNormLinear, Linear and LayerNormMLP, FusedAttnFunc),
in elements:

    input of the norm, twice (h each)             bf16
    output of the first norm (h)                  bf16, or one fp8 copy (the layout of the weight gradient's GEMM)
    output of the second norm (h)                 bf16, or two fp8 copies: LayerNormMLP drops neither layout
    rotated q and k, v (q + 2 kv)                 bf16
    inputs of the norms of q and k (q + kv)       bf16; Qwen3 alone
    attention's output (q)                        bf16; in fp8 also the projection's fp8 input
    attention's log-sum-exp (one per head)        fp32
    output of fc1 (2 f)                           bf16
    input of fc2 (f)                              bf16, or one fp8 copy; with block scaling both layouts

Under FSDP the allocator reserves more than that. It keeps memory by stream, and what a tensor of one stream leaves free
serves no other: the buffer of the largest gather, on the stream of the gathers, lies empty at the peak. The shards of
the gradients come after the peak, in what the backward pass left free (llm_fp8/distributed/fsdp_internals.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm_fp8.distributed.sharding_mode import keeps_unsharded_gradients, state_bytes
from llm_fp8.kernels.cross_entropy import default_chunk_tokens
from llm_fp8.observability.metrics import GIB
from llm_fp8.optim.optimizers import bytes_per_parameter
from llm_fp8.tools.predict.workload import StepWorkload
from te_llama import DecoderSpec

_BF16, _FP32 = 2, 4
_BLOCK_SCALE = 1 / 32
"""Bytes per element of an fp32 scale for 128 elements."""


@dataclass(frozen=True)
class Memory:
    """GiB of the parts at the peak."""

    state_gib: float
    """Weights, gradients that stand from one micro-batch to the next, optimizer state, whole weights gathered from
    shards, DDP's buckets.
    """
    weight_casts_gib: float
    """Under fsdp_full and --fp8_params a layer's casts and transposes go with its pass, and at the peak the head
    runs: those of an fp8 head alone.
    """
    activations_gib: float
    head_gib: float
    """Logits, final hidden states and the gradient of the output head; or a layer that is computed again, where that
    is more.
    """
    gather_stream_gib: float = 0.0
    """What the allocator reserves for FSDP2's stream of gathers and holds empty at the peak."""

    @property
    def total_gib(self) -> float:
        """The peak."""
        return self.state_gib + self.weight_casts_gib + self.activations_gib + self.head_gib

    @property
    def reserved_gib(self) -> float:
        """What the allocator takes from the GPU, its gaps left out."""
        return self.total_gib + self.gather_stream_gib


def saved_bytes(spec: DecoderSpec, recipe: str) -> float:
    """Bytes that a decoder layer keeps per token for its backward pass; see the module's docstring."""
    h, f, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    always = _BF16 * (2 * h + q + 2 * kv + q + 2 * f) + _FP32 * spec.num_heads
    if spec.qk_norm:
        always += _BF16 * (q + kv)
    if recipe == "bf16":
        return always + _BF16 * (2 * h + f)
    if recipe == "block":
        return always + (1 + _BLOCK_SCALE) * (3 * h + q + 2 * f)
    return always + 3 * h + q + f


def _standing_bytes(scenario: StepWorkload, with_gradients: bool) -> float:
    """Weights, optimizer state and gradients on one GPU, in bytes, at a time when gradients exist or do not."""
    config, parameters = scenario.config(), scenario.model.num_parameters
    kept = bytes_per_parameter(scenario.optimizer)
    total: float = state_bytes(scenario.mode, scenario.optimizer, scenario.num_gpus, config) * parameters
    if keeps_unsharded_gradients(scenario.mode, config):
        total -= kept.gradient / scenario.num_gpus * parameters  # the shards of gradients come with the reduction
    elif not with_gradients:
        total -= kept.gradient / (scenario.num_gpus if scenario.sharded else 1) * parameters
    if scenario.mode == "ddp":
        total += kept.gradient * parameters  # buckets
    total += scenario.fp8_weights / scenario.num_gpus  # beside their masters
    if scenario.mode == "fsdp_grad":
        total -= (_BF16 - 1) * scenario.fp8_weights  # whole ones in one byte
    return total


def _gathered_bytes(scenario: StepWorkload) -> float:
    """Whole weights under fsdp_full at the peak: the outermost unit (embedding, head) in bf16, and the last layer,
    gathered ahead of its backward pass.
    """
    if scenario.mode != "fsdp_full":
        return 0.0
    return _outermost_bytes(scenario) + (1 if scenario.fp8_weights else _BF16) * scenario.model.layer_linear


def _gather_stream_bytes(scenario: StepWorkload) -> float:
    """What FSDP2's stream of gathers holds beside the peak: the outermost unit as it is gathered, with this GPU's
    part of it before.
    """
    if not scenario.sharded:
        return 0.0
    return _outermost_bytes(scenario) * (1 + 1 / scenario.num_gpus)


def _outermost_bytes(scenario: StepWorkload) -> int:
    """Embedding and head in bf16, one matrix where they are tied."""
    return _BF16 * scenario.model.head * (1 if scenario.model.spec.tied_embeddings else 2)


def peak_memory(scenario: StepWorkload) -> Memory:
    """Predict the peak on the GPU that needs most."""
    spec, tokens = scenario.model.spec, scenario.micro_batch_tokens
    kept = spec.num_layers - scenario.recomputed_layers
    in_fp8 = scenario.fp8_layers / spec.num_layers
    per_layer = in_fp8 * saved_bytes(spec, scenario.recipe) + (1 - in_fp8) * saved_bytes(spec, "bf16")
    activations = tokens * (kept * per_layer + _BF16 * spec.hidden_size * scenario.recomputed_layers)
    chunk = default_chunk_tokens(tokens, spec.vocab_size, torch.bfloat16)
    # In one chunk the weight's gradient is bf16; in several it is summed in fp32 and then rounded beside it.
    head_gradient = _BF16 * scenario.model.head if tokens <= chunk else (_FP32 + _BF16) * scenario.model.head
    hidden = _BF16 * spec.hidden_size * tokens
    logits = min(tokens, chunk) * spec.vocab_size
    # Beside the logits four hidden states: the output of the last layer and of the norm, and their gradients.
    head: float = _BF16 * logits + head_gradient + 4 * hidden
    if scenario.fp8_lm_head_gemms:
        # At the cast of the logits' gradient there are three bytes for each and no gradient of the head or of its input
        # yet; at the weight's product one byte.
        summed = 0 if tokens <= chunk else _FP32 * scenario.model.head
        head = max(3 * logits + summed + 3 * hidden, logits + head_gradient + 4 * hidden)
    if scenario.recomputed_layers:  # one after the other, when what the head took is free
        head = max(head, tokens * per_layer)
    cast_layers = scenario.fp8_layers if scenario.keeps_casts else 0
    head_copies = max(0, scenario.fp8_lm_head_gemms - 1)  # one layout of the weight, or both
    casts = 2 * cast_layers * scenario.model.layer_linear + head_copies * scenario.model.head
    has_gradients = scenario.micro_batches > 1
    state = _standing_bytes(scenario, has_gradients) + _gathered_bytes(scenario)
    whole_gradients = _standing_bytes(scenario, True) + _gathered_bytes(scenario)
    if not has_gradients and whole_gradients + tokens * per_layer > state + activations + head:
        state, activations, head = whole_gradients, tokens * per_layer, 0.0
        has_gradients = True
    return Memory(state / GIB, casts / GIB, activations / GIB, head / GIB, _gather_stream_bytes(scenario) / GIB)
