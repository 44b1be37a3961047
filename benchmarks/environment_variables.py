#!/usr/bin/env python
"""What the environment variables of the guides do to a training step: each setting beside none at all.

    python benchmarks/environment_variables.py --output benchmarks/results/environment_variables_h200.json
    python benchmarks/environment_variables.py --rounds 1 --output some.json \\
        --settings NVTE_FUSED_ATTN=0 "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=1"
    python benchmarks/environment_variables.py --num_gpus 2 --arm fsdp_full:delayed --output some.json

A setting is one or several NAME=VALUE. Each is measured in processes of its own, in turns with the others and with
none, so that what slows the machine for a while does not fall on one. No process has a variable of another setting, or
one of them from this shell. Steps before --warmup are left out. The file holds, beside the figures, what the table of
llm_fp8/tools/verify/environment_rules.py says of each setting. What acts on communication between GPUs is seen with
--num_gpus alone, whose default settings are others.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.bench.variants import Variant, parse_variant
from llm_fp8.tools.bench.worker import add_measuring_options, check_measuring_options, measure_apart, take_header
from llm_fp8.tools.bench.workload import Workload
from llm_fp8.tools.verify import environment_rules as environment
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import write_json_atomic
from llm_fp8.utils.ranks import LaunchRanks
from scripts.benchmark import EXIT_TERMINATED, print_round, speeds_overlap, summarise

NONE = "none"
"""The setting without variables, which the others are held against."""
SETTINGS = (
    "NVTE_FP8_ALLREDUCE=1",
    "NVTE_APPLY_QK_LAYER_SCALING=1",
    "NVTE_FP8_DPA_BWD=1",
    "NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=1",
    "CUDA_DEVICE_MAX_CONNECTIONS=1",
    "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=1",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1",
    "NVTE_FLASH_ATTN=0",
    "NVTE_FUSED_ATTN=0",
    "NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False",
    "CUDA_LAUNCH_BLOCKING=1",
)
"""Those that the guides recommend, then those that are set for debugging and forgotten."""
SETTINGS_OF_COMMUNICATION = (
    "CUDA_DEVICE_MAX_CONNECTIONS=1",
    "NVTE_FP8_ALLREDUCE=1",
    "NCCL_P2P_DISABLE=1",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL",
    "ACCELERATE_DEBUG_MODE=true",
)
"""Those that the guides recommend for communication between the GPUs of a host, then those that the table says slow
them.
"""


def variables_of(setting: str) -> dict[str, str]:
    """The variables of a setting; raises `UserError` for one that is none."""
    if setting == NONE:
        return {}
    variables = {}
    for word in setting.split():
        name, equals, value = word.partition("=")
        if not equals or not name.replace("_", "").isalnum() or name in variables:
            raise UserError(
                f"--settings '{setting}': write NAME=VALUE, several of them with blanks between in quotes, each name "
                "once."
            )
        variables[name] = value
    if not variables:
        raise UserError("--settings has an empty one; write NAME=VALUE.")
    return variables


def judged(setting: str) -> list[dict[str, str]]:
    """What the table of environment variables says of a setting's variables; empty where it has nothing against
    them.
    """
    return [
        {"name": found.name, "level": found.level, "says": found.says}
        for found in environment.judge(variables_of(setting))
    ]


def measure_all(
    work: Workload,
    variant: Variant,
    settings: Sequence[str],
    warmup: int,
    num_rounds: int,
    timeout_s: float,
    output: Path | None,
    num_gpus: int = 1,
) -> list[dict[str, Any]]:
    """Measure every setting and `NONE`, round by round; the rows, which `output` holds after each measurement as well.

    Returns: per setting the row of `scripts.benchmark.summarise` with setting, num_gpus, variables, judged, and for all
    but NONE, where both were measured, speed_ratio (tokens/s over those of NONE), speeds_overlap (whether the middle
    eight tenths of the steps do), first_loss_difference (relative) and on a GPU memory_ratio (of the peaks).
    """
    names = [NONE, *(setting for setting in settings if setting != NONE)]
    every = {name for setting in names for name in variables_of(setting)}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    rows: list[dict[str, Any]] = []
    origin: dict[str, Any] = {}
    turns = [(number, setting) for number in range(num_rounds) for setting in names]
    for number, setting in turns:
        variables = {name: variables_of(setting).get(name) for name in sorted(every)}
        answer = measure_apart(work.name, variant.name, num_gpus, work.num_steps, warmup, timeout_s, variables)
        header = take_header(answer, sys.argv)
        if setting == NONE:
            origin = origin or header
        answers[setting].append(answer)
        print(f"{setting}:", flush=True)
        print_round(work, variant, number, answer, num_gpus)
        measured = {name: summarise(work, variant, answers[name], num_gpus) for name in names if answers[name]}
        rows = [
            {"setting": name, "num_gpus": num_gpus, **described(name), **row, **against(row, measured[NONE])}
            for name, row in measured.items()
        ]
        if output is not None:
            write_json_atomic(output, {**origin, "rows": rows})
    return rows


def described(setting: str) -> dict[str, Any]:
    """What is known of a setting beforehand."""
    return {"variables": variables_of(setting), "judged": judged(setting)}


def against(row: dict[str, Any], none: dict[str, Any]) -> dict[str, Any]:
    """A row's figures over those without the setting; empty for that row itself, and where one was not measured."""
    if row is none or "failed" in row or "failed" in none:
        return {}
    found = {
        "speed_ratio": row["tokens_per_s"] / none["tokens_per_s"],
        "speeds_overlap": speeds_overlap(row, none),
        "first_loss_difference": row["first_loss"] / none["first_loss"] - 1,
    }
    if "peak_memory_gib" in row and "peak_memory_gib" in none:
        found["memory_ratio"] = row["peak_memory_gib"] / none["peak_memory_gib"]
    return found


