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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # for every arm, as in the training scripts

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoConfig, AutoModelForCausalLM

import te_llama
from llm_fp8.config import OptimConfig, PrecisionConfig
from llm_fp8.data.collate import Batch
from llm_fp8.errors import UserError, run_script
from llm_fp8.json_files import write_json_atomic
from llm_fp8.kernels import gemm_kernels
from llm_fp8.loop import LoopOptions, Trainer
from llm_fp8.metrics import GIB, DecoderSize, StepTokens, device_peak_tflops, step_flops
from llm_fp8.models import ARCHITECTURES, bundled_architectures, decoder_layers
from llm_fp8.optim import build_optimizer, build_scheduler
from llm_fp8.precision import Precision, resolve_precision
from llm_fp8.provenance import collect_provenance
from llm_fp8.swap import take_census
from llm_fp8.training_model import TrainingModel

OURS = {
    "bf16": PrecisionConfig(mixed_precision="bf16"),
    "delayed": PrecisionConfig(mixed_precision="fp8", fp8_scenario="delayed"),
    "current": PrecisionConfig(mixed_precision="fp8", fp8_scenario="current"),
    "block": PrecisionConfig(mixed_precision="fp8", fp8_scenario="block"),
}
ARMS = ("hf_bf16", *OURS)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every arm of a model trains on."""

    model: str
    batch_size: int
    seq_length: int
    micro_batches: int
    num_steps: int
    """Steps per round, the left-out ones included."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch_size * self.seq_length * self.micro_batches


def random_batch(work: Workload, vocab_size: int, seed: int) -> Batch:
    """One packed micro-batch of full rows, every token but each row's last supervised."""
    total = work.batch_size * work.seq_length
    ids = torch.randint(vocab_size, (1, total), generator=torch.Generator().manual_seed(seed))
    labels = ids.roll(-1, dims=1)
    labels[0, work.seq_length - 1 :: work.seq_length] = -100
    return Batch(
        input_ids=ids,
        labels=labels,
        position_ids=torch.arange(work.seq_length).repeat(work.batch_size)[None],
        attention_mask=None,
        cu_seqlens=torch.arange(0, total + 1, work.seq_length, dtype=torch.int32),
        max_seqlen=work.seq_length,
        num_tokens=total,
        num_real_tokens=total,
        num_supervised_tokens=total - work.batch_size,
        sum_squared_lengths=work.batch_size * work.seq_length**2,
        row_ids=(),
    )


class Recorder:
    """Takes the place of the run's reporter: keeps the time of each step."""

    def __init__(self) -> None:
        self.step_times_s: list[float] = []
        self.losses: list[float] = []

    def steps(self, records: list[dict[str, float]]) -> None:
        """Keep what the trainer reports."""
        self.step_times_s += [record["step_time_s"] for record in records]
        self.losses += [record["loss"] for record in records]


@dataclasses.dataclass
class FixedLoader:
    """Gives the same micro-batches at every step."""

    batches: list[Batch]
    epoch: float = 0.0

    def __iter__(self) -> Iterator[list[Batch]]:
        while True:
            yield self.batches


class NoHooks:
    """Between the steps of a benchmark nothing happens."""

    def after_first_step(self) -> None:
        """Nothing."""

    def evaluate(self, step: int) -> None:
        """Never due."""

    def save(self, step: int) -> Path:
        """Never due."""
        raise NotImplementedError


StepFunction = Callable[[int], Recorder]


