#!/usr/bin/env python
"""Attention alone, in bf16 and with its GEMMs in fp8 (`fp8_dpa` of Transformer Engine's recipes), forward and backward.

    python benchmarks/fp8_attention.py --output benchmarks/results/fp8_attention_h100.json

16,384 tokens of Llama-3's heads, as packed documents (`thd`, which training takes) and as rows (`bshd`). Times are
medians of one pass on an otherwise idle GPU. The error of a result is the norm of its difference from bf16's over
bf16's norm. A layout that no kernel computes is an entry with the reason.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from llm_fp8.models.parity import relative_difference
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import require_writable, write_json_atomic

TOKENS, HEADS, KV_HEADS = 16384, 32, 8
HEAD_DIMS = (64, 128)
LENGTHS = (1024, 8192)
WARMUP, PASSES = 5, 15
"""The first passes also set delayed scaling's scales."""


def recipes() -> dict[str, Any]:
    """Name -> recipe of Transformer Engine, None for bf16."""
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

    return {"bf16": None, "delayed": DelayedScaling(fp8_dpa=True), "current": Float8CurrentScaling(fp8_dpa=True)}


def tensors(layout: str, head_dim: int, length: int) -> list[Tensor]:
    """Query, key, value and the output's gradient, bf16 [T, heads, head_dim] or [B, S, heads, head_dim]."""
    torch.manual_seed(0)
    leading = (TOKENS,) if layout == "thd" else (TOKENS // length, length)
    shapes = [(*leading, heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS)] + [(*leading, HEADS * head_dim)]
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def run(layout: str, head_dim: int, length: int, recipe: Any) -> tuple[list[float], list[Tensor]]:
    """Seconds of each pass behind `WARMUP`; output and gradients of query, key and value of the last pass."""
    import transformer_engine.pytorch as te

    mask = "padding_causal" if layout == "thd" else "causal"
    attention = te.DotProductAttention(
        HEADS, head_dim, num_gqa_groups=KV_HEADS, qkv_format=layout, attn_mask_type=mask, attention_dropout=0.0
    )
    documents: dict[str, Any] = {}
    if layout == "thd":
        bounds = torch.arange(0, TOKENS + 1, length, dtype=torch.int32, device="cuda")
        documents = {
            "cu_seqlens_q": bounds,
            "cu_seqlens_kv": bounds,
            "max_seqlen_q": length,
            "max_seqlen_kv": length,
        }
    *inputs, gradient = tensors(layout, head_dim, length)
    inputs = [x.requires_grad_() for x in inputs]
    times_s, found = [], []
    for _ in range(WARMUP + PASSES):
        for leaf in inputs:
            leaf.grad = None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            output = attention(*inputs, **documents)
        output.backward(gradient.view_as(output))
        end.record()
        torch.cuda.synchronize()
        times_s.append(start.elapsed_time(end) / 1e3)
        found = [output.detach().flatten(), *(leaf.grad for leaf in inputs)]
    return times_s[WARMUP:], found


def main() -> int:
    """Measure, print, write."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the results")
    options = parser.parse_args()
    require_writable("--output", options.output)
    if not torch.cuda.is_available():
        raise UserError("this measures an NVIDIA GPU, and none is found.")
    entries: list[dict[str, Any]] = []
    for layout in ("thd", "bshd"):
        for head_dim in HEAD_DIMS:
            for length in LENGTHS:
                exact: list[Tensor] = []
                for name, recipe in recipes().items():
                    entry: dict[str, Any] = {"layout": layout, "head_dim": head_dim, "length": length, "recipe": name}
                    try:
                        times_s, found = run(layout, head_dim, length, recipe)
                    except (ValueError, RuntimeError, AssertionError) as error:  # Transformer Engine's, by its version
                        entry["error"] = str(error).strip().splitlines()[0][:300]
                    else:
                        exact = exact or found
                        entry["time_s"] = statistics.median(times_s)
                        entry["errors"] = {
                            part: relative_difference(x, y)
                            for part, x, y in zip(("output", "q", "k", "v"), found, exact, strict=True)
                        }
                    entries.append(entry)
                    print(entry, flush=True)
    write_json_atomic(
        options.output,
        {
            "provenance": collect_provenance(sys.argv),
            "tokens": TOKENS,
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "entries": entries,
        },
    )
    return 0


if __name__ == "__main__":
    run_script(main)
