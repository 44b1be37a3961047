#!/usr/bin/env python
"""Whether a change made training slower: what ours gains over a baseline now, against what it gained when it was
recorded.

    python benchmarks/check_regression.py NEW.json
    python benchmarks/check_regression.py NEW.json --recorded benchmarks/results/speed_table_h200.json --minimum 0.03

NEW.json is a file of benchmarks/speed_table.py or scripts/benchmark.py. GPUs of one name differ by some per cent in
speed, so no times are compared: for each of our variants it is the ratio of its tokens/s to those of a baseline in the
same file (on real documents: of real tokens). --recorded are files of the same kind; by default all under
benchmarks/results, of which the newest with a ratio counts.

A ratio is a regression where it is lower than the recorded one by more than

    minimum + sqrt(sum of the squares of four spreads)

The spreads are those of ours and the baseline in both files: how far the middle eight tenths of the steps reach from
the median, relative. Where that comes to more than a tenth, a ratio within it says nothing and counts as not compared.
A variant that was recorded and now fails is a regression too. What cannot be compared is named.

Exit code: 0; 1 with one sentence per regression; 2 for a mistake, and where nothing at all can be compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.bench import BASELINES
from llm_fp8.utils.errors import EXIT_FAILED_CHECK, OneSentenceParser, UserError, reading, run_script
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.packages import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"
RECORDED = ("speed_table_*.json", "throughput_*.json", "multi_gpu_throughput_*.json")
"""The files of RESULTS that hold ratios."""
MINIMUM = 0.02
"""How much a ratio may fall without any spread; those of two runs on other days differed by 0.4% and 0.1%."""
MOST_SCATTER = 0.1
"""Of two ratios together; where steps scatter more, the guard would pass whatever can happen to a ratio."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """A file of measurements."""

    path: Path
    gpu: str
    time_utc: str
    workloads: dict[str, dict[str, Row]]
    """Workload -> variant -> row."""


@dataclass(frozen=True)
class Ratio:
    """What a variant of ours gains over a baseline in one file."""

    value: float
    spread: float
    """Relative, of both variants together."""
    source: str


@dataclass
class Findings:
    """What comes out, a sentence each."""

    regressions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_compared: int = 0


def read(path: Path) -> Measured:
    """A file's rows by workload and variant. Raises `UserError` where it is no such file."""
    with reading("results", path, "the rows of a throughput benchmark"):
        record = read_json(path)
        workloads: dict[str, dict[str, Row]] = {}
        for row in record["rows"]:
            num_gpus = row.get("num_gpus", 1)
            name = f"{row['model']}:{row['batch_size']}x{row['seq_length']}x{row['micro_batches']}"
            name += f"@{row['dataset']}" if row.get("dataset") else ""
            name += f" on {num_gpus} GPUs" if num_gpus > 1 else ""
            workloads.setdefault(name, {})[row["variant"]] = row
        gpus = record["provenance"]["gpus"]
        return Measured(path, gpus[0]["name"] if gpus else "a CPU", record["provenance"]["time_utc"], workloads)


def baseline_of(variant: str, baseline: str, rows: dict[str, Row]) -> str | None:
    """The variant with which one of ours is compared: the baseline that is spread over GPUs in the same way, else as it
    can be; None where there is none.
    """
    named = [name for name, row in rows.items() if row["baseline"] == baseline]
    mode = variant.partition(":")[0]
    return next((name for name in named if name.startswith(f"{mode}:")), named[0] if named else None)


def kind_of(row: Row) -> str:
    """The figure that counts."""
    return "real_tokens_per_s" if row.get("dataset") else "tokens_per_s"


def spread_of(row: Row) -> float:
    """How far the middle eight tenths of the steps reach from the median, relative."""
    kind = kind_of(row)
    middle = row[kind]
    return float(max(row[f"{kind}_p90"] - middle, middle - row[f"{kind}_p10"]) / middle)


