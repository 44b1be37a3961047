#!/usr/bin/env python
"""Training throughput of this project's recipes and of the usual set-ups, in one run on one GPU.

    python scripts/benchmark.py --quick --output quick.json
    python scripts/benchmark.py --workloads Llama-3.2-1B:16x1024x4,Llama-3.1-8B:8x1024x4,Llama-3.1-8B:1x8192x4 \\
        --arms hf_bf16,torchao_rowwise,delayed,delayed:swap --output some.json

Random weights, the same in every variant; random tokens, in rows that are one document each; the optimizer step
included. A workload is MODEL:ROWSxLENGTHxMICRO_BATCHES; with @DATASET behind it (embedded, FILE.jsonl) real documents,
which ours packs and the others pad to LENGTH. Variants:

- bf16, delayed, current, block: this project's Trainer with the TE decoder and the default optimizer (fp32-quality
  master weights). Behind it may stand :swap (the Hugging Face decoder, its linear layers swapped for TE's in fp8),
  :recompute (gradient checkpointing), :adamw_8bit, and :lora16 or :lora16qv (adapters of rank 16 on all linear layers,
  or on q and v alone; scripts/lora_study.py compares them).
- hf_bf16: transformers' model in bf16 (sdpa) with Accelerate's bf16 mixed precision, torch's fused AdamW on the bf16
  weights, the loss as transformers computes it. The usual set-up, and lighter than ours: its optimizer keeps no master
  weights. hf_bf16_compiled: the same with its decoder layers compiled.
- accelerate_te: the same with Accelerate's own fp8 (TERecipeKwargs). te_autocast: the same layers and recipe by
  Transformer Engine's own calls; where both are measured, a line and an entry of the JSON say how Accelerate's path
  compares with it. torchao_tensorwise, torchao_rowwise: with torchao's, compiled.

The variants take turns --rounds times, each time in a process of its own, so that nothing of one is left in the next.
Steps before --warmup are left out; figures are over the other steps of all rounds. One more step of each round is
recorded, for the kernels that ran. A variant that fails or runs out of memory is a row that says so. The results are
rewritten after every measurement; the same command with --resume goes on from them. See docs/tools.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.bench.measure import describe_gemms, speed
from llm_fp8.tools.bench.variants import BASELINES, REFERENCE, Variant, parse_variants
from llm_fp8.tools.bench.worker import (
    add_measuring_options,
    add_workload_options,
    check_measuring_options,
    measure_apart,
    take_header,
)
from llm_fp8.utils.errors import EXIT_FAILED_CHECK, OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import read_json, write_json_atomic
from llm_fp8.utils.ranks import LaunchRanks

if TYPE_CHECKING:
    from llm_fp8.tools.bench.workload import Workload

OURS = ("bf16", "delayed", "current", "block")
"""Variants of ours that are measured by default."""
EXIT_TERMINATED = 128 + signal.SIGTERM
CLAIM = ("accelerate_te", "te_autocast")
"""Said to be equal: Accelerate's own fp8, and Transformer Engine without it."""
QUICK = {
    "workloads": "Llama-3.2-1B:8x1024x4",
    "arms": f"{REFERENCE},bf16,delayed,current",
    "steps": 6,
    "warmup": 2,
    "rounds": 1,
}
"""Defaults with --quick."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"one model, few variants, one round: {', '.join(f'--{name} {value}' for name, value in QUICK.items())}, "
        "unless given otherwise",
    )
    add_workload_options(parser, ",".join([*BASELINES, *OURS]), "scripts/benchmark.py")
    add_measuring_options(parser, steps=8, warmup=3, rounds=3, arm_timeout_s=300, output_required=False, resumable=True)
    options = parser.parse_args(argv)
    if options.quick:
        parser.set_defaults(**QUICK)
        options = parser.parse_args(argv)
    check_measuring_options(options)
    return options


def summarise(work: Workload, variant: Variant, rounds: list[dict[str, Any]], num_gpus: int = 1) -> dict[str, Any]:
    """The row of a variant from its answers (`measure_apart`), one per round: figures over all timed steps of all
    rounds.

    `num_gpus`: on how many the answers were measured; of several, the step times are those of the slowest GPU.
    """
    row: dict[str, Any] = {"workload": work.name, **work.to_dict(), "arm": variant.name}
    measured = [answer for answer in rounds if answer["failed"] is None]
    failures = [answer["failed"] for answer in rounds if answer["failed"] is not None]
    if not measured:
        return {**row, "failed": failures[0]}
    times = [time_s for answer in measured for time_s in answer["step_times_s"]]
    row.update(speed(work, times, num_gpus, variant.context_size, **_counts(measured[0])))
    if "peak_memory_gib" in measured[0]:
        row["peak_memory_gib"] = max(answer["peak_memory_gib"] for answer in measured)
    row["first_loss"] = measured[0]["losses"][0]
    row["last_loss"] = measured[0]["losses"][-1]
    if failures:
        row["failed_rounds"] = failures
    return {**row, "rounds": measured}


def _counts(answer: dict[str, Any]) -> dict[str, Any]:
    """What `speed` has to know of a variant beside its workload."""
    return {name: answer[name] for name in ("num_adapter_parameters", "step_tokens") if name in answer}


def read_earlier(output: Path, num_steps: int, num_timed: int) -> dict[str, Any]:
    """The record that an earlier call left in `output`; empty where there is no file.

    Raises `UserError` for another program's file, or rounds of other --steps and --warmup.
    """
    if not output.exists():
        return {}
    record = read_json(output)
    if not {"rows", "claims"} <= record.keys():
        raise UserError(f"--output {output} holds no measurements of this program to go on from; give another file.")
    for row in record["rows"]:
        for answer in row.get("rounds", []):
            if (row["num_steps"], len(answer["step_times_s"])) != (num_steps, num_timed):
                raise UserError(
                    f"--output {output} was measured with --steps {row['num_steps']} and --warmup "
                    f"{row['num_steps'] - len(answer['step_times_s'])}; give the same, or another file."
                )
    return record


def _joined(output: Path | None, earlier: dict[str, Any], header: dict[str, Any]) -> dict[str, Any]:
    """The header of a file that goes on from an `earlier` record. Raises `UserError` where the two were not measured
    alike.
    """
    if "provenance" not in earlier:  # nothing came so far as to say where it ran
        return header
    before, now = earlier["provenance"], header["provenance"]
    kinds = {
        "code": [origin["git"] for origin in (before, now)],
        "packages": [origin["packages"] for origin in (before, now)],
        "driver": [origin["driver"] for origin in (before, now)],
        "GPU": [[gpu["name"] for gpu in origin["gpus"][:1]] for origin in (before, now)],
    }
    if changed := [kind for kind, (there, here) in kinds.items() if there != here]:
        raise UserError(
            f"--resume: --output {output} was measured with another {' and '.join(changed)}; give another file."
        )
    return {**header, "earlier_provenance": [*earlier.get("earlier_provenance", []), before]}


def measure_all(
    works: list[Workload],
    variants: list[Variant],
    warmup: int,
    num_rounds: int,
    arm_timeout_s: float,
    output: Path | None,
    earlier: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Measure every variant of every workload, round by round; the rows, which `output` holds after each measurement as
    well.

    `earlier`: what `read_earlier` found. Its rounds count; its rows of other workloads and variants, failed ones too,
    stay and come first.
    """
    earlier = earlier or {}
    kept = {(row["workload"], row["arm"]): row for row in earlier.get("rows", [])}
    wanted = {(work.name, variant.name) for work in works for variant in variants}
    answers = {
        (work.name, variant.name): list(kept.get((work.name, variant.name), {}).get("rounds", []))
        for work in works
        for variant in variants
    }
    others = [row for name, row in kept.items() if name not in wanted]

    def rows_so_far() -> list[dict[str, Any]]:
        found = ((work, variant, answers[work.name, variant.name]) for work in works for variant in variants)
        return [*others, *(summarise(work, variant, of_variant) for work, variant, of_variant in found if of_variant)]

    origin: dict[str, Any] = {}
    due = [
        (work, number, variant)
        for work in works
        for number in range(num_rounds)
        for variant in variants
        if len(answers[work.name, variant.name]) <= number
    ]
    for work, number, variant in due:
        of_variant = answers[work.name, variant.name]
        if of_variant and of_variant[-1]["failed"] is not None:
            continue  # it would fail again
        answer = measure_apart(work.name, variant.name, 1, work.num_steps, warmup, arm_timeout_s)
        header = take_header(answer, sys.argv)
        origin = origin or (_joined(output, earlier, header) if header else {})
        of_variant.append(answer)
        print_round(work, variant, number, answer)
        if output is not None:
            rows = rows_so_far()
            write_json_atomic(output, {**(origin or _header_of(earlier)), "rows": rows, "claims": claims(rows)})
    return rows_so_far()