def line_of(row: dict[str, Any]) -> str:
    """A row as a line of the table."""
    said = "; ".join(f"{found['level']}: {found['says']}" for found in row["judged"]) or "nothing against it"
    start = f"{row['setting']:52}"
    if "failed" in row:
        return f"{start} not measured: {row['failed']}  (table: {said})"
    if row["setting"] == NONE:
        return f"{start} {row['tokens_per_s']:9,.0f} tokens/s"
    if "speed_ratio" not in row:
        return f"{start} {row['tokens_per_s']:9,.0f} tokens/s, and nothing to compare with  (table: {said})"
    overlap = "within the spread" if row["speeds_overlap"] else "beyond the spread"
    memory = f", memory x {row['memory_ratio']:.3f}" if "memory_ratio" in row else ""
    return (
        f"{start} {row['tokens_per_s']:9,.0f} tokens/s  x {row['speed_ratio']:.3f}, {overlap}{memory}  (table: {said})"
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line, checked. Raises `UserError`."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--settings", nargs="+", metavar="NAME=VALUE", help="default: those of the guides")
    parser.add_argument(
        "--num_gpus", type=int, default=1, help="GPUs of this host that train together (default %(default)s)"
    )
    parser.add_argument(
        "--workload", default="Llama-3.2-1B:8x1024x4", help="MODEL:ROWSxLENGTHxMICRO_BATCHES (default %(default)s)"
    )
    parser.add_argument(
        "--arm",
        help="as in scripts/benchmark.py, scripts/benchmark_multi_gpu.py (default delayed, on several GPUs "
        "fsdp_full:delayed)",
    )
    add_measuring_options(parser, steps=10, warmup=4, rounds=2, arm_timeout_s=300)
    options = parser.parse_args(argv)
    if options.num_gpus < 1:
        raise UserError(f"--num_gpus {options.num_gpus} measures nothing; give 1 or more.")
    if options.settings is None:
        options.settings = list(SETTINGS if options.num_gpus == 1 else SETTINGS_OF_COMMUNICATION)
    options.arm = options.arm or ("delayed" if options.num_gpus == 1 else "fsdp_full:delayed")
    for setting in options.settings:
        variables_of(setting)
    if doubled := {setting for setting in options.settings if options.settings.count(setting) > 1}:
        raise UserError(f"--settings has '{sorted(doubled)[0]}' twice.")
    check_measuring_options(options)
    return options


def main() -> int:
    """Measure, print a table, write the JSON."""
    options = parse(sys.argv[1:])
    work, variant = Workload.parse(options.workload, options.steps, "--workload"), parse_variant(options.arm)
    ranks = LaunchRanks.from_environment(os.environ)
    if options.num_gpus > 1:
        ranks = LaunchRanks(world_size=options.num_gpus, local_world_size=options.num_gpus, launched=True)
    elif variant.mode is not None:
        raise UserError(f"--arm {variant.name} is spread over several GPUs; say over how many, as in --num_gpus 2.")
    variant.check(work, ranks)
    if not torch.cuda.is_available():
        raise UserError("this measures an NVIDIA GPU, and none is found.")
    if torch.cuda.device_count() < options.num_gpus:
        raise UserError(
            f"--num_gpus {options.num_gpus} are more than the {torch.cuda.device_count()} that are found; give fewer."
        )
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED)
    )  # so that a measurement's process is ended first
    rows = measure_all(
        work,
        variant,
        options.settings,
        options.warmup,
        options.rounds,
        options.arm_timeout_s,
        options.output,
        options.num_gpus,
    )
    print("\n".join(map(line_of, rows)))
    return 0


if __name__ == "__main__":
    run_script(main)
