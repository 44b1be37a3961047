"""The parity check: is the TE decoder the same function as Hugging Face's, on this model's weights and this run's data?

Layer by layer, on the first sequence of the first real batch: Hugging Face's and TE's layer with the same weights get
the same input and output gradient; outputs, input gradients and all weight gradients are compared. Only two Hugging
Face layers are in memory at a time, so the check runs wherever training does. It catches what loads without complaint
and trains a wrong model: RoPE base and scaling, dropped biases, swapped gate and up projections, a missing window or
mask.

The reference is Hugging Face's layer in fp32. No fixed tolerance fits bf16: outputs differ by thousandths, gradients of
q and k in a trained model by several hundredths, for Hugging Face's own bf16 layer as for TE's. So TE may be at most
`EXCESS` times as far from fp32 as Hugging Face in the same dtype, plus `FLOOR`. A wrong RoPE base or a missing bias is
off by tenths everywhere.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import te_llama
from llm_fp8.data.collate import Batch
from llm_fp8.models.build import decoder_layers
from llm_fp8.utils.errors import UserError

EXCESS = 2.0
FLOOR = 0.005
"""All that is allowed with fp32 parameters: TE multiplies fp32 in TF32, whose mantissa has 10 bits."""

MAX_TOKENS = 4096
"""Most tokens compared: Hugging Face's layer holds a mask of their square."""


@dataclass(frozen=True)
class ParityReport:
    """The entry closest to the limit, or furthest beyond it. Differences are relative to Hugging Face in fp32."""

    worst: str
    difference: float
    hf_difference: float
    """Of Hugging Face's layer in the same dtype as TE's."""
    num_layers: int
    num_tokens: int

    @property
    def limit(self) -> float:
        """The largest `difference` that passes."""
        return EXCESS * self.hf_difference + FLOOR

    def describe(self) -> str:
        return (
            f"parity with Hugging Face over {self.num_layers} layers: at most {self.difference:.2g} from fp32, where "
            f"Hugging Face's own layer is {self.hf_difference:.2g} ({self.worst})"
        )


