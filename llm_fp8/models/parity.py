"""The parity check: a TE decoder must compute the same function as Hugging Face's, for a run's weights and data.

1. The weights equal the checkpoint's weights bit for bit, after the cast to the parameter's dtype.
2. In fp32 the layers agree. From the same weights, input and output gradient, Hugging Face's and TE's output, input
   gradient and weight gradients differ by at most `FP32_LIMIT`. TF32 is off (tools/script.py), so only the order of
   summation differs. This test covers RoPE, softmax scale, epsilon, biases, windows and document boundaries.
3. In the training dtype TE's rounding errors are not larger than Hugging Face's. A tensor's error is its distance from
   Hugging Face's in fp32, and the ratio of TE's error to Hugging Face's must be near 1. Single ratios scatter, so the
   test limits the geometric mean over all tensors (`MEAN_LIMIT`) and the median within each layer (`LAYER_LIMIT`).

The limits are far above the effect of rounding and far below that of a wrong model. The data is the first sequence of
the first batch. Only two Hugging Face layers of each kind are in memory, so the check needs less than training.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import statistics
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

import te_llama
from llm_fp8.data.collate import Batch
from llm_fp8.mixers.delta_net import separate_documents
from llm_fp8.models.model import Model, text_decoder
from llm_fp8.optim.adamw_master import split_master
from llm_fp8.utils.errors import UserError
from te_llama import Part

FP32_LIMIT = 4e-4
MEAN_LIMIT = 1.25
LAYER_LIMIT = 2.0
SMALLEST_ERROR = 1e-4  # added to both errors of a ratio, because smaller errors are insignificant
MAX_TOKENS = 2048  # limit for the tokens compared, since TE's fp32 attention stores MAX_TOKENS² scores per head
NOT_COMPARED = ("A_log", "dt_bias")  # parameters whose gradients nearly cancel; in_proj_a's consists of the same terms
Tensors = dict[str, Tensor]
Row = tuple[Tensor, Tensor, Tensor]  # `input_ids` [1, n], `position_ids` [1, n], `cu_seqlens` int32 [documents + 1]
_ADVICE = "Report this with config.json, or train without --use_te."


class Comparison(NamedTuple):
    """Relative distances of three versions of a tensor from the tensor that Hugging Face's layer computes in fp32."""

    layer: int
    tensor: str
    fp32: float  # TE in fp32
    te: float  # TE in the training dtype
    hf: float  # Hugging Face in the training dtype


def judge(comparisons: Sequence[Comparison], dtype: torch.dtype) -> str:
    """Check `FP32_LIMIT`, `MEAN_LIMIT` and `LAYER_LIMIT`. Return a summary, or raise `UserError` on excess or NaN."""
    logarithms: dict[int, list[float]] = {}
    for tensor in comparisons:
        logarithm = math.log((tensor.te + SMALLEST_ERROR) / (tensor.hf + SMALLEST_ERROR))
        logarithms.setdefault(tensor.layer, []).append(logarithm)
    worst = max(comparisons, key=lambda tensor: math.inf if math.isnan(tensor.fp32) else tensor.fp32)
    mean = math.exp(statistics.fmean(itertools.chain(*logarithms.values())))
    medians = {layer: statistics.median(ratios) for layer, ratios in logarithms.items()}
    worst_layer, median = max(medians.items(), key=lambda item: item[1])
    in_training = "its error in the training dtype is"
    for figure, limit, finding in (
        (worst.fp32, FP32_LIMIT, f"{worst.tensor} of layer {worst.layer} differs in fp32 by"),
        (mean, MEAN_LIMIT, f"{in_training} Hugging Face's times"),
        (math.exp(median), LAYER_LIMIT, f"{in_training}, in layer {worst_layer}, Hugging Face's times"),
    ):
        if not figure <= limit:
            finding = f"{finding} {figure:.2g}, and the limit is {limit:g}"
            raise UserError(f"--use_te does not compute Hugging Face's model: {finding}. {_ADVICE}")
    return (
        f"{len(comparisons)} tensors of {len(logarithms)} layers differ in fp32 by at most {worst.fp32:.1g}; in "
        f"{str(dtype).removeprefix('torch.')} their distance from fp32 is {mean:.2f} times Hugging Face's "
        f"({math.exp(median):.2f} in the worst layer)"
    )


