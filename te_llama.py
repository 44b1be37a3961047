"""Models of many families (`FAMILIES`) with decoder layers made of Transformer Engine (TE) modules.

`build_te_model(config, ...)` returns Hugging Face's `LlamaForCausalLM` (or `Qwen2ForCausalLM`, ...) and replaces its
decoder layers, rotary table and final norm (unless its gain is 1 + w). Embedding, `lm_head`, `generate`,
`save_pretrained` and PEFT support are Hugging Face's.

For each model family, a function (see `FAMILIES`) returns a `LayerSpec` for each layer of a config, or None for a layer
that is not replaced. A Llama layer looks like this:

    hidden [B, S, h]
      ├─ LayerNormLinear    RMSNorm + one fused QKV GEMM -> [B, S, (heads + 2 * kv_heads) * head_dim]
      │   split into q, k, v and RoPE with fp32 angles in one kernel (`llm_fp8.kernels.rope_triton`)
      │       (Qwen3 normalises every q and k head in between; QK norm, GLM-4 and context parallelism need TE's RoPE)
      │   DotProductAttention   cuDNN or flash-attn, causal, GQA, sliding window
      │   Linear                output projection
      ├─ + residual
      ├─ LayerNormMLP       RMSNorm + fc1 (gate, then up) + SwiGLU + fc2; the backward pass of SwiGLU and the cast to
      │                     fp8 are one kernel (`llm_fp8.kernels.swiglu`)
      └─ + residual

Gemma 3 has GeGLU, norms with gain 1 + w, two more norms before the residuals are added, and two rotary tables. Most of
Qwen3.5's layers have a gated delta net (`llm_fp8.mixers.delta_net`) between their first GEMM and `Linear`.

TE's fused modules quantise an activation once per group of GEMMs, fuse the norm with the cast, and have fp8 kernels for
fprop, dgrad and wgrad. This file does not select a precision: the modules run in fp8 under `te.autocast`, and otherwise
in the dtype of their parameters.

There are four forms of input for attention:
- packed: `input_ids [1, T]` with `cu_seq_lens_q` int32 [n + 1]. Documents do not attend to each other, and each starts
  at position 0.
- padded on the right: `input_ids [B, S]` with `cu_seq_lens_q` int32 [B + 1], the cumulative sum of the real lengths.
- context parallel (`set_context_parallel_group`): `input_ids [1, T / C]`, this rank's slice of the packed form, with
  the `cu_seq_lens_q` of the unsliced documents.
- general (generation with a KV cache, any 2-D or 4-D mask, any position ids): uses Hugging Face's masks and torch's
  SDPA. This form is slower and is not used in training.

`parameter_map` defines how TE's and Hugging Face's parameters correspond: every TE tensor consists of one or more
Hugging Face tensors, stacked along dim 0. Conversion is slicing, so it is exact in both directions and needs no GPU.

Sources: TE 2.20; transformers 5 (`modeling_llama.py` and its siblings) for architectures and rotary frequencies.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from llm_fp8.kernels.swiglu import fuse_swiglu_backward
from llm_fp8.utils.torch_internals import materialize_

if TYPE_CHECKING:
    from llm_fp8.mixers.delta_net import DeltaNetSizes

ACTIVATIONS = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu"}
"""Hugging Face's name of the gate's activation -> Transformer Engine's name of the gated activation."""
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
"""RoPE types whose frequencies do not depend on the sequence length (longrope's do not up to a limit)."""
NO_ROPE = "no RoPE"
"""Value of `LayerSpec.rope` and key of the table, with angles of 0, for layers that do not rotate q and k."""


class UnsupportedArchitecture(ValueError):
    """Raised if the TE decoder does not support an entry of the config; the message contains the entry."""


@dataclass(frozen=True)
class Part:
    """Position of a Hugging Face tensor in a parameter of the model. The tensor is rows `start` to `stop` of dim 0 or,
    if `strides` is given, a strided view that begins `offset` elements after the start of row `start`. Such a view
    either lies in a single row of the parameter, or has its row i in row `start` + i of the parameter.
    """

    hf_name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    offset: int = 0

    @property
    def by_rows(self) -> bool:
        """True if each row of the parameter from `start` to `stop` contains one row of the tensor."""
        return self.strides is None or self.stop - self.start > 1

    def view(self, rows: Tensor) -> Tensor:
        """View `rows`, all or some of the parameter's rows `start` to `stop`, as the tensor or a part of it."""
        if self.strides is None:
            return rows
        shape = (len(rows), *self.shape[1:]) if self.by_rows else self.shape
        return rows.as_strided(shape, self.strides, rows.storage_offset() + self.offset)