def ratio_in(measured: Measured, workload: str, variant: str, baseline: str) -> Ratio | None:
    """A variant's ratio in a file; None where one of the two was not measured there."""
    rows = measured.workloads.get(workload, {})
    ours, theirs = rows.get(variant, {}), rows.get(baseline, {})
    if "tokens_per_s" not in ours or "tokens_per_s" not in theirs:
        return None
    value = ours[kind_of(ours)] / theirs[kind_of(theirs)]
    return Ratio(value, math.hypot(spread_of(ours), spread_of(theirs)), measured.path.name)


def compare(new: Measured, recorded: Sequence[Measured], baseline: str, minimum: float) -> Findings:
    """Hold every variant of ours in `new` against the newest of `recorded` that has its ratio.

    Raises `UserError` where nothing can be compared.
    """
    found = Findings()
    for other in recorded:
        if other.gpu != new.gpu:
            found.notes.append(f"{other.path.name} was measured on {other.gpu}, not on {new.gpu}, and is left out.")
    recorded = sorted((one for one in recorded if one.gpu == new.gpu), key=lambda one: one.time_utc, reverse=True)
    for workload, rows in new.workloads.items():
        for variant in (name for name, row in rows.items() if row["baseline"] is None):
            _compare_variant(found, new, recorded, workload, variant, baseline, minimum)
    if not found.num_compared:
        raise UserError(f"{new.path} has no ratio that is recorded: {' '.join(found.notes) or 'no variant is ours.'}")
    return found


def _compare_variant(
    found: Findings,
    new: Measured,
    recorded: Sequence[Measured],
    workload: str,
    variant: str,
    baseline: str,
    minimum: float,
) -> None:
    rows, name = new.workloads[workload], f"{workload} {variant}"
    against = baseline_of(variant, baseline, rows)
    if against is None:
        found.notes.append(f"{name}: {baseline} was not measured beside it, so it is not compared.")
        return
    ratios = (ratio for one in recorded if (ratio := ratio_in(one, workload, variant, against)) is not None)
    before, now = next(ratios, None), ratio_in(new, workload, variant, against)
    if before is None:
        found.notes.append(f"{name}: no recorded file has it beside {against}.")
    elif "failed" in rows[variant]:
        found.num_compared += 1
        was = f"was {before.value:.3f} times {against} ({before.source})"
        found.regressions.append(f"{name} failed ({rows[variant]['failed']}), and {was}.")
    elif now is None:
        found.notes.append(f"{name}: {against} failed, so it is not compared.")
    else:
        scatter = math.hypot(now.spread, before.spread)
        change = now.value / before.value - 1
        said = (
            f"{name}: {now.value:.3f} times {against}, recorded {before.value:.3f} ({before.source}): {change:+.1%}, "
            f"with a tolerance of {minimum + scatter:.1%}."
        )
        if change < -(minimum + scatter):
            found.num_compared += 1
            found.regressions.append(said)
        elif scatter > MOST_SCATTER:
            found.notes.append(f"{said} Steps scatter too much to tell, so it is not compared; measure more of them.")
        else:
            found.num_compared += 1
            found.notes.append(said)


def main() -> int:
    """Compare and say."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("new", type=Path, help="JSON file of the present state")
    parser.add_argument("--recorded", type=Path, nargs="+", help=f"files to compare with (default: {RECORDED})")
    parser.add_argument("--baseline", default="hf_bf16", choices=BASELINES, help="(default %(default)s)")
    parser.add_argument(
        "--minimum",
        type=float,
        default=MINIMUM,
        help="share by which a ratio may fall without any spread (default %(default)s)",
    )
    options = parser.parse_args()
    if not 0 <= options.minimum < 1:
        raise UserError(f"--minimum {options.minimum:g}: give a share from 0 to 1.")
    paths = options.recorded or [path for pattern in RECORDED for path in sorted(RESULTS.glob(pattern))]
    recorded = [read(path) for path in paths if path.resolve() != options.new.resolve()]
    found = compare(read(options.new), recorded, options.baseline, options.minimum)
    for note in found.notes:
        print(f"note: {note}")
    for regression in found.regressions:
        print(f"regression: {regression}")
    print(f"ratios compared: {found.num_compared}, regressions: {len(found.regressions)}")
    return EXIT_FAILED_CHECK if found.regressions else 0


if __name__ == "__main__":
    run_script(main)
