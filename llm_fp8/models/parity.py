"""The parity check: is the TE decoder the same function as Hugging Face's, on this model's weights and this run's data?

Three tests, with limits far from what rounding gives and from what a wrong model gives:

1. The weights are the checkpoint's, bit for bit: each stored tensor, cast to the parameter's dtype, is compared with
   its part of the TE parameter. A tied lm_head is the embedding.
2. In fp32 the layers agree. Hugging Face's and TE's layer get the same weights, input and output gradient; output,
   input gradient and all weight gradients may differ by `FP32_LIMIT`. TF32 is off, so that only the order of summation
   differs. This sees RoPE base and scaling, softmax scale, epsilon, dropped biases, windows and document boundaries.
3. In the training dtype TE rounds no more than Hugging Face does. A tensor's error is its distance from Hugging Face in
   fp32; the ratio of TE's error to Hugging Face's own is near 1. A single ratio proves nothing (4 was seen for the
   gradient of a norm's weight, a sum with cancellation), so the geometric mean over all tensors (`MEAN_LIMIT`) and the
   median within each layer (`LAYER_LIMIT`) are judged. This sees a wrong kernel of the training dtype.

The data are the first sequence of the first batch. Two Hugging Face layers are in memory at a time, so the check runs
wherever training does.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import te_llama
from llm_fp8.data.collate import Batch
from llm_fp8.models.build import decoder_layers
from llm_fp8.models.weights import StoredCheckpoint
from llm_fp8.optim.adamw_master import split_master
from llm_fp8.utils.cuda_environment import TF32_VARIABLE
from llm_fp8.utils.errors import UserError

FP32_LIMIT = 4e-4
MEAN_LIMIT = 1.25
LAYER_LIMIT = 2.0
SMALLEST_ERROR = 1e-4
"""Added to both errors of a ratio: below it a difference means nothing."""
MAX_TOKENS = 2048
"""Most tokens compared: TE's attention in fp32 holds scores of their square for every head."""


@dataclass(frozen=True)
class Comparison:
    """One tensor of one layer: relative differences from Hugging Face in fp32."""

    layer: int
    tensor: str
    fp32: float
    """TE in fp32."""
    te: float
    """TE in the training dtype."""
    hf: float
    """Hugging Face in the training dtype."""

    @property
    def log_ratio(self) -> float:
        return math.log((self.te + SMALLEST_ERROR) / (self.hf + SMALLEST_ERROR))


