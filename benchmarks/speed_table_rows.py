"""The speed table: which workloads are measured, by which variants of ours beside which baselines, against which
target.

It is a JSON file, {"rows": [...]} (benchmarks/speed_table.json is the project's); each row has

    name                          of its own
    workload                      MODEL:ROWSxLENGTHxMICRO_BATCHES[@DATASET], per GPU
    num_gpus                      1 where it is left out; a list makes a row for each, named NAME_xN
    ours, rivals                  names of variants: ours, and the baselines (llm_fp8/tools/bench/variants.py)
    target_tokens_per_s_per_gpu   what ours is to reach; may be left out. With a list of num_gpus: {"N": target}
    target_times_padded           with @DATASET: real tokens/s of ours over those of hf_bf16, which pads; optional

A target belongs to its model and shape: a table for another GPU or model is another file.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_fp8.observability.metrics import DecoderSize, step_flops
from llm_fp8.tools.bench.variants import REFERENCE, Baseline, Variant, parse_variants
from llm_fp8.tools.bench.workload import Workload
from llm_fp8.tools.gemm_rates import MeasuredRates
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.ranks import LaunchRanks

BF16_TFLOPS, FP8_TFLOPS = 450.0, 550.0
"""Model TFLOP/s that an estimate assumes of a GPU: about what the slowest variants reach on an H200."""
START_S = 30.0
"""Starting, importing, building and recording, in an estimate."""
COMPILE_S = 20.0


@dataclass(frozen=True)
class TableRow:
    """A workload with its variants."""

    name: str
    work: Workload
    ours: tuple[Variant, ...]
    baselines: tuple[Variant, ...]
    num_gpus: int = 1
    target_tokens_per_s_per_gpu: float | None = None
    target_times_padded: float | None = None

    @property
    def variants(self) -> tuple[Variant, ...]:
        """All variants, in the order of their turns."""
        return (*self.ours, *self.baselines)

    @property
    def targets(self) -> dict[str, float]:
        """The targets that it has, by name."""
        names = ("target_tokens_per_s_per_gpu", "target_times_padded")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def side(self, variant: Variant) -> str:
        """Whose variant it is."""
        return "ours" if variant in self.ours else "rival"

    @property
    def reference(self) -> Variant | None:
        """The usual set-up among the baselines."""
        return next(
            (
                variant
                for variant in self.baselines
                if isinstance(variant.what, Baseline) and variant.what.name == REFERENCE
            ),
            None,
        )

    def check(self) -> None:
        """Raise `UserError` where one of the variants cannot train the workload, as far as that is known beforehand."""
        ranks = LaunchRanks()
        if self.num_gpus > 1:
            ranks = LaunchRanks(world_size=self.num_gpus, local_world_size=self.num_gpus, launched=True)
        for variant in self.variants:
            variant.check(self.work, ranks)

    def estimate_s(self, variant: Variant) -> float:
        """A rough guess of how long a measurement takes, on the long side on an H200."""
        baseline = variant.what if isinstance(variant.what, Baseline) else None
        tokens = self.work.step_tokens(padded=baseline is not None)
        flops = step_flops(DecoderSize.from_config(self.work.hf_config()), tokens)
        step_s = flops / (FP8_TFLOPS if variant.computes_in_fp8 else BF16_TFLOPS) / 1e12
        return (
            START_S
            + (COMPILE_S if baseline is not None and baseline.compiled else 0.0)
            + (self.work.num_steps + 1) * step_s
        )


def gemm_floor_s(answer: dict[str, Any], num_tokens: int, rates: MeasuredRates) -> float | None:
    """Seconds of a step's linear layers at the measured rates, from the "census" of an answer and the positions that a
    GPU computes.

    6 FLOPs per weight and token, at the fp8 rates those of fp8 layers. None where a rate was not measured, and with
    adapters, whose frozen weights need fewer GEMMs.
    """
    if answer.get("num_adapter_parameters"):
        return None
    census = answer["census"]
    in_fp8 = census["num_fp8_weights"]
    bf16_s = rates.bf16_gemm_s(6.0 * (census["num_linear_weights"] - in_fp8) * num_tokens)
    fp8_s = rates.fp8_gemm_s(6.0 * in_fp8 * num_tokens) if in_fp8 else 0.0
    return None if fp8_s is None else bf16_s + fp8_s


def read_table(path: Path, num_steps: int, text: str | None = None) -> list[TableRow]:
    """The rows of a table file, measured in so many steps; `text` takes the place of every row's dataset.

    Raises `UserError`, which names the file and the row.
    """
    try:
        entries = json.loads(path.read_text())["rows"]
        rows = [_row(one, num_steps, text) for entry in entries for one in _by_num_gpus(entry)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"--table {path} is no table of workloads ({type(error).__name__}: {error}).") from error
    except UserError as error:
        raise UserError(f"--table {path}: {error}") from error
    names = [row.name for row in rows]
    if doubled := [name for number, name in enumerate(names) if name in names[:number]]:
        raise UserError(f"--table {path} has two rows {doubled[0]}.")
    if not rows:
        raise UserError(f"--table {path} has no rows.")
    return rows


def _by_num_gpus(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The entry, or one for each of its numbers of GPUs."""
    numbers = entry.get("num_gpus", 1)
    if not isinstance(numbers, list):
        return [entry]
    targets = entry.get("target_tokens_per_s_per_gpu", {})
    if unknown := sorted(targets.keys() - set(map(str, numbers))):
        raise UserError(f"row {entry['name']} has a target for {unknown[0]} GPUs, which are none of its num_gpus.")
    common = {key: value for key, value in entry.items() if key != "target_tokens_per_s_per_gpu"}
    return [
        {
            **common,
            "name": f"{entry['name']}_x{number}",
            "num_gpus": number,
            "target_tokens_per_s_per_gpu": targets.get(str(number)),
        }
        for number in numbers
    ]


def _row(entry: dict[str, Any], num_steps: int, text: str | None) -> TableRow:
    known = {field.name for field in dataclasses.fields(TableRow)} - {"work", "baselines"} | {"workload", "rivals"}
    if unknown := sorted(entry.keys() - known):
        raise UserError(f"row {entry['name']} has '{unknown[0]}', which is none of {', '.join(sorted(known))}.")
    name, workload = entry["name"], entry["workload"]
    if text is not None and "@" in workload:
        workload = f"{workload.partition('@')[0]}@{text}"
    work = Workload.parse(workload, num_steps, f"row {name}: workload")
    try:
        ours, baselines = parse_variants(",".join(entry["ours"])), parse_variants(",".join(entry["rivals"]))
    except UserError as error:
        raise UserError(f"row {name}: {error}") from error
    for variant in (
        *(variant for variant in ours if isinstance(variant.what, Baseline)),
        *(variant for variant in baselines if not isinstance(variant.what, Baseline)),
    ):
        raise UserError(
            f"row {name}: {variant.name} is {'a baseline' if variant in ours else 'ours'}; move it to the other list."
        )
    row = TableRow(
        name,
        work,
        tuple(ours),
        tuple(baselines),
        int(entry.get("num_gpus", 1)),
        entry.get("target_tokens_per_s_per_gpu"),
        entry.get("target_times_padded"),
    )
    if row.num_gpus < 1 or any(not value > 0 for value in row.targets.values()):
        raise UserError(f"row {name}: num_gpus and targets are more than 0.")
    if row.target_times_padded is not None and work.text is None:
        raise UserError(f"row {name}: target_times_padded belongs to real documents; put @DATASET behind the workload.")
    return row