def relative_difference(value: Tensor, reference: Tensor) -> float:
    """Return ‖value − reference‖ / ‖reference‖, or ‖value‖ if the reference is 0, in fp32 (fp64 if either is fp64)."""
    dtype = torch.promote_types(torch.promote_types(value.dtype, reference.dtype), torch.float32)
    value, reference = value.to(dtype), reference.to(dtype)
    norm, difference = reference.norm(), (value - reference).norm()
    return float(difference / norm) if norm > 0 else float(difference)


def first_row(batch: Batch, max_seq_length: int, num_slices: int) -> Row:
    """Return the first sequence of `batch`, without its padding, truncated to `MAX_TOKENS` tokens. If ranks share
    sequences (`num_slices` > 1), `batch` has only one slice of every document. Each slice then counts as a document.
    """
    if batch.cu_seqlens is None:
        assert batch.attention_mask is not None
        length = min(int(batch.attention_mask[0].sum()), MAX_TOKENS)
        starts = torch.zeros(1, dtype=torch.int32, device=batch.input_ids.device)
    else:
        length = min(max_seq_length // num_slices, MAX_TOKENS)
        bounds = batch.cu_seqlens // num_slices
        starts = bounds[bounds < length]
    # The last document may be truncated, since attention is causal.
    cu_seqlens = torch.cat((starts, starts.new_tensor([length])))
    offsets = torch.repeat_interleave(cu_seqlens[:-1].long(), cu_seqlens.diff().long())
    return batch.input_ids[:1, :length], (torch.arange(length, device=offsets.device) - offsets)[None], cu_seqlens


def check_parity(
    model: Model, layers: Iterable[Any], batch: Batch, max_seq_length: int, dtype: torch.dtype, num_slices: int = 1
) -> str:
    """Compare a TE decoder that computes in `dtype` with Hugging Face's. Return a summary, or raise `UserError` if they
    differ. `layers` may be a generator that frees a layer when asked for the next. See `first_row`. Collective.
    """
    entries = te_llama.parameter_map(model.module)
    outside, names = dict(entries), {module: name for name, module in model.module.named_modules()}

    def loaded() -> Iterator[nn.Module]:
        for layer in layers:
            layer_names = [name for name in entries if name.startswith(f"{names[layer]}.")]
            check_weights(model, {name: outside.pop(name) for name in layer_names})
            yield layer

    verdict = judge(compare_layers(model, loaded(), first_row(batch, max_seq_length, num_slices), dtype), dtype)
    check_weights(model, outside)
    return f"parity with Hugging Face: {sum(map(len, entries.values()))} stored tensors loaded bit for bit; {verdict}"


def check_weights(model: Model, entries: Mapping[str, tuple[Part, ...]]) -> None:
    """Raise `UserError` for the first stored tensor that the parameters in `entries` do not contain bit for bit."""
    for te_name, parts in entries.items():
        full = model.full_tensor(model.module.get_parameter(te_name))
        assert model.stored is not None
        for part in parts:
            weight = model.stored.read(model.source_names[part.hf_name], full.device)
            if weight.dtype != full.dtype == torch.bfloat16:
                weight = split_master(weight.float())[0]  # the same rounding as in loading
            if not torch.equal(full[part.start : part.stop], weight.to(full)):
                source = model.module.config.name_or_path
                raise UserError(f"--use_te: {part.hf_name} is not the tensor in {source}. {_ADVICE}")


def compare_layers(model: Model, layers: Iterable[Any], row: Row, dtype: torch.dtype) -> list[Comparison]:
    """Build TE and Hugging Face layers with the model's weights, and compare them for `row` (see `first_row`)."""
    input_ids, position_ids, cu_seqlens = row
    documents = {"cu_seq_lens_q": cu_seqlens, "max_length_q": int((cu_seqlens[1:] - cu_seqlens[:-1]).max())}
    config, full_tensor = text_decoder(model.module).config, model.full_tensor
    embedding: Any = model.module.get_input_embeddings()
    generator = torch.Generator(device=input_ids.device).manual_seed(0)
    pairs: dict[tuple[Any, torch.dtype], tuple[Any, Any]] = {}
    comparisons = []
    for number, layer in enumerate(layers):
        if number == 0:  # loading the first layer has also loaded the embedding
            hidden = F.embedding(input_ids, full_tensor(embedding.weight).to(dtype))
            hidden = hidden * getattr(embedding, "embed_scale", 1)
            hidden = _first_layer_input(_one_layer_model(config, 0, dtype, hidden.device), hidden)
        if not isinstance(layer, te_llama.TEDecoderLayer):  # one of Hugging Face's layers: only compute its output
            reference: Any = _one_layer_model(config, number, dtype, hidden.device)
            reference.layers[0].load_state_dict({name: full_tensor(p) for name, p in layer.named_parameters()})
            hidden = _run(reference, hidden, torch.zeros_like(hidden), position_ids=position_ids)[0]["output"]
            continue
        spec = dataclasses.replace(layer.spec, attention_dropout=0.0, residual_dropout=0.0)
        parts = te_llama.layer_map(spec)
        weights = {name: full_tensor(layer.get_parameter(name)) for name in parts}
        gradient = torch.randn(hidden.shape, generator=generator, device=hidden.device)
        hf, te = dict[torch.dtype, Tensors](), dict[torch.dtype, Tensors]()
        for kind in dict.fromkeys((torch.float32, dtype)):
            if (spec, kind) not in pairs:
                te_layer = te_llama.TEDecoderLayer(spec, number, layer.softmax_scale, kind, hidden.device)
                pairs[spec, kind] = _one_layer_model(config, number, kind, hidden.device), te_layer
                separate_documents(pairs[spec, kind][0], cu_seqlens)
            reference, te_layer = pairs[spec, kind]
            reference.layers[0].load_state_dict(te_llama.in_hf_layout(parts, weights))
            with torch.no_grad():
                for name, parameter in te_layer.named_parameters():
                    parameter.copy_(weights[name])
            results, gradients = _run(reference, hidden.to(kind), gradient.to(kind), position_ids=position_ids)
            layer_gradients = {name.removeprefix("layers.0."): value for name, value in gradients.items()}
            hf[kind] = results | _joined(parts, layer_gradients)
            te_layer.angles = layer.angles
            results, gradients = _run(te_layer, hidden.to(kind), gradient.to(kind), **documents)
            te[kind] = results | _joined(parts, te_llama.in_hf_layout(parts, gradients))
        for name, exact in hf[torch.float32].items():
            measured = (te[torch.float32], te[dtype], hf[dtype])
            errors = (relative_difference(tensors[name], exact) for tensors in measured)
            comparisons.append(Comparison(number, name, *errors))
        hidden = hf[dtype]["output"]
    return comparisons


def _one_layer_model(config: PretrainedConfig, layer: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build Hugging Face's decoder with only layer number `layer`, a tiny vocabulary and no final norm."""
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 16, None
    config.attention_dropout = config.residual_dropout = config.resid_pdrop = 0.0
    for entry in ("layer_types", "no_rope_layers"):
        if (of_layers := getattr(config, entry, None)) is not None:
            setattr(config, entry, [of_layers[layer]])
    with torch.device(device):
        model: nn.Module = AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.norm, model.embed_tokens = nn.Identity(), nn.Identity()
    return model.train()


@torch.no_grad()
def _first_layer_input(model: Any, embeddings: Tensor) -> Tensor:
    """Return the input [1, S, h] of the model's first layer for `embeddings` [1, S, h], which some families scale."""
    inputs: list[Tensor] = []
    with model.layers[0].register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0])):
        model(inputs_embeds=embeddings, use_cache=False)
    return inputs[0]