def relative_difference(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in fp32, or in fp64 where one of them is; 0 where both are zero."""
    dtype = torch.promote_types(torch.promote_types(value.dtype, reference.dtype), torch.float32)
    value, reference = value.to(dtype), reference.to(dtype)
    norm = reference.norm()
    difference = (value - reference).norm()
    return float(difference / norm) if norm > 0 else float(difference)


def first_row(batch: Batch, max_seq_length: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """First sequence up to `MAX_TOKENS` real tokens: `input_ids`, `position_ids` [1, n], `cu_seqlens` int32, and n."""
    if batch.cu_seqlens is None:
        assert batch.attention_mask is not None
        length = min(int(batch.attention_mask[0].sum()), MAX_TOKENS)
        starts = torch.zeros(1, dtype=torch.int32, device=batch.input_ids.device)
    else:
        length = min(max_seq_length, MAX_TOKENS)
        starts = batch.cu_seqlens[batch.cu_seqlens < length]
    # The last document may be cut: attention is causal.
    cu_seqlens = torch.cat((starts, starts.new_tensor([length])))
    return batch.input_ids[:1, :length], batch.position_ids[:1, :length], cu_seqlens, length


def check_parity(
    model: PreTrainedModel,
    batch: Batch,
    max_seq_length: int,
    dtype: torch.dtype,
    full_tensor: Callable[[Tensor], Tensor] = torch.Tensor.detach,
) -> ParityReport:
    """Compare every decoder layer; raises `UserError` beyond the limit. Leaves no gradients behind.

    Args:
        model: with TE decoder layers.
        batch: on the device.
        max_seq_length: tokens of a sequence.
        dtype: compute dtype of the layers.
        full_tensor: returns an unsharded parameter; collective where parameters are sharded (copies are compared then).
    """
    input_ids, position_ids, cu_seqlens, length = first_row(batch, max_seq_length)
    spec = te_llama.spec_of(model)
    dtypes = list(dict.fromkeys((torch.float32, dtype)))
    rotary: Any = model.base_model.rotary_emb
    embedding: Any = model.get_input_embeddings()
    hidden = F.embedding(input_ids, full_tensor(embedding.weight).to(dtype))
    generator = torch.Generator(device=hidden.device).manual_seed(0)
    references: dict[tuple[str, torch.dtype], Any] = {}
    reports = []
    for layer, own_layer in enumerate(decoder_layers(model)):
        te_layer = _unsharded_layer(own_layer, spec, dtype, hidden.device, full_tensor)
        frozen = [parameter for parameter in te_layer.parameters() if not parameter.requires_grad]
        for parameter in frozen:  # their gradients are compared too
            parameter.requires_grad_(True)
        gradient = torch.randn(hidden.shape, generator=generator, device=hidden.device)
        weights = _by_hf_name(spec, layer, {name: weight.detach() for name, weight in te_layer.named_parameters()})
        results = {}
        for kind in dtypes:
            key = (_layer_type(model.config, layer), kind)
            if key not in references:
                references[key] = _one_layer_model(model.config, layer, kind, hidden.device)
            reference = references[key]
            reference.layers[0].load_state_dict(weights)
            reference.zero_grad(set_to_none=True)
            output, input_gradient = _run(reference, hidden.to(kind), gradient.to(kind), position_ids=position_ids)
            gradients = {name: parameter.grad for name, parameter in reference.layers[0].named_parameters()}
            results[kind] = {"output": output, "input gradient": input_gradient, **_joined(spec, layer, gradients)}
        output, input_gradient = _run(
            te_layer,
            hidden,
            gradient.to(dtype),
            position_embeddings=rotary.angles,
            cu_seq_lens_q=cu_seqlens,
            max_length_q=length,
        )
        gradients = _by_hf_name(spec, layer, {name: weight.grad for name, weight in te_layer.named_parameters()})
        ours = {"output": output, "input gradient": input_gradient, **_joined(spec, layer, gradients)}
        te_layer.zero_grad(set_to_none=True)
        for parameter in frozen:
            parameter.requires_grad_(False)
        exact = results[torch.float32]
        for name, value in ours.items():
            reports.append(
                ParityReport(
                    worst=f"{name} of layer {layer}",
                    difference=relative_difference(value, exact[name]),
                    hf_difference=relative_difference(results[dtype][name], exact[name]),
                    num_layers=layer + 1,
                    num_tokens=length,
                )
            )
        hidden = results[dtype]["output"]
    worst = max(
        reports, key=lambda report: math.inf if math.isnan(report.difference) else report.difference / report.limit
    )
    worst = dataclasses.replace(worst, num_layers=spec.num_layers)
    if not worst.difference <= worst.limit:
        raise UserError(
            f"--parity_check: the TE decoder differs from Hugging Face's in fp32 by {worst.difference:.3g} (relative; "
            f"{worst.limit:.3g} would be rounding) in the {worst.worst}. Training would train another model; report "
            "this with the model's config.json, or train without --use_te."
        )
    return worst


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


def _run(module: nn.Module, hidden: Tensor, gradient: Tensor, **arguments: object) -> tuple[Tensor, Tensor]:
    """Forward and backward from the same input and output gradient; returns output and input gradient [1, S, h]."""
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
    return output.detach(), hidden.grad


def _layer_parts(spec: te_llama.DecoderSpec, layer: int) -> dict[str, list[te_llama.Part]]:
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


def _by_hf_name(spec: te_llama.DecoderSpec, layer: int, tensors: dict[str, Any]) -> dict[str, Tensor]:
    """A TE layer's weights or gradients under Hugging Face's names."""
    return {
        part.hf_name: tensors[te_name][part.start : part.stop]
        for te_name, parts in _layer_parts(spec, layer).items()
        for part in parts
    }


def _joined(spec: te_llama.DecoderSpec, layer: int, gradients: dict[str, Any]) -> dict[str, Tensor]:
    """The gradients with the biases of q, k and v as one vector.

    Softmax is invariant to a shift of all keys, so the gradient of k's bias alone is nothing but rounding.
    """
    joined = {}
    for parts in _layer_parts(spec, layer).values():
        if gradients[parts[0].hf_name].ndim == 1:
            name = " and ".join(part.hf_name for part in parts)
            joined[f"gradient of {name}"] = torch.cat([gradients[part.hf_name] for part in parts])
        else:
            joined |= {f"gradient of {part.hf_name}": gradients[part.hf_name] for part in parts}
    return joined
