"""Peak memory of a GPU's tensors, by part.

The peak is at the start of the last micro-batch's backward pass: every layer's saved tensors, the logits and the
gradient of the lm_head exist at once, beside weights, optimizer state and the gradients of earlier micro-batches. Of
recomputed layers only the inputs are kept; one of them in full follows when the head's memory is free. With a single
micro-batch there are no such gradients yet, and the end of the backward pass, with all gradients and no activations,
may be the peak instead; under fsdp_full so may the reduction of the outermost unit's gradients, the last. With CUDA
graphs gradients always exist, and activations exist twice where a micro-batch runs eagerly.

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

Under FSDP the allocator reserves more than that. It keeps memory by stream, and free memory of one stream serves no
other: the buffer of the largest gather, on the stream of the gathers, is empty at the peak. The gradients' shards are
allocated after the peak, in what the backward pass freed (llm_fp8/distributed/fsdp_internals.py). With a single
micro-batch that is activations alone, whose gaps are too small for some of the shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llm_fp8.distributed.sharding_mode import keeps_unsharded_gradients, state_bytes
from llm_fp8.kernels.cross_entropy import default_chunk_tokens
from llm_fp8.observability.metrics import GIB
from llm_fp8.optim.offload import NUM_BUFFERS, PIECE_ELEMENTS
from llm_fp8.optim.optimizers import bytes_per_parameter
from llm_fp8.tools.predict.workload import StepWorkload
from te_llama import DecoderSpec

_BF16, _FP32 = 2, 4
_BLOCK_SCALE = 1 / 32
"""Bytes per element of an fp32 scale for 128 elements."""
_SHARDS_WITHOUT_ROOM = 0.4
"""Share of the gradients' shards. Of the rows with one micro-batch under fsdp_full 0.30 and 0.42 in
multi_gpu_throughput_14b_x2.json, 0.37 and 0.40 in speed_table_h100.json, where fsdp_grad fills the GPU."""


@dataclass(frozen=True)
class Memory:
    """GiB of the parts at the peak."""

    state_gib: float
    """Weights, gradients kept between micro-batches, optimizer state, gathered weights, DDP's buckets."""
    weight_casts_gib: float
    """Under fsdp_full and --fp8_params those of an fp8 lm_head alone: a layer's casts are freed after its pass."""
    activations_gib: float
    head_gib: float
    """Logits, final hidden states and the gradient of the lm_head; or a recomputed layer, where that is more."""
    gather_stream_gib: float = 0.0
    """What the allocator reserves for FSDP2's stream of gathers and holds empty at the peak."""
    shards_without_room_gib: float = 0.0
    """What it reserves anew for shards of gradients while it holds as much in gaps."""

    @property
    def total_gib(self) -> float:
        return self.state_gib + self.weight_casts_gib + self.activations_gib + self.head_gib

    @property
    def reserved_gib(self) -> float:
        """What the allocator takes from the GPU, other gaps left out."""
        return self.total_gib + self.gather_stream_gib + self.shards_without_room_gib


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


def _standing_bytes(work: StepWorkload, outermost: int, with_gradients: bool) -> float:
    """Weights, gathered ones too, optimizer state and gradients on one GPU, at a time when gradients exist or do not.

    `outermost`: bytes of embedding and head, FSDP's outermost unit. Under fsdp_full it is gathered at the peak, and the
    last layer ahead of its backward pass.
    """
    gathered: float = 0.0
    if work.mode == "fsdp_full":
        gathered = outermost + (1 if work.fp8_weights else _BF16) * work.model.layer_linear
    return gathered + _kept_bytes(work, with_gradients)


def _kept_bytes(work: StepWorkload, with_gradients: bool) -> float:
    """`_standing_bytes` without what fsdp_full gathers for a unit."""
    config, parameters = work.config(), work.model.num_parameters
    kept = bytes_per_parameter(work.optimizer)
    total: float = state_bytes(work.mode, work.optimizer, work.num_gpus, config) * parameters
    if keeps_unsharded_gradients(work.mode, config):
        total -= kept.gradient / work.num_gpus * parameters  # the shards of gradients come with the reduction
    elif not with_gradients:
        total -= kept.gradient / (work.num_gpus if work.sharded else 1) * parameters
    if work.has_ddp:
        total += kept.gradient * parameters  # buckets
    if work.offload_optimizer:
        total += NUM_BUFFERS * kept.state * PIECE_ELEMENTS
    total += work.fp8_weights / work.num_gpus  # beside their masters
    if work.mode == "fsdp_grad":
        total -= (_BF16 - 1) * work.fp8_weights  # unsharded ones in one byte
    return total