@dataclass(frozen=True)
class ParityReport:
    """What tests 2 and 3 found."""

    comparisons: tuple[Comparison, ...]
    dtype: torch.dtype
    """The training dtype."""

    @property
    def worst(self) -> Comparison:
        """The largest difference in fp32; one that is not a number counts as the largest."""
        return max(self.comparisons, key=lambda one: math.inf if math.isnan(one.fp32) else one.fp32)

    @property
    def mean_ratio(self) -> float:
        """Geometric mean of TE's error over Hugging Face's in the training dtype."""
        return math.exp(statistics.fmean(one.log_ratio for one in self.comparisons))

    @property
    def worst_layer(self) -> tuple[int, float]:
        """The layer whose median ratio is largest, and that median."""
        layers: dict[int, list[float]] = {}
        for one in self.comparisons:
            layers.setdefault(one.layer, []).append(one.log_ratio)
        medians = {layer: math.exp(statistics.median(ratios)) for layer, ratios in layers.items()}
        return max(medians.items(), key=lambda item: item[1])

    def fault(self) -> str | None:
        """The test that fails, as the end of a sentence; None where all pass. A NaN fails."""
        if not self.worst.fp32 <= FP32_LIMIT:
            return (
                f"differs from Hugging Face's in fp32 by {self.worst.fp32:.2g} ({self.worst.tensor} of layer "
                f"{self.worst.layer}; rounding gives at most {FP32_LIMIT:g})"
            )
        layer, ratio = self.worst_layer
        if not self.mean_ratio <= MEAN_LIMIT:
            return f"is {self.mean_ratio:.2g} times as far from fp32 as Hugging Face's ({MEAN_LIMIT:g} is the limit)"
        if not ratio <= LAYER_LIMIT:
            return (
                f"is {ratio:.2g} times as far from fp32 as Hugging Face's in layer {layer} ({LAYER_LIMIT:g} is the "
                "limit)"
            )
        return None

    def describe(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        num_layers = len({one.layer for one in self.comparisons})
        return (
            f"{len(self.comparisons)} tensors of {num_layers} layers differ in fp32 by at most {self.worst.fp32:.1g}; "
            f"in {name} their distance from fp32 is {self.mean_ratio:.2f} times Hugging Face's "
            f"({self.worst_layer[1]:.2f} in the worst layer)"
        )


def relative_difference(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in fp32, or in fp64 where one of them is; 0 where both are zero."""
    dtype = torch.promote_types(torch.promote_types(value.dtype, reference.dtype), torch.float32)
    value, reference = value.to(dtype), reference.to(dtype)
    norm = reference.norm()
    difference = (value - reference).norm()
    return float(difference / norm) if norm > 0 else float(difference)


def first_row(batch: Batch, max_seq_length: int) -> tuple[Tensor, Tensor, Tensor]:
    """First sequence up to `MAX_TOKENS` real tokens: `input_ids`, `position_ids` [1, n], `cu_seqlens` int32."""
    if batch.cu_seqlens is None:
        assert batch.attention_mask is not None
        length = min(int(batch.attention_mask[0].sum()), MAX_TOKENS)
        starts = torch.zeros(1, dtype=torch.int32, device=batch.input_ids.device)
    else:
        length = min(max_seq_length, MAX_TOKENS)
        starts = batch.cu_seqlens[batch.cu_seqlens < length]
    # The last document may be cut: attention is causal.
    cu_seqlens = torch.cat((starts, starts.new_tensor([length])))
    return batch.input_ids[:1, :length], batch.position_ids[:1, :length], cu_seqlens


def check_parity(
    model: PreTrainedModel,
    batch: Batch,
    max_seq_length: int,
    dtype: torch.dtype,
    full_tensor: Callable[[Tensor], Tensor] = torch.Tensor.detach,
    files: list[Path] | None = None,
) -> str:
    """Run the three tests; returns what they found, in a sentence. Raises `UserError` where one fails.

    Args:
        model: with TE decoder layers that compute in `dtype`.
        batch: on the device.
        full_tensor: returns an unsharded parameter; collective where parameters are sharded.
        files: the checkpoint's safetensors files; None where the weights are random.
    """
    if batch.input_ids.is_cuda and os.environ.get(TF32_VARIABLE) != "0":
        raise UserError(
            f"the parity check compares the TE decoder with Hugging Face's in fp32, and {TF32_VARIABLE} is "
            f"{os.environ.get(TF32_VARIABLE, 'not set')}, which lets TE multiply in TF32; set it to "
            "0."
        )
    stored = f"{check_weights(model, files, full_tensor)} stored tensors loaded bit for bit; " if files else ""
    report = compare_layers(model, batch, max_seq_length, dtype, full_tensor)
    if fault := report.fault():
        raise UserError(
            f"parity check: the TE decoder {fault}. Training would train another model; report this with the model's "
            "config.json, or train without --use_te."
        )
    return f"parity with Hugging Face: {stored}{report.describe()}"


def compare_layers(
    model: PreTrainedModel,
    batch: Batch,
    max_seq_length: int,
    dtype: torch.dtype,
    full_tensor: Callable[[Tensor], Tensor],
) -> ParityReport:
    """Tests 2 and 3, unjudged; the arguments are those of `check_parity`. Leaves no gradients behind."""
    input_ids, position_ids, cu_seqlens = first_row(batch, max_seq_length)
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    spec = te_llama.spec_of(model)
    rotary: Any = model.base_model.rotary_emb
    embedding: Any = model.get_input_embeddings()
    hidden = F.embedding(input_ids, full_tensor(embedding.weight).to(dtype))
    generator = torch.Generator(device=hidden.device).manual_seed(0)
    references: dict[tuple[str, torch.dtype], Any] = {}
    comparisons = []
    for layer, own_layer in enumerate(decoder_layers(model)):
        te_layer = _unsharded_layer(own_layer, spec, dtype, hidden.device, full_tensor)
        gradient = torch.randn(hidden.shape, generator=generator, device=hidden.device)
        parts = _layer_parts(spec, layer)
        weights = _by_hf_name(parts, {name: weight.detach() for name, weight in te_layer.named_parameters()})
        hf: dict[torch.dtype, dict[str, Tensor]] = {}
        for kind in dict.fromkeys((torch.float32, dtype)):
            key = (_layer_type(model.config, layer), kind)
            if key not in references:
                references[key] = _one_layer_model(model.config, layer, kind, hidden.device)
            reference = references[key]
            reference.layers[0].load_state_dict(weights)
            reference.zero_grad(set_to_none=True)
            results = _run(reference, hidden.to(kind), gradient.to(kind), position_ids=position_ids)
            gradients = {name: parameter.grad for name, parameter in reference.layers[0].named_parameters()}
            hf[kind] = results | _joined(parts, gradients)
        te: dict[torch.dtype, dict[str, Tensor]] = {}
        for kind in hf:
            with _trainable_copies(te_layer, torch.float32 if kind == torch.float32 else None) as parameters:
                results = _run(
                    te_layer,
                    hidden.to(kind),
                    gradient.to(kind),
                    position_embeddings=rotary.angles,
                    cu_seq_lens_q=cu_seqlens,
                    max_length_q=longest,
                )
                # None where a parameter took no part.
                full = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
                gradients = _by_hf_name(parts, full)
                te[kind] = results | _joined(parts, gradients)
        exact = hf[torch.float32]
        comparisons += [
            Comparison(
                layer=layer,
                tensor=name,
                fp32=relative_difference(te[torch.float32][name], value),
                te=relative_difference(te[dtype][name], value),
                hf=relative_difference(hf[dtype][name], value),
            )
            for name, value in exact.items()
        ]
        hidden = hf[dtype]["output"]
    return ParityReport(tuple(comparisons), dtype)


def check_weights(
    model: PreTrainedModel, files: list[Path], full_tensor: Callable[[Tensor], Tensor] = torch.Tensor.detach
) -> int:
    """Test 1: compare every parameter with the stored tensors it is made of; returns how many were compared.

    Collective where `full_tensor` is. Raises `UserError` naming the first tensor that differs.
    """
    embedding: Any = model.get_input_embeddings()
    tied = model.get_output_embeddings().weight is embedding.weight
    if tied != bool(model.config.tie_word_embeddings):
        raise UserError(
            f"parity check: config.json says tie_word_embeddings {bool(model.config.tie_word_embeddings)}, and the "
            f"model's lm_head is {'' if tied else 'not '}its embedding. Report this with the model's config.json."
        )
    parameters, compared = te_llama.te_parameters(model), 0
    checkpoint = StoredCheckpoint(files, model)
    for te_name, parts in te_llama.parameter_map(te_llama.spec_of(model)).items():
        full = full_tensor(parameters[te_name])
        for part in parts:
            stored = checkpoint.read(part.hf_name, embedding.weight.device)
            if stored.dtype != full.dtype == torch.bfloat16:
                stored = split_master(stored.float())[0]  # as it was loaded
            stored = stored.to(full)
            if not torch.equal(full[part.start : part.stop], stored):
                raise UserError(
                    f"parity check: the model's {part.hf_name} is not the tensor in {files[0].parent}. Training "
                    "would train another model; report this with the model's config.json."
                )
            compared += 1
    return compared


@contextlib.contextmanager
def _trainable_copies(layer: nn.Module, dtype: torch.dtype | None) -> Iterator[dict[str, nn.Parameter]]:
    """`layer` computes with parameters of its own values, all trained, cast to `dtype` (None: as they are), by name.

    New parameters, because hooks of DDP on the layer's own would fire, and autograd casts a gradient to the dtype that
    a parameter had when its hook was set.
    """
    own = dict(layer.named_parameters())
    copies = {name: nn.Parameter(value.detach().to(dtype or value.dtype)) for name, value in own.items()}
    _replace(layer, copies)
    try:
        yield copies
    finally:
        _replace(layer, own)


def _replace(layer: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        module, _, attribute = name.rpartition(".")
        setattr(layer.get_submodule(module), attribute, parameter)


def _layer_type(config: PretrainedConfig, layer: int) -> str:
    """Full or sliding attention, where a model mixes them."""
    layer_types = getattr(config, "layer_types", None)
    return "all" if layer_types is None else layer_types[layer]


def _one_layer_model(config: PretrainedConfig, layer: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Hugging Face's decoder with one layer of the kind of `layer`, a minimal vocabulary and no final norm."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    config.vocab_size, config.pad_token_id = 16, None
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[layer]]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.model.norm = nn.Identity()
    return model.model.train()


def _run(module: nn.Module, hidden: Tensor, gradient: Tensor, **arguments: object) -> dict[str, Tensor]:
    """Forward and backward pass from an input and an output gradient; returns output and input gradient [1, S, h]."""
    hidden = hidden.clone().requires_grad_()
    if isinstance(module, PreTrainedModel):
        output = module(inputs_embeds=hidden, use_cache=False, **arguments).last_hidden_state
    else:
        # Adapters may be fp32 in a bf16 layer, which TE's modules accept under autocast only.
        mixed = any(parameter.dtype != hidden.dtype for parameter in module.parameters())
        with torch.autocast(hidden.device.type, hidden.dtype, enabled=mixed):
            output = module(hidden, **arguments)
    with warnings.catch_warnings():
        # The first backward pass of a process runs in a thread without a CUDA context; cuBLAS takes the device's.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
        output.backward(gradient)
    assert hidden.grad is not None
    return {"output": output.detach(), "input gradient": hidden.grad}


_Parts = Mapping[str, Sequence[te_llama.Part]]
"""TE name of a parameter in its layer -> the Hugging Face tensors that it is made of, by their names in the layer."""


def _layer_parts(spec: te_llama.DecoderSpec, layer: int) -> _Parts:
    prefix = f"model.layers.{layer}."
    return {
        te_name.removeprefix(prefix): [
            dataclasses.replace(part, hf_name=part.hf_name.removeprefix(prefix)) for part in parts
        ]
        for te_name, parts in te_llama.parameter_map(spec).items()
        if te_name.startswith(prefix)
    }


def _unsharded_layer(
    layer: Any,
    spec: te_llama.DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    full_tensor: Callable[[Tensor], Tensor],
) -> nn.Module:
    """The layer itself, or an unsharded copy of a sharded one (collective)."""
    weights = dict(layer.named_parameters())
    if not any(isinstance(weight, DTensor) for weight in weights.values()):
        return layer
    unsharded = te_llama.TEDecoderLayer(spec, layer.layer, layer.softmax_scale, dtype, device)
    with torch.no_grad():
        for name, target in unsharded.named_parameters():
            target.copy_(full_tensor(weights[name]))
    return unsharded.train()


def _by_hf_name(layer_parts: _Parts, tensors: dict[str, Any]) -> dict[str, Tensor]:
    """A TE layer's weights or gradients under Hugging Face's names."""
    return {
        part.hf_name: tensors[te_name][part.start : part.stop]
        for te_name, parts in layer_parts.items()
        for part in parts
    }


def _joined(layer_parts: _Parts, gradients: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients with the biases of q, k and v as one vector.

    Softmax is invariant to a shift of all keys, so the gradient of k's bias alone is nothing but rounding.
    """
    joined = {}
    for parts in layer_parts.values():
        if gradients[parts[0].hf_name].ndim == 1:
            name = " and ".join(part.hf_name for part in parts)
            joined[f"gradient of {name}"] = torch.cat([gradients[part.hf_name] for part in parts])
        else:
            joined |= {f"gradient of {part.hf_name}": gradients[part.hf_name] for part in parts}
    return joined
