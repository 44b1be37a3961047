#!/usr/bin/env python
"""Training throughput of this project's recipes and of the usual set-up, in one run on one GPU.

    python scripts/benchmark.py --models Llama-3.2-1B --arms hf_bf16,bf16,delayed,current,block --output result.json

Random weights, random tokens, rows of `--seq_length` tokens that are one document each, the optimizer step included. Arms:

- hf_bf16: transformers' model in bf16 (sdpa) with Accelerate's bf16 mixed precision, torch's fused AdamW on the bf16 weights, the loss as
  transformers computes it. The usual set-up, and lighter than ours: its optimizer keeps no master weights.
- bf16, delayed, current, block: this project's Trainer with the TE decoder and the default optimizer (fp32-quality master weights).

Arms take turns `--rounds` times, each time built anew. Steps before `--warmup` are left out; the figures are medians over the others. One more
step is profiled, for the GEMM kernels that ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # for every arm, as in the training scripts

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accelerate.state import AcceleratorState

from llm_fp8.errors import UserError, run_script
from llm_fp8.json_files import write_json_atomic
from llm_fp8.kernels import gemm_kernels
from llm_fp8.metrics import GIB, DecoderSize, StepTokens, device_peak_tflops, step_flops
from llm_fp8.models import bundled_architectures
from llm_fp8.precision import forget_delayed_scales
from llm_fp8.provenance import collect_provenance
from llm_fp8.throughput.arms import PRECISIONS
from llm_fp8.throughput.ours import OurArm, OurTraining
from llm_fp8.throughput.rival import HfTraining
from llm_fp8.throughput.workload import Workload

RIVAL = "hf_bf16"
ARMS = (RIVAL, *PRECISIONS)


def measure(work: Workload, arm: str, warmup: int) -> dict[str, Any]:
    """Build an arm, time it, profile one step, and let go of it."""
    torch.cuda.reset_peak_memory_stats()
    AcceleratorState._reset_state(reset_partial_state=True)  # the arms differ in what they ask of Accelerate's singleton
    forget_delayed_scales()
    started = time.perf_counter()
    training = HfTraining(work) if arm == RIVAL else OurTraining(work, OurArm(PRECISIONS[arm]))
    training.take(work.num_steps)
    peak_gib = torch.cuda.max_memory_allocated() / GIB
    times, losses = list(training.recorder.step_times_s), list(training.recorder.losses)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        training.take(1)
        torch.cuda.synchronize()
    gemms = gemm_kernels(prof)
    return {
        **training.facts,
        "step_times_s": times[warmup:],
        "losses": losses,
        "peak_memory_gib": peak_gib,
        "reserved_memory_gib": torch.cuda.max_memory_reserved() / GIB,
        "gemm_kernels": {kind: {"count": kernels.count, "time_s": kernels.time_s} for kind, kernels in gemms.items()},
        "wall_time_s": time.perf_counter() - started,
    }


def summarise(work: Workload, arm: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of one arm: medians over all timed steps of all rounds."""
    size = DecoderSize.from_config(work.hf_config())
    times = sorted(value for measured in rounds for value in measured["step_times_s"])
    median = statistics.median(times)
    tokens = work.tokens_per_step
    flops = step_flops(size, StepTokens(tokens, tokens, tokens, tokens * work.seq_length))
    return {
        **dataclasses.asdict(work),
        "arm": arm,
        "tokens_per_s": tokens / median,
        "tokens_per_s_slowest": tokens / times[-1],
        "tokens_per_s_fastest": tokens / times[0],
        "model_tflops": flops / median / 1e12,
        "peak_memory_gib": max(measured["peak_memory_gib"] for measured in rounds),
        "rounds": rounds,
    }


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", default="Llama-3.2-1B", help=f"comma-separated, of {', '.join(bundled_architectures())}")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"comma-separated, of {', '.join(ARMS)}")
    parser.add_argument("--batch_size", type=int, default=8, help="rows of a micro-batch (default 8)")
    parser.add_argument("--seq_length", type=int, default=1024, help="tokens of a row (default 1024)")
    parser.add_argument("--micro_batches", type=int, default=4, help="micro-batches of an optimizer step (default 4)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps per round, the left-out ones included (default 8)")
    parser.add_argument("--warmup", type=int, default=3, help="steps of a round left out (default 3)")
    parser.add_argument("--rounds", type=int, default=1, help="how often the arms take turns (default 1)")
    parser.add_argument("--output", help="JSON file for the results")
    return parser.parse_args(argv)


def main() -> int:
    """Run every arm of every model; print a table; write the JSON."""
    options = parse(sys.argv[1:])
    models, arms = options.models.split(","), options.arms.split(",")
    for flag, given, known in (("--models", models, bundled_architectures()), ("--arms", arms, ARMS)):
        if unknown := [name for name in given if name not in known]:
            raise UserError(f"{flag}: {', '.join(unknown)} is unknown; choose from {', '.join(known)}.")
    if not torch.cuda.is_available():
        raise UserError("the benchmark needs an NVIDIA GPU, and none is found.")
    device = torch.device("cuda")
    rows = []
    for model in models:
        work = Workload(model, options.batch_size, options.seq_length, options.micro_batches, options.steps)
        rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for _ in range(options.rounds):
            for arm in arms:
                try:
                    rounds[arm].append(measure(work, arm, options.warmup))
                except torch.OutOfMemoryError:
                    print(f"{model:14} {arm:8} does not fit this GPU's memory", flush=True)
                gc.collect()
                torch.cuda.empty_cache()
        for arm in arms:
            if rounds[arm]:
                rows.append(summarise(work, arm, rounds[arm]))
                print_row(rows[-1])
            else:
                rows.append({**dataclasses.asdict(work), "arm": arm, "out_of_memory": True})
    if options.output:
        record = {"provenance": collect_provenance(sys.argv), "peaks": _peaks(device), "rows": rows}
        write_json_atomic(Path(options.output), record)
    return 0


def _peaks(device: torch.device) -> dict[str, Any] | None:
    peak = device_peak_tflops(device)
    return None if peak is None else dataclasses.asdict(peak)


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    gemms = row["rounds"][-1]["gemm_kernels"]
    kernels = ", ".join(f"{kind} {found['count']}" for kind, found in sorted(gemms.items()))
    print(
        f"{row['model']:14} {row['arm']:8} {row['tokens_per_s']:9,.0f} tokens/s  {row['model_tflops']:6.0f} TFLOP/s  "
        f"{row['peak_memory_gib']:6.1f} GiB  GEMM kernels: {kernels}",
        flush=True,
    )


if __name__ == "__main__":
    run_script(main)