def our_arm(work: Workload, options: PrecisionConfig, device: torch.device) -> tuple[StepFunction, dict[str, Any]]:
    """This project's training of `work`: a function that takes so many steps, and facts about the arm."""
    config = AutoConfig.from_pretrained(ARCHITECTURES / f"{work.model}.json")
    plan = resolve_precision(options, device)
    model = te_llama.build_te_model(config, torch.bfloat16, device)
    te_llama.initialize_weights_(model, torch.Generator(device=device).manual_seed(0))
    precision = Precision(plan, options, device, torch.bfloat16)
    precision.attach(model, decoder_layers(model))
    census = take_census(model, precision.fp8_modules, plan.compute_name, {})
    accelerator = Accelerator(mixed_precision="no")
    training_model = TrainingModel(model, work.seq_length, torch.bfloat16)
    optim = OptimConfig(learning_rate=1e-5)
    optimizer: Any = build_optimizer(optim, "adamw_master", training_model.named_parameters())
    training_model, optimizer = accelerator.prepare(training_model, optimizer, device_placement=[True, False])
    batches = [random_batch(work, config.vocab_size, seed).to(device) for seed in range(work.micro_batches)]
    recorder: Any = Recorder()
    loader: Any = FixedLoader(batches)
    trainer = Trainer(
        accelerator=accelerator,
        model=training_model,
        precision=precision,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, optim, total_steps=10_000),
        loader=loader,
        reporter=recorder,
        options=LoopOptions(total_steps=0, max_grad_norm=1.0, log_every=1000, eval_every=0, save_every=0),
        size=DecoderSize.from_config(config),
        peak=None,
        fp8_linear_flop_share=census.fp8_linear_flop_share,
    )

    def take(num_steps: int) -> Recorder:
        trainer.options = dataclasses.replace(trainer.options, total_steps=trainer.step + num_steps)
        trainer.train(hooks=NoHooks(), stop_requested=lambda: False)
        return recorder

    return take, {"precision": plan.to_dict(), "fp8_linear_flop_share": census.fp8_linear_flop_share, "optimizer": "adamw_master"}


def hf_arm(work: Workload, device: torch.device) -> tuple[StepFunction, dict[str, Any]]:
    """transformers + Accelerate in bf16, written as their documentation does."""
    config = AutoConfig.from_pretrained(ARCHITECTURES / f"{work.model}.json")
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=work.micro_batches)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    rows = [
        random_batch(work, config.vocab_size, seed).input_ids.view(work.batch_size, -1).to(device)
        for seed in range(work.micro_batches)
    ]
    recorder = Recorder()

    def take(num_steps: int) -> Recorder:
        for _ in range(num_steps):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for input_ids in rows:
                with accelerator.accumulate(model):
                    loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            end.record()
            torch.cuda.synchronize()
            recorder.step_times_s.append(start.elapsed_time(end) / 1e3)
            recorder.losses.append(loss.item())
        return recorder

    return take, {"attention": "sdpa", "optimizer": "torch fused AdamW on bf16 weights"}


def measure(work: Workload, arm: str, warmup: int, device: torch.device) -> dict[str, Any]:
    """Build an arm, time it, profile one step, and let go of it."""
    torch.cuda.reset_peak_memory_stats()
    AcceleratorState._reset_state(reset_partial_state=True)  # the arms differ in what they ask of Accelerate's singleton
    started = time.perf_counter()
    take, facts = hf_arm(work, device) if arm == "hf_bf16" else our_arm(work, OURS[arm], device)
    recorder = take(work.num_steps)
    peak_gib = torch.cuda.max_memory_allocated() / GIB
    times, losses = list(recorder.step_times_s), list(recorder.losses)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        take(1)
        torch.cuda.synchronize()
    gemms = gemm_kernels(prof)
    return {
        **facts,
        "step_times_s": times[warmup:],
        "losses": losses,
        "peak_memory_gib": peak_gib,
        "reserved_memory_gib": torch.cuda.max_memory_reserved() / GIB,
        "gemm_kernels": {kind: {"count": kernels.count, "time_s": kernels.time_s} for kind, kernels in gemms.items()},
        "wall_time_s": time.perf_counter() - started,
    }


def summarise(work: Workload, arm: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of one arm: medians over all timed steps of all rounds."""
    size = DecoderSize.from_config(AutoConfig.from_pretrained(ARCHITECTURES / f"{work.model}.json"))
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
                    rounds[arm].append(measure(work, arm, options.warmup, device))
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
