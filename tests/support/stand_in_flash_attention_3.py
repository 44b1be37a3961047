"""flash-attn 3's two operators on the CPU, with its schemas: attention and its gradients written out in fp32,
document by document.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? "
    "page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? "
    "rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? "
    "v_descale=None, float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int "
    "window_size_right=-1, int attention_chunk=0, float softcap=0., bool is_rotary_interleaved=False, Tensor? "
    "scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, "
    "Tensor, Tensor)"
)
BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? "
    "seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, float? "
    "softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0., "
    "bool deterministic=False, int sm_margin=0) -> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, "
    "Tensor, Tensor)"
)


def _by_name(schema: str, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call, as an operator of C++ has them: a kernel in Python is given a part of them by
    position, and defaults not at all.
    """
    arguments = torch._C.parse_schema(schema).arguments
    by_position = zip((argument.name for argument in arguments), given, strict=False)
    return {argument.name: argument.default_value for argument in arguments} | dict(by_position) | named


def _documents(options: dict[str, Any]) -> list[tuple[slice, Tensor]]:
    """The rows of each document, and which of its positions see which, bool [n, n]."""
    left, right = options["window_size_left"], options["window_size_right"]
    assert options["is_causal"] and ((left, right) == (-1, -1) or (left >= 0 and right == 0))
    assert options["cu_seqlens_q"].dtype == torch.int32 and torch.equal(
        options["cu_seqlens_q"], options["cu_seqlens_k"]
    )
    documents = []
    for start, stop in itertools.pairwise(options["cu_seqlens_q"].tolist()):
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        documents.append((slice(start, stop), (distance >= 0) & (distance <= (stop - start if left < 0 else left))))
    longest = max(rows.stop - rows.start for rows, _seen in documents)
    assert options["max_seqlen_q"] == options["max_seqlen_k"] == longest
    return documents


def _heads(x: Tensor, rows: slice, repeats: int = 1) -> Tensor:
    """[T, heads, d] -> fp32 [heads * repeats, n, d] of one document."""
    return x[rows].float().transpose(0, 1).repeat_interleave(repeats, 0)


def _scores(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    return (scale * q @ k.transpose(1, 2)).masked_fill(~seen, float("-inf"))


def _forward(options: dict[str, Any]) -> tuple[Tensor, ...]:
    q, k, v = (options[name] for name in ("q", "k", "v"))
    assert options["num_splits"] == 1
    out, log_sum_exp = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    group = q.shape[1] // k.shape[1]
    for rows, seen in _documents(options):
        scores = _scores(_heads(q, rows), _heads(k, rows, group), seen, options["softmax_scale"])
        log_sum_exp[:, rows] = scores.logsumexp(-1)
        out[rows] = (scores.softmax(-1) @ _heads(v, rows, group)).transpose(0, 1).to(out.dtype)
    return out, log_sum_exp, torch.empty(0), torch.empty(0)


def _backward(options: dict[str, Any]) -> tuple[Tensor, ...]:
    q, k, v, dout, out, log_sum_exp = (options[name] for name in ("q", "k", "v", "dout", "out", "softmax_lse"))
    dq, dk, dv = (options[name] for name in ("dq", "dk", "dv"))
    assert dout.stride(-1) == 1 and dout.dtype == q.dtype
    scale, group = options["softmax_scale"], q.shape[1] // k.shape[1]

    def of_keys(gradient: Tensor) -> Tensor:
        """fp32 [heads, n, d] -> [n, kv_heads, d]: the sum over the queries of a group."""
        return gradient.unflatten(0, (-1, group)).sum(1).transpose(0, 1)

    for rows, seen in _documents(options):
        queries, keys, values, above = (
            _heads(q, rows),
            _heads(k, rows, group),
            _heads(v, rows, group),
            _heads(dout, rows),
        )
        shares = (_scores(queries, keys, seen, scale) - log_sum_exp[:, rows, None]).exp()
        own = (above * _heads(out, rows)).sum(-1, keepdim=True)
        slopes = scale * shares * (above @ values.transpose(1, 2) - own)
        dq[rows] = (slopes @ keys).transpose(0, 1).to(dq.dtype)
        dk[rows] = of_keys(slopes.transpose(1, 2) @ queries).to(dk.dtype)
        dv[rows] = of_keys(shares.transpose(1, 2) @ above).to(dv.dtype)
    return dq, dk, dv, *(torch.empty(0) for _ in range(5))


@contextlib.contextmanager
def stand_in_operators() -> Iterator[list[dict[str, Any]]]:
    """`torch.ops.flash_attn_3` while the block lasts; gives the options of each forward call."""
    calls: list[dict[str, Any]] = []

    def forward(*given: Any, **named: Any) -> tuple[Tensor, ...]:
        calls.append(_by_name(FWD, given, named))
        return _forward(calls[-1])

    def backward(*given: Any, **named: Any) -> tuple[Tensor, ...]:
        return _backward(_by_name(BWD, given, named))

    with torch.library._scoped_library("flash_attn_3", "FRAGMENT") as library:
        library.define(FWD)
        library.define(BWD)
        library.impl("fwd", forward, "CPU")
        library.impl("bwd", backward, "CPU")
        yield calls
