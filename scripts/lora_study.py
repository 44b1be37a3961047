#!/usr/bin/env python
"""What fp8 gives with LoRA and without: full fine-tuning and adapters of several ranks, each in bf16 and in fp8, in one
run on one GPU.

    python scripts/lora_study.py --output lora_study.json
    python scripts/lora_study.py --workloads Llama-3.2-1B:16x1024x4 --recipe current --rounds 1

Everything is this project's TE decoder with random weights and is measured by scripts/benchmark.py: the variants take
turns, each in a process of its own. Of one workload they are bf16 and --recipe, and both with each of --adapters: loraN
are adapters of rank N on all linear layers, loraNqv on q and v alone. The same command with --resume goes on from what
its --output holds; with another --recipe bf16 is not measured again. The table gives the speed-up of fp8 over bf16 for
the same adapters, and beside it what the guides that this project started from say. Out of memory is a row that says
so. See docs/lora.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.bench.variants import HEADS, LORA, Variant, parse_variants, precisions
from llm_fp8.tools.bench.worker import add_measuring_options, check_measuring_options
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import read_json, write_json_atomic
from scripts.benchmark import measure_and_print

REFERENCE = "bf16"
FULL = "full"
"""Name of full fine-tuning in tables."""
WORKLOADS = "Llama-3.2-1B:16x1024x4,Llama-3.1-8B:8x1024x4"
ADAPTERS = "lora8,lora16,lora32,lora16qv"
RECIPES = [
    name
    for recipe in precisions("te")
    if recipe != REFERENCE
    for name in (recipe, *(f"{recipe}:{head}" for head in HEADS))
]
"""Beginnings of variants: a recipe, and the same with lm_head in fp8."""
GUIDES = {
    ("Llama-3.2-1B", "lora16"): "1.13",
    ("Llama-3.1-8B", "lora32"): "1.00",
    ("Llama-3.1-8B", "lora8"): "1.20",
    ("Llama-3.1-8B", FULL): "1.3 to 1.5",
}
"""Model and adapters -> the speed-up on an H100 in the guides that this project started from: two measured, those of
lora8 and of full fine-tuning expected. They do not name the layers that had adapters."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--workloads", default=WORKLOADS, help=f"comma-separated MODEL:ROWSxLENGTHxMICRO_BATCHES (default {WORKLOADS})"
    )
    parser.add_argument(
        "--adapters",
        default=ADAPTERS,
        help=f"comma-separated loraN or loraNqv (default {ADAPTERS}); full fine-tuning is always measured",
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default="delayed",
        metavar="RECIPE",
        help=f"the fp8 recipe: {', '.join(RECIPES)} (default %(default)s)",
    )
    add_measuring_options(parser, steps=8, warmup=3, rounds=3, arm_timeout_s=300, output_required=False, resumable=True)
    options = parser.parse_args(argv)
    check_measuring_options(options)
    return options


def variants_of(adapters: str, recipe: str) -> list[Variant]:
    """The variants of a workload, bf16 and fp8 in turns."""
    names = adapters.split(",")
    if wrong := [name for name in names if not LORA.fullmatch(name)]:
        raise UserError(
            f"--adapters {wrong[0]} is unknown; give loraN (all linear layers) or loraNqv (q and v), such as "
            f"{ADAPTERS}."
        )
    return parse_variants(
        ",".join(
            f"{precision}{suffix}"
            for suffix in ("", *(f":{name}" for name in names))
            for precision in (REFERENCE, recipe)
        )
    )


def _split(variant: str) -> tuple[str, str]:
    """The precision of a variant's name, and its adapters; "" for none."""
    words = variant.split(":")
    adapters = words.pop() if LORA.fullmatch(words[-1]) else ""
    return ":".join(words), adapters


