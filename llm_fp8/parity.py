"""The parity gate: is the TE decoder the same function as Hugging Face's, on this model's weights and this run's data?

Layer by layer, on the first row of the first real batch: Hugging Face's layer with the same weights and TE's layer get the same
input and the same output gradient; their outputs, input gradients and every weight gradient are compared. One Hugging Face layer is in
memory at a time, so that the gate runs wherever training does. It catches what loads without complaint and trains
a wrong model: RoPE base and scaling, dropped biases, a swapped gate and up projection, a missed window or mask.

The measure is ‖te − hf‖ / ‖hf‖ over the real tokens. Two bf16 computations of one layer that round in different places differ by a few thousandths; a
wrong RoPE base or a missing bias by tenths. `TOLERANCE` lies between, and docs/numerics.md says what was measured.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import te_llama
from llm_fp8.data.collate import Batch
from llm_fp8.errors import UserError
from llm_fp8.models import decoder_layers

TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 0.005}
"""Largest relative difference that passes, by parameter dtype. In fp32 both sides may multiply in TF32 (10 bits of mantissa)."""


@dataclass(frozen=True)
class ParityReport:
    """The largest relative differences found; `worst` names where."""

    output: float
    input_gradient: float
    weight_gradient: float
    worst: str
    num_layers: int
    num_tokens: int

    @property
    def largest(self) -> float:
        """The largest of all differences."""
        return max(self.output, self.input_gradient, self.weight_gradient)


def relative_difference(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖ / ‖reference‖ in fp32; 0 where both are zero."""
    value, reference = value.float(), reference.float()
    norm = reference.norm()
    difference = (value - reference).norm()
    return float(difference / norm) if norm > 0 else float(difference)


