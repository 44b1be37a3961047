"""Greedy generation: text for a list of prompts, with a KV cache, in batches padded on the left.

It runs in a plain Hugging Face model, in bf16 on a GPU and in fp32 on a CPU, as a user of the exported one would; a
model in training is copied into one first. The TE decoder doesn't generate: single tokens violate the shape multiples
of fp8 kernels, and its KV cache path is slow. bf16 rounds differently in different kernels, so a text can depend on its
batch; the same prompts and batch size give the same texts.

The families of the TE decoder get a loop of their own: a static cache, and on a GPU one CUDA graph for all steps. With
transformers' `generate`, which serves the other families, the kernels' launches and cuDNN's plan for every new length
of the cache decide the time (benchmarks/generation.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StaticCache,
)

import te_llama
from llm_fp8.data.prepare import pad_token_id
from llm_fp8.models.export import hf_tensors
from llm_fp8.models.weight_shards import saved_tensors
from llm_fp8.observability.metrics import GIB
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.torch_internals import materialize_

LARGEST_BATCH, SMALLEST_BATCH = 1024, 64
"""Prompts at a time."""
BATCH_GIB = 8.0
"""GPU memory that a batch larger than the smallest may take for cache and activations."""
STEPS_BEFORE_CAPTURE = 3
"""Steps that run as they are, so that libraries have their workspaces when the graph is captured."""
STEPS_BETWEEN_CHECKS = 16
"""Whether all sequences have ended is asked this often: the answer costs a synchronisation."""
HEADROOM_GIB = 1.0
"""GPU memory for workspaces, attention's mask and one gathered parameter, beside what `memory_needed_gib` counts."""


def generation_dtype(device: torch.device) -> torch.dtype:
    """bf16 on a GPU that has it, else fp32."""
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32


def check_positions(prompts: Sequence[Sequence[int]], config: PretrainedConfig, max_new_tokens: int, flag: str) -> None:
    """Raise `UserError` where the longest prompt (token ids) and `max_new_tokens`, which `flag` sets, exceed the
    model's positions.
    """
    limit = getattr(config, "max_position_embeddings", None)
    longest = max(map(len, prompts))
    if limit is not None and longest + max_new_tokens > limit:
        raise UserError(
            f"{flag} {max_new_tokens} with the longest prompt of {longest} tokens is more than the model's {limit} "
            f"positions (max_position_embeddings); lower it to {limit - longest} or less."
            if longest < limit
            else f"the longest prompt has {longest} tokens, and the model has {limit} positions "
            "(max_position_embeddings) in all; lower --max_seq_length."
        )


def memory_needed_gib(config: PretrainedConfig, num_parameters: int, num_tokens: int, device: torch.device) -> float:
    """GPU memory of generation: weights, KV cache of `num_tokens` tokens, activations, and headroom.

    Activations peak in an MLP: three tensors of `intermediate_size` and up to four of `hidden_size`.
    """
    num_elements = num_parameters + _elements_per_token(config) * num_tokens
    return num_elements * generation_dtype(device).itemsize / GIB + HEADROOM_GIB


