#!/usr/bin/env python
"""Did a change make training slower? Divide our speed by a baseline's, and compare with recorded ratios.

    python benchmarks/check_regression.py NEW.json
    python benchmarks/check_regression.py NEW.json --recorded benchmarks/results/speed_table_h200.json --minimum 0.03

benchmarks/speed_table.py or scripts/benchmark.py writes NEW.json. Two GPUs of the same name differ by some per cent in
speed, so speeds are not compared directly. Instead, the program divides the tokens/s of each of our variants by those
of a baseline in the same file. On real documents padding does not count. --recorded names files of the same kind. The
default is all files under benchmarks/results. A ratio is compared with that in the newest file that has it.

A ratio is a regression if it is lower than the recorded ratio by more than

    minimum + sqrt(sum of the squares of four spreads)

The four spreads are those of our variant and of the baseline, in the new and in the recorded file. A spread is the
relative distance from the median speed of a step to the 10th or 90th percentile, whichever is farther. If the root is
above 0.1, a ratio within the tolerance counts as not compared. A variant that was recorded and fails now is a
regression too. The output lists the ratios that cannot be compared.

The exit code is 0, or 1 if there is a regression, or 2 for a mistake in the options or if nothing can be compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench import BASELINES
from llm_fp8.tools.script import EXIT_FAILED_CHECK, run_script
from llm_fp8.utils.errors import OneSentenceParser, UserError, number, reading
from llm_fp8.utils.json_files import read_json
from llm_fp8.utils.packages import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"
RECORDED = ("speed_table_*.json", "throughput_*.json", "multi_gpu_throughput_*.json")
"""Patterns of the files in RESULTS that contain ratios."""
MINIMUM = 0.02
"""The tolerance if there is no spread. Ratios of runs on different days differed by 0.4% and 0.1%."""
MAX_SPREAD = 0.1
"""The largest combined spread of two ratios. With a larger one, the tolerance would hide any regression."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    path: Path
    gpu: str
    time_utc: str
    workloads: dict[str, dict[str, Row]]  # workload -> variant -> row


@dataclass(frozen=True)
class Ratio:
    """The speed of one of our variants divided by the speed of a baseline in the same file."""

    value: float
    spread: float  # relative, combined over both variants
    source: str


@dataclass
class Findings:
    regressions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_compared: int = 0


def read(path: Path) -> Measured:
    """Read a file of results. Raise `UserError` if it was not written by a throughput benchmark."""
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
    """Return the variant in `rows` that ran the trainer `baseline`, or None if none did. If several did, prefer the one
    with the sharding mode of our `variant` ('MODE:NAME'), else take the first.
    """
    names = [name for name, row in rows.items() if row["baseline"] == baseline]
    mode = variant.partition(":")[0]
    return next((name for name in names if name.startswith(f"{mode}:")), names[0] if names else None)


def speed_key(row: Row) -> str:
    """Return the name of the speed in `row` to compare: tokens/s or, on real documents, tokens/s without padding."""
    return "real_tokens_per_s" if row.get("dataset") else "tokens_per_s"


def spread_of(row: Row) -> float:
    """Return the relative distance from the median speed to the 10th or 90th percentile, whichever is farther."""
    key = speed_key(row)
    median = row[key]
    return float(max(row[f"{key}_p90"] - median, median - row[f"{key}_p10"]) / median)


def ratio_in(measured: Measured, workload: str, variant: str, baseline: str) -> Ratio | None:
    """Return the speed of `variant` divided by that of `baseline` on `workload`, or None if either was not measured."""
    rows = measured.workloads.get(workload, {})
    ours, base = rows.get(variant, {}), rows.get(baseline, {})
    if "tokens_per_s" not in ours or "tokens_per_s" not in base:
        return None
    value = ours[speed_key(ours)] / base[speed_key(base)]
    return Ratio(value, math.hypot(spread_of(ours), spread_of(base)), measured.path.name)