def _header_of(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("provenance", "peaks", "earlier_provenance") if name in record}


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the measurements say to `CLAIM`, for every workload with both variants.

    Returns:
        speed_ratio: tokens/s of the first variant over the second's. speeds_overlap: whether the middle eight tenths of
            their steps do.
        first_loss_difference: relative, of the first step; later ones differ where a variant leaves a parameter
            untrained.
    """
    found = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        pair = [
            row
            for variant in CLAIM
            for row in rows
            if (row["workload"], row["arm"]) == (name, variant) and "failed" not in row
        ]
        if len(pair) == 2:
            first, second = pair
            found.append(
                {
                    "workload": name,
                    "arms": list(CLAIM),
                    "speed_ratio": first["tokens_per_s"] / second["tokens_per_s"],
                    "speeds_overlap": speeds_overlap(first, second),
                    "first_loss_difference": first["first_loss"] / second["first_loss"] - 1,
                }
            )
    return found


def speeds_overlap(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether the middle eight tenths of the steps of two rows have speeds in common."""
    return bool(
        first["tokens_per_s_p10"] <= second["tokens_per_s_p90"]
        and second["tokens_per_s_p10"] <= first["tokens_per_s_p90"]
    )


def print_round(work: Workload, variant: Variant, number: int, answer: dict[str, Any], num_gpus: int = 1) -> None:
    """One line when a measurement is done; `num_gpus` as in `summarise`."""
    start = f"round {number + 1}  {work.name:24} {variant.name:18}"
    if answer["failed"] is not None:
        print(f"{start} not measured: {answer['failed']}", flush=True)
        return
    found = speed(work, answer["step_times_s"], num_gpus, variant.context_size, **_counts(answer))
    kind = "real_tokens_per_s" if work.text is not None else "tokens_per_s"
    print(
        f"{start} {found[kind]:9,.0f} {kind.replace('_', ' ').replace(' per ', '/')}  ({answer['wall_time_s']:.0f} s)",
        flush=True,
    )