def num_positions(config: Any) -> int | None:
    """Return the largest number of positions that a language model's config allows, or None if there is no limit.

    It is the larger of max_position_embeddings and the length before RoPE scaling times the scaling's `factor`. Dynamic
    scaling is not counted, since its frequencies depend on the longest sequence so far. max_position_embeddings stands
    in for a missing length before scaling, but not if there are several tables: Gemma 3's value is already scaled.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    limits, shared_table = [limit], getattr(config, "rope_parameters", None)
    for table in rope_tables(config):
        unscaled = table.get("original_max_position_embeddings") or (limit if table is shared_table else 0)
        if table.get("rope_type") != "dynamic":
            limits.append(int((table.get("factor") or 0) * unscaled))
    return max(limits)


def rope_tables(config: Any) -> list[dict[str, Any]]:
    """Return the config entries of each RoPE table. There is one table for all layers, or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [part for part in (rope, *rope.values()) if isinstance(part, dict)]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Sizes (numbers of elements) and features of one TE decoder layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    attention_scale: float  # factor of q k before the softmax, without YaRN's `attention_scaling`
    attention_dropout: float = 0.0
    window: int | None = None  # number of last positions that a token attends to, including its own; None for all
    rope: str | None = None  # key of the RoPE table: the layer type or `NO_ROPE`; None if all layers share one table
    interleaved_rope: bool = False  # True if RoPE rotates pairs of neighbours, not pairs of the first and second half
    activation: str = "swiglu"  # Transformer Engine's name: "swiglu", or "geglu" with the tanh approximation of GELU
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False  # True if the QK norm is over all heads together, not over each head
    fused_projections: tuple[str, ...] = ()
    """Hugging Face's linear layers that hold several: qkv_proj (q, k and v), gate_up_proj (gate and up)."""
    residual_dropout: float = 0.0
    residual_scale: float = 1.0  # factor of the outputs of attention and MLP when they are added to the residual
    output_gate: bool = False  # True if q_proj also returns gates, whose sigmoid multiplies attention's output
    delta_net: DeltaNetSizes | None = None  # sizes of the gated delta net that replaces attention
    zero_centered_gain: bool = False  # True if all norms multiply by 1 + weight instead of weight
    attention_norms: tuple[str | None, str | None] = ("input_layernorm", None)
    """Hugging Face's names of the norms before and after attention, or None for no norm."""
    mlp_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None)
    """Hugging Face's names of the norms before and after the MLP, or None for no norm."""
    unfused_mlp: bool = False
    """If True, fc1 and fc2 are separate modules, as adapters and MLPs without a norm before them require. Slower."""

    @property
    def q_size(self) -> int:
        """Number of output features of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Number of output features of the key projection. The value projection has the same number."""
        return self.num_kv_heads * self.head_dim

    @property
    def projections(self) -> dict[str, int]:
        """Hugging Face's name of each projection of the layer's input -> number of its output features."""
        if self.delta_net is not None:
            return self.delta_net.projections
        sizes = {"q_proj": self.q_size * (1 + self.output_gate), "k_proj": self.kv_size, "v_proj": self.kv_size}
        return {"qkv_proj": sum(sizes.values())} if "qkv_proj" in self.fused_projections else sizes

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Numbers of elements over which the norms of q and k are computed."""
        return (self.q_size, self.kv_size) if self.joint_qk_norm else (self.head_dim, self.head_dim)

    @property
    def norm_options(self) -> dict[str, Any]:
        """Arguments for Transformer Engine's modules that include a norm."""
        return {"eps": self.norm_eps} | ({"zero_centered_gamma": True} if self.zero_centered_gain else {})


LayerSpecs: TypeAlias = tuple[LayerSpec | None, ...]
"""Description of each decoder layer. None for a layer that is not replaced by a TE layer."""


@dataclass(frozen=True, kw_only=True)
class DecoderSizes(LayerSpec):
    """Sizes of a decoder for estimating memory: those of its largest layer, or of a gated delta net, if it has any."""

    layers: LayerSpecs
    vocab_size: int
    tied_embeddings: bool


