"""Attention of packed documents for transformers' decoders, by the flash attention kernels that torch contains.

sdpa needs a mask to separate documents, and no fast kernel accepts one: on two H200s, Qwen3-30B-A3B spent 0.43 s of a
step in attention with a mask, and 0.12 s with these kernels. They get the bounds of the documents instead.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

VARLEN = "varlen"  # transformers' name for this implementation; of a name that it does not know, it builds no mask
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")  # arguments of transformers' attention functions


def use_varlen_attention(decoder: PreTrainedModel) -> None:
    """Make the attention layers of `decoder` call `_attend`."""
    AttentionInterface.register(VARLEN, _attend)
    decoder.set_attn_implementation(VARLEN)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Return the context [1, T, heads, value's d] and no weights, for `query` [1, heads, T, d], `key`, and `value` with
    fewer heads. The bounds of the documents are int32 `cu_seq_lens_q` [n + 1]. Raise `NotImplementedError` if the
    kernels lack what the layer asks for.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unsupported = dropout > 0 or any(arguments.get(name) is not None for name in _UNSUPPORTED)
    if unsupported or not is_causal or cu_seq_lens_q is None:
        raise NotImplementedError(f"{VARLEN} attention does not support this layer")
    size = value.shape[-1]
    padded = F.pad(value, (0, query.shape[-1] - size))  # the kernels need heads of one size
    # With torch.autocast, a norm or RoPE may return fp32.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, padded))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # keys before and after a query
    lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    grouped = len(key[0]) < len(query[0])
    context: Any = varlen_attn(q, k, v, *lengths, scale=scaling, window_size=window, enable_gqa=grouped)
    return context[None, ..., :size], None