def compare(new: Measured, recorded: Sequence[Measured], baseline: str, minimum: float) -> Findings:
    """Divide the speed of each of our variants in `new` by the speed of `baseline`, and compare the ratio with the
    newest one in `recorded`. The tolerance is `minimum` plus the spread. Raise `UserError` if no ratio was recorded.
    """
    findings = Findings()
    for other in recorded:
        if other.gpu != new.gpu:
            findings.notes.append(f"{other.path.name} was measured on {other.gpu}, not on {new.gpu}, and is left out.")
    recorded = sorted(
        (other for other in recorded if other.gpu == new.gpu), key=lambda other: other.time_utc, reverse=True
    )
    for workload, rows in new.workloads.items():
        for variant in (name for name, row in rows.items() if row["baseline"] is None):
            _compare_variant(findings, new, recorded, workload, variant, baseline, minimum)
    if not findings.num_compared:
        notes = " ".join(findings.notes) or "no variant is ours."
        raise UserError(f"{new.path} has no ratio that is recorded: {notes}")
    return findings


def _compare_variant(
    findings: Findings,
    new: Measured,
    recorded: Sequence[Measured],
    workload: str,
    variant: str,
    baseline: str,
    minimum: float,
) -> None:
    rows = new.workloads[workload]
    name = f"{workload} {variant}"
    against = baseline_of(variant, baseline, rows)
    if against is None:
        findings.notes.append(f"{name}: {baseline} is not in the same file, so it is not compared.")
        return
    ratios = [ratio_in(measured, workload, variant, against) for measured in recorded]
    before = next((ratio for ratio in ratios if ratio is not None), None)
    now = ratio_in(new, workload, variant, against)
    if before is None:
        findings.notes.append(f"{name}: no recorded file has both it and {against}.")
    elif "failed" in rows[variant]:
        findings.num_compared += 1
        was = f"was {before.value:.3f} times {against} ({before.source})"
        findings.regressions.append(f"{name} failed ({rows[variant]['failed']}), and {was}.")
    elif now is None:
        findings.notes.append(f"{name}: {against} failed, so it is not compared.")
    else:
        spread = math.hypot(now.spread, before.spread)
        change = now.value / before.value - 1
        sentence = (
            f"{name}: {now.value:.3f} times {against}, recorded {before.value:.3f} ({before.source}): {change:+.1%}, "
            f"with a tolerance of {minimum + spread:.1%}."
        )
        if change < -(minimum + spread):
            findings.num_compared += 1
            findings.regressions.append(sentence)
        elif spread > MAX_SPREAD:
            findings.notes.append(f"{sentence} The spread is too large, so it is not compared; measure more steps.")
        else:
            findings.num_compared += 1
            findings.notes.append(sentence)


def main() -> int:
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("new", type=Path, help="JSON file of new measurements")
    parser.add_argument("--recorded", type=Path, nargs="+", help=f"files to compare with (default: {RECORDED})")
    parser.add_argument("--baseline", default="hf_bf16", choices=BASELINES, help="(default %(default)s)")
    share, tolerance = number(float, at_least=0, below=1), "tolerance of a ratio without any spread, as a share"
    parser.add_argument("--minimum", type=share, default=MINIMUM, help=f"{tolerance} (default %(default)s)")
    options = parser.parse_args()
    paths = options.recorded or [path for pattern in RECORDED for path in sorted(RESULTS.glob(pattern))]
    recorded = [read(path) for path in paths if path.resolve() != options.new.resolve()]
    findings = compare(read(options.new), recorded, options.baseline, options.minimum)
    for note in findings.notes:
        print(f"note: {note}")
    for regression in findings.regressions:
        print(f"regression: {regression}")
    print(f"ratios compared: {findings.num_compared}, regressions: {len(findings.regressions)}")
    return EXIT_FAILED_CHECK if findings.regressions else 0


if __name__ == "__main__":
    run_script(main)