def _reduction_bytes(work: StepWorkload, outermost: int) -> float:
    """The peak under fsdp_full as the outermost unit's gradients are reduced, with a single micro-batch.

    FSDP2's `foreach_reduce` lays them out in fp32 before it drops them and before it allocates their shards. Then its
    loop variable still holds the last one, lm_head's, beside the shards.
    """
    parameters, laid_out = outermost / _BF16, _FP32 * outermost / _BF16
    before_shards = outermost - _FP32 * parameters / work.num_gpus
    last = 0 if work.model.spec.tied_embeddings else _BF16 * work.model.head
    return _kept_bytes(work, with_gradients=True) + laid_out + max(before_shards, last)


def peak_memory(work: StepWorkload) -> Memory:
    """Predict the peak on the GPU that needs most."""
    spec, tokens = work.model.spec, work.micro_batch_tokens
    outermost = _BF16 * work.model.head * (1 if spec.tied_embeddings else 2)
    kept = spec.num_layers - work.recomputed_layers
    in_fp8 = work.fp8_layers / spec.num_layers
    per_layer = in_fp8 * saved_bytes(spec, work.recipe) + (1 - in_fp8) * saved_bytes(spec, "bf16")
    activations = tokens * (kept * per_layer + _BF16 * spec.hidden_size * work.recomputed_layers)
    chunk = default_chunk_tokens(tokens, spec.vocab_size, torch.bfloat16)
    # In one chunk the weight's gradient is bf16; in several it is summed in fp32 and then rounded beside it.
    summed = 0 if tokens <= chunk else _FP32 * work.model.head
    head_gradient = summed + _BF16 * work.model.head
    hidden = _BF16 * spec.hidden_size * tokens
    logits = min(tokens, chunk) * spec.vocab_size
    # Beside the logits four hidden states: the output of the last layer and of the norm, and their gradients.
    head: float = _BF16 * logits + head_gradient + 4 * hidden
    if work.fp8_lm_head_gemms:
        # At the cast of the logits' gradient three bytes for each, and no gradient of the head or of its input yet; at
        # the weight's GEMM one byte.
        head = max(3 * logits + summed + 3 * hidden, logits + head_gradient + 4 * hidden)
    if work.recomputed_layers:  # one after the other, when what the head took is free
        head = max(head, tokens * per_layer)
    cast_layers = work.fp8_layers if work.keeps_casts else 0
    head_copies = max(0, work.fp8_lm_head_gemms - 1)  # one layout of the weight, or both
    casts = 2 * cast_layers * work.model.layer_linear + head_copies * work.model.head
    state = _standing_bytes(work, outermost, with_gradients=work.micro_batches > 1 or work.cuda_graphs)
    if work.cuda_graphs:
        activations, head = 2 * activations, 2 * head  # of the graphs, and of an eager micro-batch
    elif work.micro_batches == 1:
        all_gradients = _standing_bytes(work, outermost, with_gradients=True)
        if all_gradients + tokens * per_layer > state + activations + head:
            state, activations, head = all_gradients, tokens * per_layer, 0.0
        if work.mode == "fsdp_full" and (reduction := _reduction_bytes(work, outermost)) > state + activations + head:
            state, activations, head = reduction, 0.0, 0.0
    # Beside the outermost unit as it is gathered, this GPU's part of it before.
    stream = outermost * (1 + 1 / work.num_gpus) if work.sharded else 0.0
    alone = work.sharded and work.micro_batches == 1
    new = _SHARDS_WITHOUT_ROOM * _FP32 * work.model.num_parameters / work.num_gpus if alone else 0.0
    return Memory(state / GIB, casts / GIB, activations / GIB, head / GIB, stream / GIB, new / GIB)
