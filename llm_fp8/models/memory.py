"""Estimate a run's GPU memory, by part, from its options and the model's config. No GPU and no weights are needed.

`RunSize.estimate` is within 1.2% of recorded runs of Llama, Qwen 2.5 to 3.5 and Gemma 3. Others are not yet measured.

Memory use is highest at the start of the last micro-batch's backward pass. At this time the saved tensors of all layers
(for recomputed layers only the inputs), the logits, the lm_head's gradient, the weights, the optimizer state and the
gradients of earlier micro-batches exist. In a step of one micro-batch there are no earlier gradients, so the peak may
also be in the backward pass of the first layer, of the last recomputed layer, or in fsdp_full of the second to last
layer, or in the reduction of the outermost unit's gradients. Graphs keep gradients, and activations exist twice.

Tensors that a layer saves per token (TE 2.20; `prepare_for_saving` in LayerNormLinear, Linear, LayerNormMLP and
FusedAttnFunc), with hidden size h, MLP size f, and q and kv the output sizes of the query and the key projection:

    bf16 elements   2 h        inputs of both norms (h for each norm, if a layer has more or fewer)
                    2 q + 2 kv rotated q and k, v; attention's output (Qwen3: q + kv more, inputs of their norms)
                    2 f        output of fc1
    fp32            1 per head attention's log-sum-exp
    GEMM inputs     2 h + f    in bf16: both norms' outputs and fc2's input
                    3 h + q + f  in fp8, one byte each: LayerNormMLP's in two layouts (block scaling: fc2's too)

A Hugging Face decoder layer saves at most the elements in `_layer_bytes`: norms also in fp32, keys and values repeated,
inputs of adapters, and masks of dropout. This bound is used for merging and recomputation.

The GEMM of a frozen weight needs no saved input. With LoRA, a layer saves the bf16 inputs of its adapters and the
low-rank products instead. In fp8, each LayerNormLinear also saves its fp8 input. An output gate saves its sigmoid (q)
and, if the next GEMM's input is bf16, its product (q). `DeltaNetSizes.saved_bytes` replaces attention's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Literal, TypeAlias

import torch
from transformers import PretrainedConfig

import te_llama
from llm_fp8.config.options import ALL_LINEAR, Config, OptimizerKind
from llm_fp8.config.recipes import RECIPES, row_of
from llm_fp8.kernels.cross_entropy import default_chunk_tokens
from llm_fp8.models.source import text_config
from llm_fp8.observability.metrics import GIB, RESERVE_GIB
from llm_fp8.optim.optimizers import OPTIMIZERS

MODES_COUNTED = ("single", "ddp", "fsdp_grad", "fsdp_full")
RECIPES_COUNTED = [name for name, row in RECIPES.items() if row.saved_bytes_per_element is not None]

Amount: TypeAlias = float | Literal["auto"]  # a value of --gradient_checkpointing
STATE, CASTS, ACTIVATIONS, HEAD = "weights, gradients, optimizer", "fp8 casts of weights", "activations", "lm_head"
_BF16, _FP32 = 2, 4
_SHARDS_WITHOUT_ROOM = 0.4  # largest fraction of gradient shards that needed new memory in recorded runs


@dataclass(frozen=True)
class Mode:
    """Properties of a sharding mode, which distributes a model over N GPUs. `unsharded_bytes` and `sharded_bytes` count
    weights, gradients and optimizer state per parameter between micro-batches. For example, `adamw_master` needs 12
    bytes on each GPU in ddp, 12 / N + 2 (for unsharded bf16 weights) in fsdp_grad and 12 / N in fsdp_full.
    """

    engine: Literal["copies", "fsdp", "deepspeed"]  # copies: every GPU has the whole model
    unsharded_bytes: int = 0  # on every GPU, in addition to its shard
    sharded_bytes: int = 0  # to divide by N, if the engine stores optimizer state; if 0, --optimizer sets them
    on_host: bool = False  # weights and optimizer state are in host memory

    @property
    def holds_masters(self) -> bool:
        """True if the engine stores fp32 master weights in addition to the model's parameters."""
        return self.sharded_bytes > 0