def _llama(config: Any, **features: Any) -> tuple[LayerSpec, ...]:
    """Describe layers like Llama's. `features` are the fields of `LayerSpec` in which a family differs from its config,
    such as `window` for classes of Hugging Face that ignore `sliding_window` or `layer_types`.
    """
    hidden_act = getattr(config, "hidden_activation", None) or config.hidden_act
    if hidden_act not in ACTIVATIONS:
        raise UnsupportedArchitecture(f"hidden_act '{hidden_act}' is not one of {', '.join(ACTIVATIONS)}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bias = bool(getattr(config, "attention_bias", False))
    common: dict[str, Any] = dict(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        attention_scale=1 / math.sqrt(head_dim),
        attention_dropout=config.attention_dropout,
        activation=ACTIVATIONS[hidden_act],
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
    )
    tables = getattr(config, "rope_parameters", None) or {}
    windows = {"sliding_attention": getattr(config, "sliding_window", None)}
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    by_layer = [{"window": windows.get(kind), "rope": kind if kind in tables else None} for kind in types]
    return tuple(LayerSpec(**common | fields | features) for fields in by_layer)


def _mistral(config: Any) -> LayerSpecs:
    """Describe Mistral and Ministral 3, in which all layers have the same window."""
    return _llama(config, window=config.sliding_window)


def _smollm3(config: Any) -> LayerSpecs:
    """Describe SmolLM3, in which some layers have no RoPE."""
    rotated = zip(_llama(config), config.no_rope_layers, strict=False)
    return tuple(spec if has_rope else replace(spec, rope=NO_ROPE) for spec, has_rope in rotated)


def _seed_oss(config: Any) -> LayerSpecs:
    """Describe Seed-OSS, which has its own entry for the output bias, and dropout before residuals are added."""
    dropout = config.residual_dropout
    return _llama(config, window=None, output_bias=config.attention_out_bias, residual_dropout=dropout)


def _granite(config: Any) -> LayerSpecs:
    """Describe Granite. Its other multipliers, of embeddings and logits, are outside the layers."""
    scales = {"attention_scale": config.attention_multiplier, "residual_scale": config.residual_multiplier}
    return _llama(config, window=None, **scales)


def _gemma3(config: Any) -> LayerSpecs:
    """Describe Gemma 3, which has four norms with gain 1 + w, GeGLU, and a RoPE table for each of two layer types."""
    for entry in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, entry, None):
            raise UnsupportedArchitecture(f"Transformer Engine's attention does not support {entry}")
    return _llama(
        config,
        qk_norm=True,
        zero_centered_gain=True,
        attention_norms=("input_layernorm", "post_attention_layernorm"),
        mlp_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
        attention_scale=1 / math.sqrt(config.query_pre_attn_scalar),
    )


def _phi3(config: Any) -> LayerSpecs:
    """Describe Phi-3 and Phi-4, which have fused projections and may have dropout before residuals are added."""
    fused = ("qkv_proj", "gate_up_proj")
    return _llama(config, window=config.sliding_window, fused_projections=fused, residual_dropout=config.resid_pdrop)


def _glm4(config: Any) -> LayerSpecs:
    """Describe GLM-4, which has four norms, a fused gate and up projection, and RoPE in pairs of neighbours."""
    norms = {"attention_norms": ("input_layernorm", "post_self_attn_layernorm")}
    norms |= {"mlp_norms": ("post_attention_layernorm", "post_mlp_layernorm")}
    features: dict[str, Any] = {"interleaved_rope": True, "fused_projections": ("gate_up_proj",), "output_bias": False}
    return _llama(config, window=None, **norms, **features)


def _olmo(config: Any, joint_qk_norm: bool = True, **features: Any) -> tuple[LayerSpec, ...]:
    """Describe OLMo 2 and 3, which have norms after attention and MLP only, and norms over all of q and all of k."""
    norms: dict[str, Any] = {"attention_norms": (None, "post_attention_layernorm")}
    norms |= {"mlp_norms": (None, "post_feedforward_layernorm")}
    return _llama(config, qk_norm=True, joint_qk_norm=joint_qk_norm, **norms, **features)


def _exaone4(config: Any) -> LayerSpecs:
    """Describe EXAONE 4: OLMo's norms, but over each head of q and k, and RoPE only in layers with a window, if any."""
    specs = _olmo(config, joint_qk_norm=False)
    return tuple(replace(spec, rope=NO_ROPE) if config.sliding_window and not spec.window else spec for spec in specs)


def _qwen3_5(config: Any) -> LayerSpecs:
    """Describe Qwen3.5: attention with an output gate in some layers, gated delta nets in the others."""
    from llm_fp8.mixers.delta_net import DeltaNetSizes

    attention, sizes = _llama(config, qk_norm=True, output_gate=True, zero_centered_gain=True), DeltaNetSizes.of(config)
    if sum(sizes.projections.values()) % 16 != 0 or config.hidden_act != "silu" or config.attention_bias:
        raise UnsupportedArchitecture("gated delta nets need SiLU, no biases and, for fp8, a multiple of 8 value heads")
    net: dict[str, Any] = dict(num_heads=sizes.num_heads, head_dim=sizes.head_dim, qk_norm=False, output_gate=False)
    types = zip(attention, config.layer_types, strict=True)
    return tuple(replace(spec, delta_net=sizes, **net) if name == "linear_attention" else spec for spec, name in types)


