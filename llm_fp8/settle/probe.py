"""Check a run of transformers' decoder with a small model of the same architecture, before weights are loaded.

The small model has the first layers of the config, at least one of each kind, with narrow MLPs, a small vocabulary and
random weights. The checks are:

1. Two packed or padded documents must have the same hidden states as each document alone. This detects attention across
   documents, a convolution or recurrence that continues in the next document, and results that depend on the position
   in a row or on the longest document. The run uses the form of packing that passes (`loss_model.PackedForm`).
2. The loss must use the same logits as transformers.
3. The backward pass must run, since some GPUs support only a kernel's forward pass.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import re
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

import te_llama
from llm_fp8.config.options import Config
from llm_fp8.data.collate import Layout
from llm_fp8.data.tokenise import Document
from llm_fp8.models.build import choose_attention, model_from_config
from llm_fp8.models.model import decoder_layers, text_decoder
from llm_fp8.models.source import text_config
from llm_fp8.step.loss_model import PackedForm, TrainingModel
from llm_fp8.utils.errors import UserError, is_out_of_memory, reading
from llm_fp8.utils.hf_internals import chosen_attention

LENGTHS = (11, 14)  # lengths of the documents, which are no multiples of layers' chunk sizes or compression rates
ROW = sum(LENGTHS) + 7  # row length, with 7 unused positions
SWITCHES = ("original_max_position_embeddings", "floor_scale")  # lengths from which documents are computed differently
MOST_LAYERS = 16
VOCABULARY = 64
WINDOW = 8  # length of sliding windows and chunks, shorter than a document
LIMIT = {torch.float32: 0.01, torch.bfloat16: 0.05}  # of relative differences; rounding gives 1e-6, errors above 0.1


def probe(config: Config, hf_config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> PackedForm | None:
    """Return the form of packing that keeps documents apart in `hf_config`'s model, or None without --packing.
    `dtype` is the compute dtype. Raise `UserError` if no form does, if padding mixes documents or the loss is wrong.
    """
    flag = f"--model_name {config.model.model_name}"
    attention = choose_attention(config.model.attn_implementation)
    # Flash attention has no fp32. Of gated delta nets Triton would compile kernels in fp32 that training does not use.
    has_delta_nets = device.type == "cuda" and hasattr(text_config(hf_config), "linear_num_key_heads")
    compiles = has_delta_nets and dtype == torch.bfloat16 and importlib.util.find_spec("fla") is not None
    if compiles:
        from llm_fp8.mixers.delta_net import SAMPLE, compile_variants_in_threads

        compile_variants_in_threads()
    tries_varlen = config.packing and attention is None and device.type == "cuda" and dtype != torch.float32
    dtype = torch.bfloat16 if attention == "flash_attention_2" or compiles else torch.float32
    hf_config, longest = copy.deepcopy(hf_config), config.data.max_seq_length
    for entries in (vars(decoder := text_config(hf_config)), *te_llama.rope_tables(decoder)):
        entries |= {name: LENGTHS[0] + 1 for name in SWITCHES if (entries.get(name) or math.inf) <= longest}
    generator, reasons = torch.Generator().manual_seed(0), list[str]()
    documents = [torch.randint(1, VOCABULARY, (length,), generator=generator).numpy() for length in LENGTHS]
    with torch.no_grad():
        task = "text by a small model of this architecture"
        advice = "Correct its config.json if it is wrong; else follow the error's advice, or use another model."
        with reading("--model_name", config.model.model_name, task, advice):
            model = small_model(hf_config, attention, device, dtype)
            training_model = TrainingModel(model, config.with_options(max_seq_length=ROW), dtype)
            sample = torch.arange(SAMPLE if compiles else LENGTHS[-1], device=device) % VOCABULARY
            with torch.enable_grad():  # flash-linear-attention does not support its backward pass on some GPUs
                _hidden_alone(training_model, sample).sum().backward()  # first, as Triton times kernels with it
            logits = model(input_ids=torch.from_numpy(documents[-1])[None].to(device), use_cache=False).logits
            references = [_hidden_alone(training_model, torch.from_numpy(ids).to(device)) for ids in documents]
        if difference := _differs(training_model.logits(references[-1]), logits, dtype):
            problem = f"changes its logits in a way that the loss here does not (by {difference:.2g})"
            raise UserError(f"{flag} {problem}; use another model.")
        rows = [[Document(ids, ids > -1, row_id=0)] for ids in documents]
        forms: list[PackedForm | None] = [None]
        if config.packing:
            rows, references = [[*rows[0], *rows[1]], rows[0]], [*references, references[0]]
            forms = ["line"] if attention == "flash_attention_2" else ["rows", "line"]
        batch = Layout(len(rows), ROW, pad_token_id=0, packed=config.packing)(rows).to(device)

        def hidden_in(form: PackedForm | None) -> Tensor:
            training_model.packed_form = form
            return training_model.hidden(batch)[batch.input_ids != 0]

        for form in forms:
            try:
                hidden = hidden_in(form)
            except (ValueError, ImportError, RuntimeError) as error:  # raised by transformers if a package is missing
                if is_out_of_memory(error):
                    raise
                reasons.append(" ".join(str(error).split()))
                continue
            if not _differs(hidden, torch.cat(references, dim=1)[0], dtype):
                if not tries_varlen:
                    return form
                from llm_fp8.mixers.varlen import supports_varlen

                return "varlen" if supports_varlen(text_decoder(model), hidden_in, form) else form
    kind = f"a model of type '{text_config(hf_config).model_type}' with {chosen_attention(model.config)} attention"
    reason = f" ({reasons[0]})" if reasons else ""
    advice = "drop --packing" if config.packing else "use another model"
    raise UserError(f"{flag}: {kind} does not keep the documents of a batch apart{reason}; {advice}.")


def small_model(
    hf_config: PretrainedConfig, attention: str | None, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Build a model with the first layers of `hf_config`, at least one of each kind, and random weights."""
    hf_config = copy.deepcopy(hf_config)
    narrow = text_config(hf_config)
    for name, value in vars(narrow).items():
        if re.search("intermediate_size|ffn_dim|ngram_vocab_size", name) and value:
            setattr(narrow, name, [16] * len(value) if isinstance(value, list) else 16)
        elif re.fullmatch("sliding_window|attention_chunk_size|compress_rates?", name) and value:
            shorter = {key: min(rate, WINDOW) for key, rate in value.items()} if isinstance(value, dict) else WINDOW
            setattr(narrow, name, shorter)
    with no_init_weights(), init_empty_weights(include_buffers=False), torch.device(device):
        model = model_from_config(hf_config, dtype=dtype, attn_implementation=attention).module
    layers = decoder_layers(model)
    kinds = [_kind(layer) for layer in layers]
    depth = max(kinds.index(kind) for kind in kinds) + 1
    decoder: Any = text_decoder(model)
    setattr(decoder, "layers" if hasattr(decoder, "layers") else "h", layers[: min(depth, MOST_LAYERS)])
    embedding: Any = model.get_input_embeddings()
    rows = (len(embedding.weight), getattr(narrow, "vocab_size_per_layer_input", None))  # rows of a table of token ids
    tables: list[Any] = [m for m in model.modules() if isinstance(m, nn.Embedding) and len(m.weight) in rows]
    for table in [embedding, *tables, model.get_output_embeddings()]:
        if table is not None and len(table.weight) > VOCABULARY:
            table.weight = nn.Parameter(table.weight[:VOCABULARY])
            table.padding_idx = None
    numbers = torch.randn(2**16 + 1, generator=torch.Generator().manual_seed(1)).to(device)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(_numbers(parameter, numbers)))
    model.eval()
    for module in model.modules():
        if hasattr(module, "A_log"):  # a recurrence, whose kernel for training may be different
            module.training = True
    return model