def _run(module: nn.Module, hidden: Tensor, gradient: Tensor, **arguments: object) -> tuple[Tensors, Tensors]:
    """Run forward and backward pass. Return output and input gradient [1, S, h], and parameter gradients by name."""
    module.zero_grad(set_to_none=True)
    hidden = hidden.clone().requires_grad_()
    if isinstance(module, PreTrainedModel):
        layers: Any = module.layers
        with layers[0].register_forward_pre_hook(lambda _, inputs: (hidden, *inputs[1:])):  # not scaled
            output = module(inputs_embeds=hidden, use_cache=False, **arguments).last_hidden_state
    else:
        output = module(hidden, **arguments)
    # The first backward pass of a process runs in a thread without a CUDA context; cuBLAS then uses the device's.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    output.backward(gradient)
    gradients: dict[str, Any] = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert hidden.grad is not None
    return {"output": output.detach(), "input gradient": hidden.grad}, gradients


def _joined(parts_of_layer: Mapping[str, Sequence[Part]], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients by name. Those of q, k and v biases are joined, as k's alone is mostly rounding error."""
    joined = {}
    for parts in (parts for parts in parts_of_layer.values() if not parts[0].hf_name.endswith(NOT_COMPARED)):
        names = [part.hf_name for part in parts]
        for group in [names] if gradients[names[0]].ndim == 1 else [[name] for name in names]:
            joined[f"gradient of {' and '.join(group)}"] = torch.cat([gradients[name] for name in group])
    return joined