FAMILIES: dict[str, Callable[[Any], LayerSpecs]] = {
    "llama": functools.partial(_llama, window=None),
    **dict.fromkeys(("mistral", "mistral3", "ministral3"), _mistral),
    "qwen2": functools.partial(_llama, qkv_bias=True, output_bias=False),  # no entry of the config says so
    **dict.fromkeys(("qwen3", "qwen3_vl"), functools.partial(_llama, qk_norm=True)),
    "smollm3": _smollm3,
    "seed_oss": _seed_oss,
    "granite": _granite,
    "phi3": _phi3,
    "glm4": _glm4,
    "olmo2": functools.partial(_olmo, window=None),
    "olmo3": _olmo,
    "exaone4": _exaone4,
    **dict.fromkeys(("gemma3", "gemma3_text"), _gemma3),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _qwen3_5),
}
"""model_type -> function from the language model's config to the description of its layers."""


def layer_specs(config: PretrainedConfig, unfused_mlp: bool = False, num_tokens: int = 0) -> LayerSpecs:
    """Describe the decoder layers of a model, given its Hugging Face config. For `unfused_mlp` see `LayerSpec`. Raise
    `UnsupportedArchitecture` if the TE decoder does not support the model, or documents of `num_tokens`: longrope has
    other frequencies, and Ministral 3 other scores, in documents longer than original_max_position_embeddings.
    """
    if config.model_type not in FAMILIES:
        raise UnsupportedArchitecture(
            f"model_type '{config.model_type}' has no TE decoder (supported: {', '.join(FAMILIES)})"
        )
    decoder = config.get_text_config(decoder=True)
    for table in rope_tables(decoder):
        if (rope_type := table.get("rope_type", "default")) not in STATIC_ROPE_TYPES:
            raise UnsupportedArchitecture(f"rope_type '{rope_type}' depends on the sequence length at run time")
        if rope_type in ("longrope", "yarn") and table.get("partial_rotary_factor", 1) != 1:
            raise UnsupportedArchitecture(f"partial_rotary_factor with rope_type '{rope_type}', as in Phi-4-mini")
        changes = rope_type == "longrope" or table.get("llama_4_scaling_beta")
        if changes and num_tokens > (limit := table["original_max_position_embeddings"]):
            raise UnsupportedArchitecture(f"--max_seq_length above {limit} would change its RoPE or attention scores")
    specs = FAMILIES[config.model_type](decoder)
    return tuple(spec and replace(spec, unfused_mlp=unfused_mlp or spec.mlp_norms[0] is None) for spec in specs)


def decoder_sizes(config: PretrainedConfig) -> DecoderSizes:
    """Return the sizes of a whole decoder. Raise `UnsupportedArchitecture` if `layer_specs` does."""
    specs, decoder = layer_specs(config), config.get_text_config(decoder=True)
    largest = max(filter(None, specs), key=lambda spec: (spec.delta_net is not None, spec.intermediate_size))
    head = {"vocab_size": decoder.vocab_size, "tied_embeddings": bool(config.tie_word_embeddings)}
    return DecoderSizes(**vars(largest), layers=specs, **head)


def stacked(*tensors: tuple[str, tuple[int, ...]]) -> tuple[Part, ...]:
    """Return the parts of a parameter that stacks `tensors` (name, shape) along dim 0. A scalar fills one row."""
    parts: list[Part] = []
    for name, shape in tensors:
        start = parts[-1].stop if parts else 0
        parts.append(Part(name, start, start + (shape[0] if shape else 1), shape))
    return tuple(parts)