MODES = {  # 'single' for one process
    "single": Mode("copies"),
    "ddp": Mode("copies"),
    "fsdp_grad": Mode("fsdp", unsharded_bytes=2),
    "fsdp_full": Mode("fsdp"),
    "fsdp_hybrid": Mode("fsdp"),
    "fsdp_offload": Mode("fsdp", on_host=True),
    "deepspeed_1": Mode("deepspeed", unsharded_bytes=4, sharded_bytes=12),
    "deepspeed_2": Mode("deepspeed", unsharded_bytes=2, sharded_bytes=14),
    "deepspeed_3": Mode("deepspeed", sharded_bytes=16),
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Estimated memory of a run, on the GPU that needs the most memory."""

    parts: dict[str, float]  # GiB of tensors at the peak, as in `torch.cuda.max_memory_allocated`
    beside_gib: float = RESERVE_GIB  # GiB that the GPU needs in addition to tensors
    is_whole: bool = True  # False if only weights, gradients and optimizer state are included

    @property
    def total_gib(self) -> float:
        return sum(self.parts.values())

    @property
    def needed_gib(self) -> float:
        return self.total_gib + self.beside_gib


def saved_bytes(spec: te_llama.LayerSpec, recipe: str, adapted: frozenset[str], lora_rank: int) -> float:
    """Return the bytes that a TE decoder layer saves per token for backward. `adapted`: linears with an adapter."""
    h, f, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    num_norms = sum(name is not None for name in (*spec.attention_norms, *spec.mlp_norms))
    attention = _BF16 * (2 * q + 2 * kv + (q + kv) * spec.qk_norm + q * spec.output_gate) + _FP32 * spec.num_heads
    mixer = spec.delta_net.saved_bytes if spec.delta_net else attention
    gated = q * (spec.output_gate or spec.delta_net is not None)  # a GEMM's input other than attention's output
    per_token = mixer + _BF16 * (num_norms * h + 2 * f) + 2 * h * (spec.residual_dropout > 0)  # a mask has bytes
    if adapted:
        mlp = adapted & {"gate_proj", "up_proj", "gate_up_proj", "down_proj"}
        per_token += _BF16 * lora_rank * len(adapted & te_llama.linear_shapes(spec).keys())
        per_token += _BF16 * h * (bool(adapted & spec.projections.keys()) + bool(mlp - {"down_proj"}))
        per_token += _BF16 * (f * ("down_proj" in adapted) + gated * bool(adapted & {"o_proj", "out_proj"}))
        return per_token + (0 if recipe == "bf16" else h * (2 if mlp else 1))
    if recipe == "bf16":
        return per_token + _BF16 * (2 * h + f + gated)
    row = RECIPES[recipe]
    assert row.saved_bytes_per_element is not None, f"the memory of {recipe} is not measured"
    norms = 3 if "fprop" in row.gemms_in_fp8 and spec.mlp_norms[0] else 2  # measured: one more after norms in fp8
    return per_token + row.saved_bytes_per_element * (norms * h + q + f * (2 if row.saves_fc2_input_twice else 1))


def recomputed_layers(amount: Amount, num_layers: int) -> range:
    """Return the indices of the layers that --gradient_checkpointing `amount` recomputes: for a fraction the first
    layers (recomputed when backward has freed the others' activations), for n > 1 every n-th layer, for 'auto' all.
    """
    if amount == "auto":
        return range(num_layers)
    if amount > 1:
        return range(0, num_layers, int(amount))
    return range(max(round(amount * num_layers), 1 if amount else 0))


def resolve_optimizer(config: Config, mode: str, compute: str = "bf16", device_type: str = "cuda") -> OptimizerKind:
    """Return --optimizer or, if it is auto, the optimizer for a sharding mode and compute dtype (fp32, bf16, fp16)."""
    if config.optim.optimizer != "auto":
        return config.optim.optimizer
    row = MODES[mode]
    needs_fp32 = compute != "bf16" or device_type != "cuda" or row.on_host or row.holds_masters
    if row.engine == "fsdp" and not needs_fp32:
        # Gradient shards are summed in the parameters' dtype, and weights sharded in fp8 have fp32 master weights.
        needs_fp32 = config.parallel.sync_every_micro_batch or config.parallel.fp8_params or config.trains_adapters
    return "adamw_fp32" if needs_fp32 else "adamw_master"


def state_bytes(mode: str, kind: OptimizerKind, num_shards: int, config: Config) -> float:
    """Return the bytes per parameter of weights, gradients and optimizer state between micro-batches, on one of
    `num_shards` GPUs that share a copy of the model. If adapters are trained, include only the frozen weights.
    """
    row, optimizer = MODES[mode], OPTIMIZERS[kind]
    if row.on_host:
        return 0.0
    if config.trains_adapters:
        if row.engine != "fsdp":  # ZeRO 3 shards frozen weights too, which is ignored here
            return _BF16
        return _BF16 / num_shards + row.unsharded_bytes
    if row.engine == "copies":
        return optimizer.total_bytes - config.optim.offload_optimizer * optimizer.state_bytes
    gradients = _FP32 if keeps_unsharded_gradients(mode, config) else 0
    return (row.sharded_bytes or optimizer.total_bytes) / num_shards + row.unsharded_bytes + gradients


def keeps_unsharded_gradients(mode: str, config: Config) -> bool:
    """Return True if `mode` is an FSDP mode and every GPU stores unsharded gradients between micro-batches."""
    accumulates = config.optim.gradient_accumulation_steps > 1 and not config.parallel.sync_every_micro_batch
    return MODES[mode].engine == "fsdp" and accumulates and not config.trains_adapters


def holds_frozen_in_fp8(config: Config, mode: str, recipe: str | None) -> bool:
    """Return True if frozen weights can be in fp8 only. fsdp_offload and exports of random weights need bf16 ones."""
    exports_drawn = config.draws_weights and config.run.export
    needs_bf16 = exports_drawn or mode == "fsdp_offload" or "fprop" not in row_of(recipe).gemms_in_fp8
    return config.trains_adapters and config.model.use_te and not needs_bf16


@dataclass(frozen=True)
class RunSize:
    """Inputs of a run's memory estimate."""

    config: Config
    hf_config: PretrainedConfig
    recipe: str  # fp8 recipe, or bf16, fp16 or no
    mode: str  # sharding mode
    num_gpus: int  # number of GPUs that share a copy of the model
    num_parameters: int  # without adapters; tied weights count once
    lacks_delta_kernels: bool = False  # True if gated delta nets run torch code, whose memory is not counted

    @cached_property
    def sizes(self) -> te_llama.DecoderSizes | None:
        """Sizes of the decoder, or None if the TE decoder does not support the architecture."""
        with contextlib.suppress(te_llama.UnsupportedArchitecture):
            return te_llama.decoder_sizes(self.hf_config)
        return None

    @property
    def spec(self) -> te_llama.DecoderSizes | None:
        """Sizes of the TE decoder. None if the run has none or its activations are not counted."""
        counted = self.recipe in ("bf16", *RECIPES_COUNTED) and self.mode in MODES_COUNTED and self.config.model.use_te
        uncounted = (self.sharded and self.num_gpus == 1) or self.config.parallel.context_parallel_size > 1
        return self.sizes if counted and not (uncounted or self.lacks_delta_kernels) else None

    @property
    def optimizer(self) -> OptimizerKind:
        return resolve_optimizer(self.config, self.mode, "fp32" if self.recipe in ("no", "fp16") else "bf16")

    @property
    def sharded(self) -> bool:
        return MODES[self.mode].engine == "fsdp"

    @cached_property
    def adapted(self) -> frozenset[str]:
        """Names of the linear layers with an adapter."""
        targets = self.config.lora.targets if self.config.trains_adapters else ()
        layers = {*self.sizes.layers} if self.sizes and ALL_LINEAR in targets else ()
        return frozenset([name for layer in layers if layer for name in te_llama.linear_shapes(layer)] or targets)

    @property
    def shards_in_fp8(self) -> bool:
        """True if TE's weights are sharded in fp8. This requires --fp8_params, or frozen weights that have one scale
        each, can be divided equally among the GPUs by rows, and are never needed in bf16.
        """
        config, row, sizes = self.config, RECIPES.get(self.recipe), self.sizes
        if row is None or sizes is None or not (self.sharded and config.model.use_te and row.one_scale_per_weight):
            return False
        if config.parallel.fp8_params:
            return True
        splits = all(rows % self.num_gpus == 0 for rows in te_llama.linear_rows(sizes))
        return splits and holds_frozen_in_fp8(config, self.mode, self.recipe)

    def num_adapter_parameters(self, spec: te_llama.DecoderSizes) -> int:
        shapes = [shape for layer in spec.layers if layer for shape in te_llama.linear_shapes(layer).items()]
        return self.config.lora.lora_rank * sum(sum(shape) for name, shape in shapes if name in self.adapted)

    def changed(self, **options: Any) -> RunSize:
        """Return a copy with changed options (name=value)."""
        mode = options.get("sharding_mode", self.mode)
        return dataclasses.replace(self, config=self.config.with_options(**options), mode=mode)

    def estimate(self, upper_bound: bool = False) -> MemoryEstimate:
        """Estimate the memory by part. If `upper_bound`, include activations even if only a bound is known for them."""
        config, recipe, num_gpus = self.config, self.recipe, self.num_gpus
        spec = self.sizes if upper_bound and self.is_bounded else self.spec
        mode = "single" if num_gpus == 1 and self.mode == "ddp" else self.mode  # there is no communication
        mode = "fsdp_full" if upper_bound and mode in ("fsdp_hybrid", "fsdp_offload") else mode
        state = state_bytes(mode, self.optimizer, num_gpus, config) * self.num_parameters
        if spec is None:
            return MemoryEstimate({STATE: state / GIB}, is_whole=False)
        h, f, vocabulary, layers = spec.hidden_size, spec.intermediate_size, spec.vocab_size, len(spec.layers)
        te_layers = [layer for layer in spec.layers if layer is not None]
        layer_linear = h * fmean(sum(each.projections.values()) + each.q_size + 3 * f for each in te_layers)
        tokens = max(1, config.data.batch_size * config.data.max_seq_length)
        outermost = _BF16 * h * vocabulary * (1 if spec.tied_embeddings else 2)  # FSDP's unit of embedding and lm_head
        recomputes = recomputed_layers(config.model.gradient_checkpointing, layers)
        recomputed = len(recomputes)
        fp8_weights = layers * layer_linear if self.shards_in_fp8 else 0

        per_layer = self._layer_bytes(spec)
        # SwiGLU's backward pass adds the gradients of the layer's output (bf16, and in fp8 two layouts), of fc2's input
        # (bf16) and of fc1's output (two layouts).
        mixer = spec.delta_net.backward_bytes - 4 * f if spec.delta_net else 0  # the output of fc1 is freed before
        working = per_layer + max(mixer, 0 if self.adapted else 4 * h + 6 * f)
        activations = tokens * ((layers - recomputed) * per_layer + _BF16 * h * recomputed)

        chunk = default_chunk_tokens(tokens, vocabulary, torch.bfloat16)
        # With one chunk the weight's gradient is bf16. Several chunks sum it in fp32 and round it to a bf16 copy.
        gradient = 0 if self.adapted else (_BF16 if tokens <= chunk else _BF16 + _FP32) * h * vocabulary
        # In addition to the logits, the outputs of the last layer and of the norm exist, and their gradients.
        of_norm = 4 * _BF16 + 2 * _FP32 * spec.zero_centered_gain  # transformers' final norm saves fp32 if it has 1 + w
        head: float = _BF16 * min(tokens, chunk) * vocabulary + gradient + of_norm * h * tokens

        one_micro_batch = config.optim.gradient_accumulation_steps == 1
        keeps_casts = not config.precision.fp8_recast_weights
        if self.sharded:
            keeps_casts = mode == "fsdp_grad" and not (fp8_weights or config.parallel.fp8_params)
        layouts = 1 + ("fprop" in row_of(recipe).gemms_in_fp8)  # dgrad reads the transpose of fprop's layout
        casts = layouts * layers * layer_linear if recipe != "bf16" and keeps_casts else 0
        # Transposes of frozen weights with one scale exist only during a layer's backward pass.
        transposed = layer_linear if self.adapted and fp8_weights else 0
        if casts and not self.sharded and holds_frozen_in_fp8(config, mode, recipe):
            state -= _BF16 * layers * layer_linear
            if RECIPES[recipe].one_scale_per_weight:
                casts, transposed = casts // 2, layer_linear
        elif one_micro_batch and not (self.adapted or config.model.cuda_graphs):
            casts -= casts * recomputed // layers  # they last from a layer's forward to its backward pass only
        passes = [(1.0, activations, head)]  # share of gradients that is missing, stored tensors, tensors in use
        if recomputed:  # at the last such layer the memory of lm_head and of later layers is free
            num_below = recomputes[-1] + 1
            kept = tokens * ((num_below - recomputed) * per_layer + _BF16 * h * recomputed)
            passes.append((num_below / layers, kept, tokens * working + transposed))

        optimizer, unsharded = OPTIMIZERS[self.optimizer], keeps_unsharded_gradients(mode, config)
        gradient_bytes = optimizer.parameter_dtype.itemsize
        trained = self.num_adapter_parameters(spec) if self.adapted else self.num_parameters
        shards = num_gpus if self.sharded else 1
        if self.adapted:
            state += optimizer.total_bytes / shards * trained
        all_gradients = 0.0 if unsharded else gradient_bytes / shards * trained
        if unsharded:
            state -= gradient_bytes / num_gpus * trained  # gradient shards are allocated in the reduction
        if mode == "ddp" and not config.model.cuda_graphs:
            state += gradient_bytes * trained  # buckets
        # fp8 weights replace bf16 frozen weights, or exist in addition to master weights.
        state += (-1 if self.adapted else 1) * fp8_weights / num_gpus
        if mode == "fsdp_grad":
            state -= (_BF16 - 1) * fp8_weights  # unsharded weights take one byte
        angles = _FP32 * (te_llama.num_positions(text_config(self.hf_config)) or 0) * spec.head_dim
        state += angles * len({layer.rope for layer in te_layers})  # RoPE tables
        gathered = outermost + (1 if fp8_weights else _BF16) * layer_linear if mode == "fsdp_full" else 0.0

        graphs = config.model.cuda_graphs
        copies = 2 if graphs and not self.sharded else 1  # for the graphs and for an eager micro-batch
        if graphs and self.sharded:
            state += all_gradients  # gradients of graphs, in addition to those of an eager micro-batch
        absent = all_gradients if one_micro_batch and copies == 1 else 0.0  # when the backward pass begins
        peaks = [(state + gathered - share * absent, copies * stored, copies * used) for share, stored, used in passes]
        # In fsdp_full: fp32 gradients of the next layer, while they are reduced, and gradients of fc2 and lm_head.
        is_full = mode == "fsdp_full" and not self.adapted
        beside_layer = _FP32 * layer_linear + _BF16 * h * (f + vocabulary) if is_full else 0.0
        if absent:  # the first layer, last in the backward pass
            peaks.append((state + gathered + beside_layer, 0.0, tokens * working))
            if beside_layer:  # torch's `foreach_reduce` copies the outermost unit's bf16 gradients to fp32
                peaks.append((state + 3 * outermost, 0.0, 0.0))
            if beside_layer and layers - 2 not in recomputes:  # second to last layer, when fc1's gradient is computed
                live = gathered + beside_layer + (_BF16 + gradient_bytes / num_gpus) * layer_linear - all_gradients
                live += h * f * (4 if recipe == "bf16" else 7)  # in fp8 also weights for dgrad
                below, saved = activations - 2 * tokens * per_layer, per_layer + 4 * h + f
                peaks.append((state + live, below, tokens * saved))
        if recomputed and beside_layer and not unsharded:  # the last recomputed layer
            live = state - absent + _BF16 * layer_linear  # weights of the previous layer
            peaks.append((live + gathered + beside_layer, kept - _BF16 * h * tokens, tokens * working))
        parts = max(peaks, key=sum)
        untracked = 0.0
        if self.sharded:
            untracked = outermost * (1 + 1 / num_gpus)  # the gathered unit and this GPU's shard
            if graphs:
                untracked += max(stored + used for _, stored, used in passes)  # those of an eager micro-batch
            if one_micro_batch:
                untracked += _SHARDS_WITHOUT_ROOM * gradient_bytes * trained / num_gpus
        elif mode == "ddp":
            untracked = 2 * trained  # measured on the first GPU in 3 of 10 recorded runs
        sizes = {STATE: parts[0], CASTS: casts, ACTIVATIONS: parts[1], HEAD: parts[2]}
        return MemoryEstimate({name: size / GIB for name, size in sizes.items() if size}, RESERVE_GIB + untracked / GIB)

    def _layer_bytes(self, spec: te_llama.DecoderSizes) -> float:
        """Return the mean bytes of a layer per token: exact for TE layers in one precision, else an upper bound."""
        adapters = (self.adapted, self.config.lora.lora_rank)
        if self.spec is not None:
            recipes = (self.recipe, "bf16") if self.config.precision.fp8_bf16_modules else (self.recipe,)
            return max(fmean(saved_bytes(layer, name, *adapters) for layer in spec.layers if layer) for name in recipes)
        h, q, kv, f = spec.hidden_size, spec.q_size, spec.kv_size, spec.intermediate_size
        elements = 8 * h + 5 * q + 4 * f + 3 * (q + kv) * spec.qk_norm + (2 * h + q + kv) * self.config.trains_adapters
        masks = (5 * h + q + f) * (self.config.lora.lora_dropout > 0)
        return float(_BF16 * (elements + self.config.data.max_seq_length) + masks)  # attention's mask: a row per token

    @property
    def is_bounded(self) -> bool:
        """True if an upper bound of memory is known. It is unknown for Hugging Face's decoder in fp32 or in
        torch.autocast, for eager attention, and for modes with their own master weights, whose buffers are unknown.
        """
        in_fp32 = OPTIMIZERS[self.optimizer].parameter_dtype == torch.float32
        casts = in_fp32 and not self.sharded and not self.config.model.use_te
        eager = self.config.model.attn_implementation == "eager"
        norms = (self.sizes.zero_centered_gain or self.sizes.joint_qk_norm) if self.sizes else False
        if self.sizes and (self.sizes.delta_net or (norms and not self.config.model.use_te)):
            return False  # only `spec` counts; and transformers saves fp32 results of Gemma's and OLMo's norms
        return not (casts or eager or self.recipe in ("no", "fp16") or MODES[self.mode].holds_masters)