def speed_ups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each workload, recipe and kind of adapters, full fine-tuning first, what fp8 gives over bf16.

    Returns:
        speed_up: tokens/s at the median step of fp8 over those of bf16.
        speed_up_low, speed_up_high: from the slow end of fp8's middle eight tenths of steps over the fast end of
            bf16's, and the other way round.
        over_full: tokens/s over full fine-tuning's in the same precision, by precision.
        guides: what the guides say, or None.
        failed: in place of figures, the reason.
    """
    found = []
    by_arm = {(row["workload"], *_split(row["arm"])): row for row in rows}
    models = {row["workload"]: row["model"] for row in rows}
    for workload, recipe in dict.fromkeys((row["workload"], _split(row["arm"])[0]) for row in rows):
        if recipe == REFERENCE:
            continue
        model = models[workload]
        kinds = dict.fromkeys(
            adapters for name, precision, adapters in by_arm if (name, precision) == (workload, recipe)
        )
        for kind in kinds:
            pair = {precision: by_arm.get((workload, precision, kind)) for precision in (REFERENCE, recipe)}
            entry: dict[str, Any] = {
                "workload": workload,
                "adapters": kind or FULL,
                "recipe": recipe,
                "guides": GUIDES.get((model, kind or FULL)),
            }
            failures = [
                f"{precision}: {row['failed'] if row else 'not measured'}"
                for precision, row in pair.items()
                if row is None or "failed" in row
            ]
            if failures:
                found.append({**entry, "failed": "; ".join(failures)})
                continue
            bf16, low = pair[REFERENCE], pair[recipe]
            assert bf16 is not None and low is not None
            full = {precision: by_arm.get((workload, precision, ""), {}).get("tokens_per_s") for precision in pair}
            found.append(
                {
                    **entry,
                    "tokens_per_s": {REFERENCE: bf16["tokens_per_s"], recipe: low["tokens_per_s"]},
                    "peak_memory_gib": {REFERENCE: bf16.get("peak_memory_gib"), recipe: low.get("peak_memory_gib")},
                    "num_adapter_parameters": bf16["rounds"][0]["num_adapter_parameters"],
                    "fp8_linear_flop_share": low["rounds"][0]["census"]["fp8_linear_flop_share"],
                    "speed_up": low["tokens_per_s"] / bf16["tokens_per_s"],
                    "speed_up_low": low["tokens_per_s_p10"] / bf16["tokens_per_s_p90"],
                    "speed_up_high": low["tokens_per_s_p90"] / bf16["tokens_per_s_p10"],
                    "over_full": {
                        precision: row["tokens_per_s"] / full[precision] if row and full[precision] else None
                        for precision, row in pair.items()
                    },
                }
            )
    return found


def print_speed_ups(entries: list[dict[str, Any]]) -> None:
    """A table for each workload and recipe."""
    for workload, recipe in dict.fromkeys((entry["workload"], entry["recipe"]) for entry in entries):
        of_workload = [entry for entry in entries if (entry["workload"], entry["recipe"]) == (workload, recipe)]
        print(
            f"\n{workload}: tokens/s in bf16 and in fp8 {recipe}, speed-up with the range of the middle steps, and "
            "what the guides say"
        )
        print(f"  {'adapters':10} {'bf16':>9} {'fp8':>9}  {'speed-up':24} {'fp8 share of FLOPs':>18}  {'guides':10}")
        for entry in of_workload:
            guides = entry["guides"] or "-"
            if "failed" in entry:
                print(f"  {entry['adapters']:10} not measured: {entry['failed']}; guides: {guides}")
                continue
            speeds = entry["tokens_per_s"]
            ratio = f"{entry['speed_up']:.2f} ({entry['speed_up_low']:.2f} to {entry['speed_up_high']:.2f})"
            print(
                f"  {entry['adapters']:10} {speeds[REFERENCE]:9,.0f} {speeds[recipe]:9,.0f}  {ratio:24} "
                f"{entry['fp8_linear_flop_share']:18.1%}  {guides:10}"
            )


def main() -> int:
    """Measure every pair of variants; print the tables; write the JSON."""
    options = parse(sys.argv[1:])
    rows = measure_and_print(options, variants_of(options.adapters, options.recipe))
    entries = speed_ups(rows)
    print_speed_ups(entries)
    if options.output is not None:
        write_json_atomic(options.output, {**read_json(options.output), "speed_ups": entries})
    return 0


if __name__ == "__main__":
    run_script(main)