def first_row(batch: Batch, max_seq_length: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """`input_ids` and `position_ids` [1, S] of the batch's first row, `cu_seqlens` int32 [n + 1] and the real length in tokens."""
    if batch.cu_seqlens is None:
        assert batch.attention_mask is not None
        length = int(batch.attention_mask[0].sum())
        cu_seqlens = torch.tensor([0, length], dtype=torch.int32, device=batch.input_ids.device)
    else:
        length = max_seq_length  # Rows do not span, so a document ends here.
        cu_seqlens = batch.cu_seqlens[batch.cu_seqlens <= length]
    return batch.input_ids[:1, :length], batch.position_ids[:1, :length], cu_seqlens, length


def check_parity(model: PreTrainedModel, batch: Batch, max_seq_length: int) -> ParityReport:
    """Compare every decoder layer; raises `UserError` above the tolerance. Leaves no gradients behind."""
    input_ids, position_ids, cu_seqlens, length = first_row(batch, max_seq_length)
    hidden = model.get_input_embeddings()(input_ids).detach()
    generator = torch.Generator(device=hidden.device).manual_seed(0)
    worst = dict.fromkeys(("output", "input gradient", "weight gradient"), (-1.0, ""))
    for layer, (name, reference, te_layer) in enumerate(_layer_pairs(model)):
        gradient = torch.randn(hidden.shape, generator=generator, device=hidden.device, dtype=torch.float32).to(hidden.dtype)
        ours = _run(
            te_layer,
            hidden,
            gradient,
            position_embeddings=model.model.rotary_emb.angles,
            cu_seq_lens_q=cu_seqlens,
            max_length_q=length,
        )
        theirs = _run(reference, hidden, gradient, position_ids=position_ids)
        differences = {
            "output": [("", relative_difference(ours[0], theirs[0]))],
            "input gradient": [("", relative_difference(ours[1], theirs[1]))],
            "weight gradient": _weight_gradient_differences(model.config, layer, te_layer, reference),
        }
        for kind, found in differences.items():
            part, value = max(found, key=lambda entry: entry[1])
            if value > worst[kind][0] or math.isnan(value):
                worst[kind] = (value, f"{kind} of {name}{f' ({part})' if part else ''}")
        te_layer.zero_grad(set_to_none=True)
        hidden = theirs[0].detach()
    report = ParityReport(
        output=worst["output"][0],
        input_gradient=worst["input gradient"][0],
        weight_gradient=worst["weight gradient"][0],
        worst=max(worst.values())[1],
        num_layers=layer + 1,
        num_tokens=length,
    )
    limit = TOLERANCE[next(model.parameters()).dtype]
    if not report.largest <= limit:
        raise UserError(
            f"--parity_check: the TE decoder differs from Hugging Face's by {report.largest:.3g} (relative; at most {limit} is rounding), worst in the "
            f"{report.worst}. Training would train another model; report this with the model's config.json, or train without --use_te."
        )
    return report


def _layer_pairs(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Per layer: its name, a one-layer Hugging Face decoder with its weights and no final norm, and the TE layer."""
    spec = te_llama.decoder_spec(model.config)
    parameters = te_llama.te_parameters(model)
    hf_weights = te_llama.hf_state_dict(spec, parameters)
    references: dict[str, PreTrainedModel] = {}
    for index, te_layer in enumerate(decoder_layers(model)):
        prefix = f"model.layers.{index}."
        layer_types = getattr(model.config, "layer_types", None)
        kind = "all" if layer_types is None else layer_types[index]
        if kind not in references:
            references[kind] = _one_layer_model(model.config, index, parameters[f"{prefix}qkv.weight"])
        decoder = references[kind].model
        weights = {name.removeprefix(prefix): tensor for name, tensor in hf_weights.items() if name.startswith(prefix)}
        decoder.layers[0].load_state_dict(weights)
        decoder.zero_grad(set_to_none=True)
        yield prefix.rstrip("."), decoder, te_layer


def _one_layer_model(config: PretrainedConfig, layer: int, like: Tensor) -> PreTrainedModel:
    """Hugging Face's model with a single layer of the kind of `layer`, a token of vocabulary, and no final norm."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    config.vocab_size, config.pad_token_id = 16, None
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[layer]]
    with torch.device(like.device):
        model = AutoModelForCausalLM.from_config(config, dtype=like.dtype, attn_implementation="sdpa")
    model.model.norm = nn.Identity()
    return model.train()


def _run(module: nn.Module, hidden: Tensor, gradient: Tensor, **arguments: object) -> tuple[Tensor, Tensor]:
    """Forward and backward from the same input and output gradient; returns output and input gradient [1, S, h]."""
    hidden = hidden.clone().requires_grad_()
    if isinstance(module, PreTrainedModel):
        output = module(inputs_embeds=hidden, use_cache=False, **arguments).last_hidden_state
    else:
        output = module(hidden, **arguments)
    output.backward(gradient)
    assert hidden.grad is not None
    return output.detach(), hidden.grad


def _weight_gradient_differences(
    config: PretrainedConfig, layer: int, te_layer: nn.Module, reference: Any
) -> list[tuple[str, float]]:
    """Name and relative difference of every weight gradient of a layer, in Hugging Face's layout.

    Biases of q, k and v are compared as one vector: softmax does not see a shift of all keys, so the gradient of k's bias alone is
    next to nothing and its bf16 rounding error large beside it.
    """
    prefix = f"model.layers.{layer}."
    parts = {te: hf for te, hf in te_llama.parameter_map(te_llama.decoder_spec(config)).items() if te.startswith(prefix)}
    expected: dict[str, Any] = {name: parameter.grad for name, parameter in reference.layers[0].named_parameters()}
    found = []
    for te_name, hf_parts in parts.items():
        gradient: Any = te_layer.get_parameter(te_name.removeprefix(prefix)).grad
        names = [part.hf_name.removeprefix(prefix) for part in hf_parts]
        if gradient.ndim == 1:
            found.append((names[0], relative_difference(gradient, torch.cat([expected[name] for name in names]))))
            continue
        for name, part in zip(names, hf_parts, strict=True):
            found.append((name, relative_difference(gradient[part.start : part.stop], expected[name])))
    return found
