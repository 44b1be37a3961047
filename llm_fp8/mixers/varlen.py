"""Attention of packed documents for transformers' decoders, by the flash attention kernels that torch contains.

sdpa needs a mask to separate documents, and no fast kernel accepts one: on two H200s, Qwen3-30B-A3B spent 0.43 s of a
step in attention with a mask, and 0.12 s with these kernels. They get the bounds of the documents instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from llm_fp8.utils.errors import is_out_of_memory

VARLEN = "varlen"  # transformers' name for this implementation; of a name that it does not know, it builds no mask
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # arguments of transformers' attention functions


def use_varlen_attention(decoder: PreTrainedModel) -> None:
    """Make the attention layers of `decoder` call `_attend`."""
    AttentionInterface.register(VARLEN, _attend)
    decoder.set_attn_implementation(VARLEN)


def supports_varlen(decoder: PreTrainedModel, hidden_in: Callable[[Any], Tensor], form: Any) -> bool:
    """Return True if these kernels compute almost what `decoder` computes with its own attention, in bf16. `hidden_in`
    returns hidden states [tokens, h] of packed documents in a form: `form` for its own attention. Changes `decoder`.
    """
    for parameter in decoder.parameters():
        parameter.data = parameter.data.bfloat16()  # RoPE's buffers stay fp32, as in a run
    reference = hidden_in(form).float()
    use_varlen_attention(decoder)
    decoder.train()  # since dropout, which the kernels lack, is 0 in evaluation
    try:
        with torch.enable_grad():
            hidden = hidden_in(VARLEN)
            hidden.sum().backward()
    except (TypeError, ValueError, RuntimeError) as error:  # of the layer, or of the kernels on this GPU
        if is_out_of_memory(error):
            raise
        return False
    # A wrong mask or window changes a third of the tokens; rounding changes the experts of a few. NaN is not < 0.05.
    errors = (hidden.detach().float() - reference).norm(dim=-1) / reference.norm(dim=-1)
    return float((errors < 0.05).float().mean()) > 0.8


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Return the context [1, T, heads, d of `value`] and no weights, for `query` [1, heads, T, d], and for `key` and
    `value` with as many heads or fewer. Raise `NotImplementedError` if the kernels lack one of transformers' `options`.
    """
    bounds, window = options.get("cu_seq_lens_q"), options.get("sliding_window")
    is_causal = getattr(module, "is_causal", True) if options.get("is_causal") is None else options["is_causal"]
    unsupported = options.get("dropout") or any(options.get(name) is not None for name in _UNSUPPORTED)
    if unsupported or not is_causal or bounds is None:
        raise NotImplementedError(f"{VARLEN} attention does not support this layer")
    size = value.shape[-1]
    padded = F.pad(value, (0, query.shape[-1] - size))  # the kernels need heads of one size
    # With torch.autocast, a norm or RoPE may return fp32.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, padded))
    kernel: dict[str, Any] = {"scale": options.get("scaling"), "enable_gqa": k.shape[1] < q.shape[1]}
    kernel["window_size"] = (-1 if window is None else window - 1, 0)  # keys before and after a query
    context: Any = varlen_attn(q, k, v, bounds, bounds, options["max_length_q"], options["max_length_k"], **kernel)
    return context[None, ..., :size], None
