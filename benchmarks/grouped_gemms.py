#!/usr/bin/env python
"""Time the GEMMs of a mixture's experts in bf16 and fp8, and the casts that fp8 needs, on one GPU.

    pip install --target /tmp/deepgemm sgl-deep-gemm==0.2.1
    PYTHONPATH=/tmp/deepgemm python benchmarks/grouped_gemms.py --output grouped_gemms.json

bf16 is torch's grouped GEMM. `rows` is torch's in fp8, with one scale for each row of tokens and of weights. `blocks`
is DeepGEMM's, with one scale for 128 values of a token and for 128 x 128 of a weight; nvcc compiles its kernels. If the
package cannot be imported, `blocks` is the reason. Each token takes experts at random. Times are medians in ms, errors
are relative to bf16's result. The shape is Qwen3-30B-A3B's unless options change it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.tools.script import run_script, writable
from llm_fp8.utils.errors import OneSentenceParser, UserError, positive
from llm_fp8.utils.json_files import write_json_atomic

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
BLOCK = 128


def cast(values: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Cast the last two dimensions of `values` to E4M3, with one fp32 scale for each block of `rows` x `columns`.
    Return the fp8 values and the scales [..., rows of blocks, columns of blocks], by which they are multiplied.
    """
    blocks = values.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))  # [..., blocks, rows, blocks, columns]
    scales = blocks.abs().amax((-3, -1), keepdim=True).float().clamp_min(1e-4) / FP8_MAX
    return (blocks / scales).to(torch.float8_e4m3fn).view_as(values), scales.squeeze((-3, -1))


def placed(counts: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """Return the place of each row, and the expert of each place (int32, -1: none), if each expert's rows begin at a
    multiple of `multiple`. `counts` are the experts' numbers of rows.
    """
    padded = (counts + multiple - 1) // multiple * multiple
    experts = torch.arange(len(counts), device=counts.device)
    first = torch.repeat_interleave(padded.cumsum(0) - padded - (counts.cumsum(0) - counts), counts)
    places = first + torch.arange(int(counts.sum()), device=counts.device)
    expert_of = torch.full((int(padded.sum()),), -1, dtype=torch.int32, device=counts.device)
    expert_of[places] = torch.repeat_interleave(experts, counts).to(torch.int32)
    return places, expert_of


def median_ms(work: Callable[[], object]) -> float:
    return Timer("work()", globals={"work": work}).blocked_autorange().median * 1e3  # Timer warms up and synchronises


def measure(rows: Tensor, weights: Tensor, counts: Tensor) -> dict[str, Any]:
    """Return times and errors of the product of `rows` [M, k], sorted by expert, and `weights` [experts, n, k]."""
    torch.compiler.reset()  # with the code of earlier shapes, the limit of recompilations would be reached
    ends, compiled, k = counts.cumsum(0).to(torch.int32), torch.compile(cast, dynamic=False), rows.shape[1]
    in_bf16 = partial(torch._grouped_mm, rows, weights.transpose(1, 2), offs=ends)
    exact = in_bf16()

    def entry(result: Tensor, product: Callable[[], object], *casts: Callable[[], object]) -> dict[str, float]:
        error = (result.float() - exact.float()).norm() / exact.float().norm()
        times = dict(
            zip(("gemm_ms", "cast_rows_ms", "cast_weights_ms"), map(median_ms, (product, *casts)), strict=True)
        )
        return times | {"error": float(error)}

    casts = partial(compiled, rows, 1, k), partial(compiled, weights, 1, k)
    (a, scale_a), (b, scale_b) = (each() for each in casts)
    operands = a, b.transpose(1, 2), scale_a.flatten(), scale_b.flatten(1)
    by_rows = partial(torch._scaled_grouped_mm, *operands, offs=ends, out_dtype=torch.bfloat16)
    figures: dict[str, Any] = {"rows": entry(by_rows(), by_rows, *casts), "bf16": {"gemm_ms": median_ms(in_bf16)}}
    try:
        from deep_gemm import get_mk_alignment_for_contiguous_layout, m_grouped_fp8_gemm_nt_contiguous
    except (ImportError, OSError) as error:
        return figures | {"blocks": " ".join(str(error).split())}
    places, expert_of = placed(counts, get_mk_alignment_for_contiguous_layout())
    apart = rows.new_zeros(len(expert_of), k).index_copy(0, places, rows)
    result = rows.new_empty(len(apart), exact.shape[1])
    casts = partial(compiled, apart, 1, BLOCK), partial(compiled, weights, BLOCK, BLOCK)
    by_blocks = partial(m_grouped_fp8_gemm_nt_contiguous, *(each() for each in casts), result, expert_of)
    by_blocks()
    return figures | {"blocks": entry(result[places], by_blocks, *casts)}


def main() -> int:
    parser = OneSentenceParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    shape = {"tokens": 16384, "experts": 128, "per_token": 8, "hidden": 2048, "intermediate": 768}
    for name, default in shape.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help="of the shape")
    parser.add_argument("--output", required=True, type=writable, help="JSON file to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("grouped_gemms.py needs an NVIDIA GPU, and none is found.")
    torch.manual_seed(0)
    scores = torch.rand(options.tokens, options.experts, device="cuda")
    counts = scores.topk(options.per_token).indices.flatten().bincount(minlength=options.experts)
    two, hidden = 2 * options.intermediate, options.hidden
    sizes = {
        "gate_up": (two, hidden),
        "down": (hidden, two // 2),
        "gate_up dgrad": (hidden, two),
        "down dgrad": (two // 2, hidden),
    }
    results = {}
    for name, (n, k) in sizes.items():
        rows = torch.randn(int(counts.sum()), k, device="cuda", dtype=torch.bfloat16)
        weights = 0.02 * torch.randn(options.experts, n, k, device="cuda", dtype=torch.bfloat16)
        results[name] = measure(rows, weights, counts)
        print(name, results[name], flush=True)
        record = {"provenance": collect_provenance(sys.argv), "shape": {key: vars(options)[key] for key in shape}}
        write_json_atomic(options.output, record | {"gemms": results})
    return 0


if __name__ == "__main__":
    run_script(main)