def layer_map(spec: LayerSpec) -> dict[str, tuple[Part, ...]]:
    """Return the `parameter_map` of one TE decoder layer, with names relative to the layer."""
    h, ffn, inputs = spec.hidden_size, spec.intermediate_size, spec.projections.items()
    mixer, output = ("self_attn", "o_proj") if spec.delta_net is None else ("linear_attn", "out_proj")
    entries = {"qkv.weight": stacked(*((f"{mixer}.{name}.weight", (size, h)) for name, size in inputs))}
    if spec.qkv_bias:
        entries["qkv.bias"] = stacked(*((f"{mixer}.{name}.bias", (size,)) for name, size in inputs))
    if spec.delta_net is not None:
        for name, shape in spec.delta_net.parameters.items():
            entries[f"delta_net.{name}"] = stacked((f"{mixer}.{name}", shape))
    if spec.qk_norm:
        for name, size in zip(("q_norm.weight", "k_norm.weight"), spec.qk_norm_sizes, strict=True):
            entries[name] = stacked((f"{mixer}.{name}", (size,)))
    entries["output.weight"] = stacked((f"{mixer}.{output}.weight", (h, spec.q_size)))
    if spec.output_bias:
        entries["output.bias"] = stacked((f"{mixer}.{output}.bias", (h,)))
    norm, fc1, fc2 = ("mlp.fc1.", "mlp.fc1.", "mlp.fc2.") if spec.unfused_mlp else ("mlp.", "mlp.fc1_", "mlp.fc2_")
    # TE's SwiGLU and GeGLU apply the activation to the first half of fc1, as Hugging Face does to gate_up_proj.
    fused = "gate_up_proj" in spec.fused_projections
    gate_up = {"gate_up_proj": 2 * ffn} if fused else {"gate_proj": ffn, "up_proj": ffn}
    entries[f"{fc1}weight"] = stacked(*((f"mlp.{name}.weight", (size, h)) for name, size in gate_up.items()))
    entries[f"{fc2}weight"] = stacked(("mlp.down_proj.weight", (h, ffn)))
    if spec.mlp_bias:
        entries[f"{fc1}bias"] = stacked(*((f"mlp.{name}.bias", (size,)) for name, size in gate_up.items()))
        entries[f"{fc2}bias"] = stacked(("mlp.down_proj.bias", (h,)))
    norms = ("qkv.layer_norm_weight", "output_norm.weight", f"{norm}layer_norm_weight", "mlp_norm.weight")
    for name, hf_name in zip(norms, (*spec.attention_norms, *spec.mlp_norms), strict=True):
        if hf_name:
            entries[name] = stacked((f"{hf_name}.weight", (h,)))
    return entries


def parameter_map(model: nn.Module) -> dict[str, tuple[Part, ...]]:
    """For each parameter of `model`, return the Hugging Face tensors that are stacked along its dim 0, in order.

    A parameter outside TE layers consists of one tensor, which has the parameter's name. Adapters inside TE layers have
    no entry. A tied `lm_head.weight` has none either, since it is the embedding.
    """
    maps: dict[str, dict[str, tuple[Part, ...]]] = {}
    for layer, module in model.named_modules():
        if isinstance(module, TEDecoderLayer):
            maps[f"{layer}."] = {
                f"{layer}.{name}": tuple(replace(part, hf_name=f"{layer}.{part.hf_name}") for part in parts)
                for name, parts in layer_map(module.spec).items()
            }
    entries: dict[str, tuple[Part, ...]] = {}
    for name, parameter in model.named_parameters():
        layer_entries = next((of_layer for prefix, of_layer in maps.items() if name.startswith(prefix)), None)
        entries |= layer_entries or {name: stacked((name, tuple(parameter.shape)))}
    return entries


def linear_shapes(spec: LayerSpec) -> dict[str, tuple[int, ...]]:
    """Return the weight's shape [out, in] of each linear layer of a Hugging Face layer, by its name, such as q_proj."""
    parts = itertools.chain.from_iterable(layer_map(spec).values())
    return {part.hf_name.split(".")[-2]: part.shape for part in parts if len(part.shape) == 2}


def linear_rows(sizes: DecoderSizes) -> set[int]:
    """Return the numbers of rows that the linear weights in TE decoder layers have."""
    maps = [layer_map(spec) for spec in {*sizes.layers} if spec is not None]
    return {parts[-1].stop for entries in maps for parts in entries.values() if len(parts[0].shape) == 2}