def _elements_per_token(config: PretrainedConfig) -> int:
    """Of the KV cache and of activations."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * heads * head_dim
    return cached + 3 * config.intermediate_size + 4 * config.hidden_size


def default_batch_size(config: PretrainedConfig, num_tokens: int) -> int:
    """Prompts to generate from at a time, each with its answer of up to `num_tokens`: a function of the model alone, so
    that the same run gives the same texts on every GPU.
    """
    fitting = int(BATCH_GIB * GIB) // (2 * _elements_per_token(config) * num_tokens)
    return min(LARGEST_BATCH, max(SMALLEST_BATCH, fitting))


def copy_for_generation(
    model: PreTrainedModel, full_tensor: Callable[[Tensor], Tensor], export_dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """A Hugging Face model on `device` with the weights of `model` (TE or Hugging Face), rounded as in its export.

    `full_tensor` unshards a parameter; collective where that is. Leaves the random state alone.
    """
    # As an export keeps it, without training's attention implementation.
    config = type(model.config).from_dict(model.config.to_dict())
    # Buffers on the CPU, as loading an exported model computes them.
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        copied: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=generation_dtype(device))
    materialize_(copied, device, device)
    copied.tie_weights()
    targets = saved_tensors(copied)
    with torch.no_grad():
        for name, tensor in hf_tensors(model, full_tensor):
            targets.pop(name).copy_(tensor.to(export_dtype))
            del tensor
    if targets:
        raise AssertionError(f"not copied: {', '.join(targets)}")
    return copied.eval()


@torch.no_grad()
def generate_greedy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int | None = None,
) -> list[str]:
    """Greedy continuations of `prompts` (token ids) up to EOS or `max_new_tokens`, without special tokens.

    `batch_size`: `default_batch_size` by default. The model's generation config plays no part: a checkpoint's sampling,
    penalties and further stop tokens don't apply.
    """
    # Prompts of similar length together: little padding.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    texts = [""] * len(prompts)
    batch_size = batch_size or default_batch_size(model.config, max(map(len, prompts), default=0) + max_new_tokens)
    eos = tokenizer.eos_token_id
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        generated = _generate_batch(model, [prompts[i] for i in chosen], max_new_tokens, pad_token_id(tokenizer), eos)
        for index, new_ids in zip(chosen, generated.tolist(), strict=True):
            end = new_ids.index(eos) if eos in new_ids else len(new_ids)
            texts[index] = str(tokenizer.decode(new_ids[:end], skip_special_tokens=True))
    return texts


def _generate_batch(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, pad: int, eos: int
) -> Tensor:
    """New ids [n, up to max_new_tokens] of n prompts, the longest first; undefined behind a sequence's EOS."""
    num, width = len(prompts), len(prompts[0])
    ids = torch.full((num, width), pad)
    is_padding = torch.zeros(num, width + max_new_tokens, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        is_padding[row, : width - len(prompt)] = True
    device = model.device
    ids, is_padding = ids.to(device), is_padding.to(device)
    if model.config.model_type not in te_llama.SUPPORTED_MODEL_TYPES:
        mask = (~is_padding[:, :width]).long()
        options = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos, pad_token_id=pad)
        model.generation_config = options  # in place of the checkpoint's, whose entries would fill the gaps
        generate: Callable[..., Tensor] = model.generate  # type: ignore[assignment]
        return generate(input_ids=ids, attention_mask=mask)[:, width:]
    first = is_padding.sum(1, keepdim=True)
    cache = _full_cache(model.config, width + max_new_tokens)

    def next_token(ids: Tensor, columns: Tensor) -> Tensor:
        output = model(
            input_ids=ids,
            attention_mask=_attention_masks(model.config, is_padding, columns),
            position_ids=(columns - first).clamp_min(0),
            past_key_values=cache,
            logits_to_keep=1,
        )
        return output.logits[:, -1].argmax(-1, keepdim=True)

    token = next_token(ids, torch.arange(width, device=device))
    column = torch.full((1,), width, device=device)  # of `token`
    new_ids = torch.full((num, max_new_tokens), pad, device=device)
    new_ids[:, :1] = token

    def step() -> None:  # no host synchronisation, and every tensor in place: a graph can replay it
        token.copy_(next_token(token, column))
        column.add_(1)
        new_ids.index_copy_(1, column - width, token)

    run = step
    for done in range(1, max_new_tokens):
        if done % STEPS_BETWEEN_CHECKS == 0 and bool((new_ids[:, :done] == eos).any(1).all()):  # `pad` may be `eos`
            break
        if device.type == "cuda" and done == STEPS_BEFORE_CAPTURE:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            run = graph.replay
        run()
    return new_ids


def _full_cache(config: PretrainedConfig, num_columns: int) -> StaticCache:
    """A cache that keeps all columns in every layer: one with a window counts on the host, which a graph would freeze;
    here the masks hold the window.
    """
    config = copy.deepcopy(config)
    config.layer_types = config.sliding_window = None
    return StaticCache(config, max_cache_len=num_columns)


def _attention_masks(config: PretrainedConfig, is_padding: Tensor, columns: Tensor) -> Tensor | dict[str, Tensor]:
    """What the tokens at `columns` [q] attend to: bool [n, 1, q, all columns], by type of layer where the model mixes
    types. `is_padding`: [n, all columns].

    A padding token attends to itself: attention over nothing is NaN in some kernels, and reaches the others as 0 x NaN.
    """
    queries, keys = columns[:, None], torch.arange(is_padding.shape[1], device=columns.device)

    def mask(window: int | None) -> Tensor:
        seen = (keys <= queries) if window is None else (keys <= queries) & (keys > queries - window)
        return (seen & ~is_padding[:, None, None]) | (keys == queries)

    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return mask(window)
    return {name: mask(window if name == "sliding_attention" else None) for name in set(types)}