def print_table(rows: list[dict[str, Any]]) -> None:
    """The rows with their spread, and whether the variants train the same thing."""
    for workload in dict.fromkeys(row["workload"] for row in rows):
        of_workload = [row for row in rows if row["workload"] == workload]
        measured = [row for row in of_workload if "failed" not in row]
        print(f"\n{workload}: tokens/s at the median step; of the steps the middle eight tenths")
        baseline = next((row for row in measured if row["arm"] == REFERENCE), None)
        for row in of_workload:
            print(_line(row, baseline))
        if measured:
            first = measured[0]
            print("first loss: " + ", ".join(f"{row['arm']} {row['first_loss']:.4f}" for row in measured))
            apart = max(abs(row["first_loss"] / first["first_loss"] - 1) for row in measured)
            print(
                f"all variants start from the same weights and tokens; their first losses are at most {apart:.4%} from "
                f"that of {first['arm']}"
            )
    for claim in claims(rows):
        overlap = "their steps overlap" if claim["speeds_overlap"] else "their steps do not overlap"
        first, second = claim["arms"]
        print(
            f"\n{claim['workload']}: {first} is {claim['speed_ratio']:.3f} x as fast as {second} ({overlap}); "
            f"first losses {claim['first_loss_difference']:+.4%} apart"
        )


def _line(row: dict[str, Any], baseline: dict[str, Any] | None) -> str:
    if "failed" in row:
        return f"  {row['arm']:18} not measured: {row['failed']}"
    line = (
        f"  {row['arm']:18} {row['tokens_per_s']:9,.0f}  {row['tokens_per_s_p10']:9,.0f} to "
        f"{row['tokens_per_s_p90']:9,.0f}  {row['model_tflops']:6.0f} TFLOP/s"
    )
    if "real_tokens_per_s" in row:
        line += f"  {row['real_tokens_per_s']:9,.0f} real tokens/s"
    if baseline is not None:
        kind = "real_tokens_per_s" if "real_tokens_per_s" in row else "tokens_per_s"
        line += f"  {row[kind] / baseline[kind]:5.2f} x {REFERENCE}"
    if "peak_memory_gib" in row:
        gemms = describe_gemms(row["rounds"][-1]["gemm_kernels"])
        line += f"  {row['peak_memory_gib']:6.1f} GiB  GEMM kernels (share of their time): {gemms}"
    if left_out := row["rounds"][-1].get("parameters_not_in_the_optimizer"):
        line += f"  does not train {', '.join(left_out)}"
    return line + (
        f"  {len(row['failed_rounds'])} round failed: {row['failed_rounds'][0]}" if "failed_rounds" in row else ""
    )


def measure_and_print(options: argparse.Namespace, variants: list[Variant]) -> list[dict[str, Any]]:
    """Measure `variants` on each of --workloads and print the table; returns the rows, which --output holds.

    Raises `UserError` where that cannot be done here.
    """
    import torch  # here, like the next: --help and mistakes in options answer without loading models

    from llm_fp8.tools.bench.workload import parse_workloads

    works = parse_workloads(options.workloads, options.steps)
    ranks = LaunchRanks.from_environment(os.environ)
    if ranks.launched:
        raise UserError(
            "the benchmark of one GPU starts its own processes: run it with python, or scripts/benchmark_multi_gpu.py "
            "with torchrun."
        )
    for work in works:
        for variant in variants:
            variant.check(work, ranks)
    if not torch.cuda.is_available():
        raise UserError("the benchmark needs an NVIDIA GPU, and none is found.")
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED)
    )  # so that a measurement's process is ended first
    started = time.perf_counter()
    earlier = read_earlier(options.output, options.steps, options.steps - options.warmup) if options.resume else None
    rows = measure_all(works, variants, options.warmup, options.rounds, options.arm_timeout_s, options.output, earlier)
    print_table(rows)
    print(
        f"\n{len(rows)} rows in {time.perf_counter() - started:.0f} s"
        + (f": {options.output}" if options.output else "")
    )
    return rows


def main() -> int:
    """Run every variant of every workload; print a table; write the JSON. The exit code is 1 where no variant could be
    measured.
    """
    options = parse(sys.argv[1:])
    rows = measure_and_print(options, parse_variants(options.arms))
    return EXIT_FAILED_CHECK if all("failed" in row for row in rows) else 0


if __name__ == "__main__":
    run_script(main)