def in_hf_layout(entries: Mapping[str, tuple[Part, ...]], te_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return views of `te_tensors` (parameters or their gradients) with Hugging Face's names and shapes, according to
    `entries` of a `parameter_map`. Like checkpoints, the result has no tied `lm_head.weight`.
    """
    return {
        part.hf_name: te_tensors[te_name][part.start : part.stop]
        for te_name, parts in entries.items()
        for part in parts
    }


class RotaryTable(nn.Module):
    """RoPE angles of every position, with Hugging Face's frequencies. All layers, or all of one type, share a table.

    `angles` are fp32 [max_positions, 1, 1, rotary_dim] in the layout of TE's fused kernel: the halves of the last
    dimension are equal, or neighbours if `interleaved`. YaRN also multiplies cos and sin by a = `attention_scaling`. We
    multiply the softmax scale by a² instead, since (a q)(a k) = a² q k.
    """

    def __init__(self, config: Any, hf_class: type[nn.Module], device: torch.device, interleaved: bool = False) -> None:
        super().__init__()
        with torch.device("cpu"):
            reference: Any = hf_class(config)
        positions = torch.arange(num_positions(config) or 0, dtype=torch.float32)
        self.attention_scaling: dict[str | None, float] = {}
        # A plain attribute rather than a buffer, because casting the model to bf16 must not cast it.
        self.angles: dict[str | None, Tensor] = {}
        for layer_type in getattr(reference, "layer_types", [None]):
            prefix = f"{layer_type}_" if layer_type else ""
            self.attention_scaling[layer_type] = float(getattr(reference, f"{prefix}attention_scaling"))
            angles = torch.outer(positions, getattr(reference, f"{prefix}inv_freq").float())
            angles = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat((angles, angles), dim=-1)
            self.angles[layer_type] = angles[:, None, None, :].to(device)

    def forward(self, *_: object, **__: object) -> None:
        """Return no cos and sin to Hugging Face's model, since TE layers have their own `angles`."""


def _input_linear(spec: LayerSpec, norm: str | None, size: int, bias: bool, shared: dict[str, Any]) -> nn.Module:
    """Return attention's or the MLP's first linear layer, with `size` outputs, after RMSNorm unless `norm` is None."""
    import transformer_engine.pytorch as te

    if norm is None:
        return te.Linear(spec.hidden_size, size, bias=bias, **shared)
    options = {"normalization": "RMSNorm", **spec.norm_options, **shared}
    return te.LayerNormLinear(spec.hidden_size, size, bias=bias, **options)


class UnfusedMLP(nn.Module):
    """LayerNormMLP with `fc1` and `fc2` as separate modules."""

    def __init__(self, spec: LayerSpec, shared: dict[str, Any]) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.fc1 = _input_linear(spec, spec.mlp_norms[0], 2 * spec.intermediate_size, spec.mlp_bias, shared)
        self.activation = {"swiglu": te.ops.SwiGLU, "geglu": te.ops.GEGLU}[spec.activation]()
        self.fc2 = te.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias, **shared)

    def forward(self, hidden_states: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Return the MLP's output [B, S, h]. For `is_first_microbatch` see `TEDecoderLayer`."""
        activated = self.activation(self.fc1(hidden_states, is_first_microbatch=is_first_microbatch))
        return self.fc2(activated, is_first_microbatch=is_first_microbatch)


class TEDecoderLayer(GradientCheckpointingLayer):
    """Decoder layer with the call signature of Hugging Face's layers. It returns hidden states [B, S, h].

    If `is_first_microbatch` is True, a forward pass casts the weights to fp8 and stores the casts. If it is False, the
    pass uses the stored casts. If it is None, the casts are not stored. Outside fp8 the attribute has no effect.
    """

    def __init__(
        self, spec: LayerSpec, layer: int, softmax_scale: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.layer = layer
        self.spec = spec
        self.is_first_microbatch: bool | None = None
        # Hugging Face's SDPA function reads these attributes.
        self.num_key_value_groups = spec.num_heads // spec.num_kv_heads
        self.is_causal = True
        self.softmax_scale = softmax_scale
        self.angles: Tensor | None = None  # of `RotaryTable`
        self.context_size, self.context_rank = 1, 0
        # TE compares `device` with "meta" to skip allocation, so it must be a string, not a torch.device.
        shared: dict[str, Any] = {"params_dtype": dtype, "device": str(device)}
        size = sum(spec.projections.values())
        self.qkv = _input_linear(spec, spec.attention_norms[0], size, spec.qkv_bias, shared)
        norm = functools.partial(te.RMSNorm, **spec.norm_options, dtype=dtype, device=device)
        if spec.qk_norm:
            self.q_norm, self.k_norm = map(norm, spec.qk_norm_sizes)
        if spec.delta_net is not None:
            from llm_fp8.mixers.delta_net import DeltaNet

            self.delta_net = DeltaNet(spec.delta_net, spec.norm_eps, layer, dtype, device)
        else:
            self.attention = te.DotProductAttention(
                spec.num_heads,
                spec.head_dim,
                num_gqa_groups=spec.num_kv_heads,
                attention_dropout=spec.attention_dropout,
                qkv_format="bshd",
                attn_mask_type="causal",
                window_size=(-1, 0) if spec.window is None else (spec.window - 1, 0),
                softmax_scale=softmax_scale,
                layer_number=layer + 1,
            )
        self.output = te.Linear(spec.q_size, spec.hidden_size, bias=spec.output_bias, **shared)
        self.output_norm = norm(spec.hidden_size) if spec.attention_norms[1] else None
        self.mlp: nn.Module
        if spec.unfused_mlp:
            self.mlp = UnfusedMLP(spec, shared)
        else:
            options = {"normalization": "RMSNorm", "activation": spec.activation, **spec.norm_options, **shared}
            self.mlp = te.LayerNormMLP(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias, **options)
            if spec.activation == "swiglu" and not spec.mlp_bias:
                fuse_swiglu_backward(self.mlp)
        self.mlp_norm = norm(spec.hidden_size) if spec.mlp_norms[1] else None

    def set_context_parallel_group(
        self, group: torch.distributed.ProcessGroup, ranks: list[int], stream: torch.cuda.Stream
    ) -> None:
        """Use ring attention, in which the ranks of `group` share every document (see `_documents`).

        `ranks` are the group's global ranks. TE runs every second step of the ring (p2p) on `stream`. The ring supports
        no sliding windows and no fp32.
        """
        self.context_size = len(ranks)
        self.context_rank = ranks.index(torch.distributed.get_rank())
        self.attention.set_context_parallel_group(group, ranks, stream, cp_comm_type="p2p")

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        cu_seq_lens_q: Tensor | None = None,
        max_length_q: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Return hidden states [B, S, h]. The docstring of this file explains the forms of input."""
        assert self.angles is not None
        fused = self.qkv(hidden_states, is_first_microbatch=self.is_first_microbatch)
        if self.spec.delta_net is not None:
            context = self.delta_net(fused, cu_seq_lens_q, attention_mask, past_key_values)
        elif cu_seq_lens_q is not None:
            context = self._documents(fused, self.angles, cu_seq_lens_q, max_length_q)
        else:
            context = self._general(fused, self.angles, position_ids, attention_mask, past_key_values)
        if self.spec.output_gate:  # q_proj returns query and gate of the first head, then of the second
            gates = fused[..., : 2 * self.spec.q_size].unflatten(-1, (-1, 2, self.spec.head_dim))[..., 1, :]
            context = context * gates.flatten(-2).sigmoid()
        attended = self.output(context, is_first_microbatch=self.is_first_microbatch)
        hidden_states = self._add(hidden_states, attended, self.output_norm)
        transformed = self.mlp(hidden_states, is_first_microbatch=self.is_first_microbatch)
        return self._add(hidden_states, transformed, self.mlp_norm)

    def _add(self, residual: Tensor, output: Tensor, norm: nn.Module | None) -> Tensor:
        """Add the `output` of attention or MLP, after its norm (if any), dropout and factor, to `residual`."""
        output = F.dropout(norm(output) if norm else output, self.spec.residual_dropout, self.training)
        return torch.add(residual, output, alpha=self.spec.residual_scale)

    def _split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split `fused`, the QKV projection's output, into views q, k, v [..., heads, d]. Apply the QK norm, if any."""
        spec = self.spec
        heads = (spec.num_heads * (1 + spec.output_gate), spec.num_kv_heads, spec.num_kv_heads)
        q, k, v = fused.unflatten(-1, (-1, spec.head_dim)).split(heads, dim=-2)
        if spec.output_gate:
            q = q[..., ::2, :]
        if spec.joint_qk_norm:
            return self.q_norm(q.flatten(-2)).view_as(q), self.k_norm(k.flatten(-2)).view_as(k), v
        return (self.q_norm(q), self.k_norm(k), v) if spec.qk_norm else (q, k, v)

    def _one_kernel_rotates(self, fused: Tensor) -> bool:
        """Return True if `rope_triton` supports `fused` and the layer: on a GPU, without context parallelism."""
        known = fused.is_cuda and fused.dtype in (torch.bfloat16, torch.float16, torch.float32)
        return known and self.context_size == 1 and not (self.spec.qk_norm or self.spec.interleaved_rope)

    def _split_and_rotate(
        self, fused: Tensor, angles: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split `fused`, the output of the QKV projection, into q, k and v, and apply RoPE to q and k. With
        `cu_seqlens` (packed): [T, size] -> [T, heads, d]. Without: [B, S, size] -> [B, S, heads, d].
        """
        if self._one_kernel_rotates(fused):
            from llm_fp8.kernels.rope_triton import split_rope

            return split_rope(fused, angles, self.spec.num_heads, self.spec.num_kv_heads, cu_seqlens)
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        packed = cu_seqlens is not None
        rotate = functools.partial(
            apply_rotary_pos_emb,
            # The packed kernel starts a thread block for every pair of document and row of the table.
            freqs=angles[:max_seqlen] if packed else angles,
            tensor_format="thd" if packed else "bshd",
            interleaved=self.spec.interleaved_rope,
            fused=True,
            cu_seqlens=cu_seqlens,
            cp_size=self.context_size,
            cp_rank=self.context_rank,
        )
        q, k, v = self._split(fused)
        return rotate(q), rotate(k), v.contiguous()

    def _documents(self, fused: Tensor, angles: Tensor, cu_seqlens: Tensor, max_seqlen: int | None) -> Tensor:
        """Compute attention within each document, without a KV cache: `fused` [B, S, size] -> [B, S, heads * d].

        B == 1 with several documents is the packed form (TE's "thd"). Otherwise each sequence is one right-padded
        document. With context parallelism over C ranks, the form is always packed, and the length of each document is a
        multiple of 2 C. Of the 2 C chunks of a document, rank r has chunks r and 2 C - 1 - r. `cu_seqlens` and
        `max_seqlen` describe the unsliced documents.
        """
        batch, length = fused.shape[:2]
        if packed := self.context_size > 1 or (batch == 1 and len(cu_seqlens) != 2):
            rotated = self._split_and_rotate(fused.flatten(0, 1), angles, cu_seqlens, max_seqlen)
        else:
            rotated, max_seqlen = self._split_and_rotate(fused, angles, None, None), length
        context = self.attention(
            *rotated,
            qkv_format="thd" if packed else "bshd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
        )
        return context.reshape(batch, length, -1)

    def _general(
        self, fused: Tensor, angles: Tensor, position_ids: Tensor | None, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """Compute attention with a 4-D mask (None: causal) and KV cache (if any): [B, S, size] -> [B, S, heads * d]."""
        batch, length = fused.shape[:2]
        assert position_ids is not None
        angles, rotate = angles[position_ids].flatten(2), apply_rotary_pos_emb
        if self.spec.interleaved_rope:
            from transformers.models.glm4 import modeling_glm4

            angles, rotate = angles[..., ::2].repeat(1, 1, 2), modeling_glm4.apply_rotary_pos_emb  # takes equal halves
        q, k, v = (part.transpose(1, 2) for part in self._split(fused))
        q, k = rotate(q, k, angles.cos().to(q.dtype), angles.sin().to(q.dtype))
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        dropout = self.spec.attention_dropout if self.training else 0.0
        context, _weights = sdpa_attention_forward(self, q, k, v, mask, dropout=dropout, scaling=self.softmax_scale)
        return context.reshape(batch, length, -1)


@functools.cache
def _te_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return a subclass of a Hugging Face model class whose `save_pretrained` writes Hugging Face's layout. It has the
    name of `base`, so that the saved config contains an architecture that can load the checkpoint.
    """

    def save_pretrained(self: Any, save_directory: Any, *, state_dict: Any = None, **kwargs: Any) -> None:
        if state_dict is None:
            views = in_hf_layout(parameter_map(self), dict(self.named_parameters()))
            state_dict = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in views.items()}
        base.save_pretrained(self, save_directory, state_dict=state_dict, **kwargs)

    namespace = {"__doc__": base.__doc__, "__module__": base.__module__, "save_pretrained": save_pretrained}
    return type(base.__name__, (base,), namespace)


def build_te_model(
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    table_device: torch.device | str | None = None,
    unfused_mlp: bool = False,
    model: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Build a Hugging Face causal LM with TE decoder layers. Raise `UnsupportedArchitecture` if TE cannot build it.

    The parameters have `dtype`, are on `device` (if "meta", without memory) and are uninitialised. They can be filled
    by `llm_fp8.models.build.fill_weights`. The rotary table is on `table_device` (default: `device`). TE layers replace
    the layers of `model`, a Hugging Face model without memory (default: a new one). For `unfused_mlp` see `LayerSpec`.
    """
    import transformer_engine.pytorch as te

    device, specs = torch.device(device), layer_specs(config, unfused_mlp)
    # With "sdpa", Hugging Face creates masks for the general form and none in training.
    if model is None:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    decoder: Any = model.get_decoder()
    layers = decoder.layers = nn.ModuleList(
        nn.Identity() if spec else layer for spec, layer in zip(specs, decoder.layers, strict=True)
    )
    interleaved, table_device = any(s and s.interleaved_rope for s in specs), torch.device(table_device or device)
    rotary = RotaryTable(decoder.config, type(decoder.rotary_emb), table_device, interleaved)
    if all(specs):  # otherwise the remaining Hugging Face layers need Hugging Face's cos and sin
        decoder.rotary_emb = rotary
    if device.type != "meta":
        materialize_(model, device, device)
    model.tie_weights()
    if all(spec and not spec.zero_centered_gain for spec in specs):  # otherwise Hugging Face's norm is not replaced
        eps = decoder.config.rms_norm_eps
        decoder.norm = te.RMSNorm(decoder.config.hidden_size, eps=eps, dtype=dtype, device=device)
    if any(spec and spec.rope == NO_ROPE for spec in specs):
        rotary.attention_scaling[NO_ROPE], rotary.angles[NO_ROPE] = 1.0, torch.zeros_like(rotary.angles[None])
    for layer, spec in enumerate(specs):
        if spec is not None:
            softmax_scale = rotary.attention_scaling[spec.rope] ** 2 * spec.attention_scale
            layers[layer] = TEDecoderLayer(spec, layer, softmax_scale, dtype, device)
            layers[layer].angles = rotary.angles[spec.rope]
    hf_class: Any = type(model)
    model.__class__ = _te_class(hf_class)
    return model