def _numbers(like: Tensor, numbers: Tensor) -> Tensor:
    """Return `numbers` in the shape of `like`. A matrix is scaled to preserve norms, a vector mapped to [0.2, 0.8]."""
    repeated = numbers.repeat(-(-like.numel() // len(numbers)))[: like.numel()].view(like.shape)
    values = repeated * like.shape[-1] ** -0.5 if like.ndim > 1 else 0.2 + 0.6 * repeated.sigmoid()
    return values.to(like.dtype)


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return names, types and plain attributes of the layer's modules, without indices: equal for layers of a kind."""
    simple = (bool, int, float, str, type(None))
    return tuple(
        (name, type(module), *((key, value) for key, value in vars(module).items() if isinstance(value, simple)
         and not re.search("idx|index|layer_id|layer_number", key)))
        for name, module in layer.named_modules()
    )  # fmt: skip


def _hidden_alone(model: TrainingModel, ids: Tensor) -> Tensor:
    """Return the hidden states [1, n, h] of a single document."""
    return model.decode(ids[None], position_ids=torch.arange(len(ids), device=ids.device)[None])


def _differs(value: Tensor, reference: Tensor, dtype: torch.dtype) -> float:
    """Return the largest relative error of any token's vector (bf16: second largest), or 0 if below `LIMIT[dtype]`."""
    errors = (value - reference).float().norm(dim=-1) / reference.float().norm(dim=-1).clamp_min(1e-12)
    rank = 1 if dtype == torch.float32 else 2  # in bf16, rounding may change the expert of one token
    worst = float(errors.flatten().nan_to_num(torch.inf).topk(rank).values[-1])
    return 0.0 if worst < LIMIT[dtype] else worst
