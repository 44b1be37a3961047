#!/usr/bin/env python
"""Whether a change made training slower: what ours gains over a baseline now, against what it gained when it was
recorded.

    python benchmarks/check_regression.py NEW.json
    python benchmarks/check_regression.py NEW.json --recorded benchmarks/results/speed_table_h200.json --minimum 0.03

NEW.json is a file of benchmarks/speed_table.py, scripts/benchmark.py or scripts/benchmark_multi_gpu.py. GPUs of one
name differ by some per cent in speed, so no times are compared: for each of our variants it is the ratio of its
tokens/s to those of a baseline in the same file (on real documents: of real tokens). --recorded are files of the same
kind; by default all under benchmarks/results, of which the newest with a ratio counts.

A ratio is a regression where it is lower than the recorded one by more than

    minimum + sqrt(sum of the squares of four spreads)

The spreads are those of ours and the baseline in both files: how far the middle eight tenths of the steps reach from
the median, relative. Where that comes to more than a tenth, a ratio within it says nothing and counts as not compared.
A variant that was recorded and now fails is a regression too. What cannot be compared (workloads, baselines or
variants that only one side has, other GPUs) is named.

Exit code: 0; 1 with one sentence per regression; 2 for a mistake, and where nothing at all can be compared.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.recorded_variants import OLD_NAMES, recorded_variant
from llm_fp8.tools.bench.variants import BASELINES, REFERENCE, Baseline
from llm_fp8.utils.errors import EXIT_FAILED_CHECK, OneSentenceParser, UserError, run_script
from llm_fp8.utils.packages import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"
RECORDED = ("speed_table_*.json", "throughput_*.json", "multi_gpu_throughput_*.json")
"""The files of RESULTS that hold ratios."""
MINIMUM = 0.02
"""How much a ratio may fall without any spread. Those of two runs on other days differ by 0.4% and 0.1%:
multi_gpu_throughput_8b_s1024_x4.json and multi_gpu_throughput_fp8_params_x4.json."""

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
    """The file's name."""
    one_call: bool
    """Whether ours and the baseline were measured by the same call of the benchmark, as far as the file says."""


@dataclass
class Findings:
    """What comes out, a sentence each."""

    regressions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_compared: int = 0


def read(path: Path) -> Measured:
    """A file's rows by workload and variant. Raises `UserError` where it is no such file."""
    try:
        record = json.loads(path.read_text())
        origin = record["provenance"]
        workloads: dict[str, dict[str, Row]] = {}
        for row in record["rows"]:
            workloads.setdefault(workload_of(row, record["rows"]), {})[OLD_NAMES.get(row["arm"], row["arm"])] = row
        gpus = origin["gpus"]
        return Measured(path, gpus[0]["name"] if gpus else "a CPU", origin["time_utc"], workloads)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no results file of a throughput benchmark ({type(error).__name__}: {error})."
        ) from error


def workload_of(row: Row, rows: Sequence[Row]) -> str:
    """What a row trained, in a form that is equal where ratios can be compared: real documents are told by their
    tokens.

    `rows` are all of the file: a variant that failed trained on the documents of the others.
    """
    name = f"{row['model']}:{row['batch_size']}x{row['seq_length']}x{row['micro_batches']}"
    if row.get("text") is not None:
        beside = (
            answer for other in rows if other.get("workload") == row["workload"] for answer in other.get("rounds", [])
        )
        documents = next((answer["documents"] for answer in beside), None)
        name += (
            f"@{row['text']}"
            if documents is None
            else f"@{documents['num_documents']} documents {documents['sha256'][:8]}"
        )
    return name if row.get("num_gpus", 1) == 1 else f"{name} on {row['num_gpus']} GPUs"


def is_measured(row: Row | None) -> bool:
    """Whether it has figures."""
    return row is not None and "tokens_per_s" in row


def is_ours(variant: str) -> bool:
    """Whether the variant is this project's."""
    return not isinstance(recorded_variant(variant).what, Baseline)


def baseline_of(variant: str, baseline: str, variants: Iterable[str]) -> str | None:
    """The variant with which one of ours is compared: the baseline spread in the same way, else as it can be; None
    where none of these is there.
    """
    mode = recorded_variant(variant).mode
    wanted = [baseline] if mode is None else [f"{mode}:{baseline}", f"fsdp_full:{baseline}", f"ddp:{baseline}"]
    return next((name for name in wanted if name in variants), None)


def spread_of(row: Row) -> float:
    """How far the steps reach from the median, relative; of the middle eight tenths where the file has them, else of
    all.
    """
    kind = kind_of(row)
    low, high = ("p10", "p90") if f"{kind}_p10" in row else ("slowest", "fastest")
    middle = row[kind]
    return float(max(row[f"{kind}_{high}"] - middle, middle - row[f"{kind}_{low}"]) / middle)


def kind_of(row: Row) -> str:
    """The figure that counts."""
    return "real_tokens_per_s" if "real_tokens_per_s" in row else "tokens_per_s"


def ratio_in(measured: Measured, workload: str, variant: str, baseline: str) -> Ratio | None:
    """A variant's ratio in a file; None where one of the two was not measured there."""
    rows = measured.workloads.get(workload, {})
    ours, theirs = rows.get(variant), rows.get(baseline)
    if ours is None or theirs is None or not (is_measured(ours) and is_measured(theirs)):
        return None
    value = ours[kind_of(ours)] / theirs[kind_of(ours)]
    calls = {answer.get("run") for row in (ours, theirs) for answer in row.get("rounds", [])}
    return Ratio(value, math.hypot(spread_of(ours), spread_of(theirs)), measured.path.name, len(calls) < 2)


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
        if not any(workload in one.workloads for one in recorded):
            found.notes.append(f"{workload} is not recorded.")
            continue
        for variant in filter(is_ours, rows):
            _compare_variant(found, new, recorded, workload, variant, baseline, minimum)
        of_records = {variant for one in recorded for variant in one.workloads.get(workload, {})}
        if missing := sorted(of_records - rows.keys()):
            found.notes.append(f"{workload}: recorded and not measured now: {', '.join(missing)}.")
    if missing := sorted({workload for one in recorded for workload in one.workloads} - new.workloads.keys()):
        found.notes.append(f"recorded and not measured now: {', '.join(missing)}.")
    if not found.num_compared:
        raise UserError(
            f"{new.path} has no ratio that is recorded: {' '.join(found.notes) or 'none of its variants is ours.'}"
        )
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
    rows = new.workloads[workload]
    against = baseline_of(variant, baseline, rows)
    if against is None:
        found.notes.append(f"{workload} {variant}: {baseline} was not measured beside it, so it is not compared.")
        return
    ratios = (ratio for one in recorded if (ratio := ratio_in(one, workload, variant, against)) is not None)
    before, now = next(ratios, None), ratio_in(new, workload, variant, against)
    if before is None:
        found.notes.append(f"{workload} {variant}: no recorded file has it beside {against}.")
    elif not is_measured(rows[variant]):
        found.num_compared += 1
        found.regressions.append(
            f"{workload} {variant} failed ({rows[variant]['failed']}), and was {before.value:.3f} times {against} "
            f"({before.source})."
        )
    elif now is None:
        found.notes.append(
            f"{workload} {variant}: {against} failed ({rows[against]['failed']}), so it is not compared."
        )
    else:
        scatter = math.hypot(now.spread, before.spread)
        tolerance = minimum + scatter
        change = now.value / before.value - 1
        says = (
            f"{workload} {variant}: {now.value:.3f} times {against}, recorded {before.value:.3f} ({before.source}): "
            f"{change:+.1%}, with a tolerance of {tolerance:.1%}."
        )
        if change < -tolerance:
            found.num_compared += 1
            found.regressions.append(says)
        elif scatter > MOST_SCATTER:
            found.notes.append(f"{says} Steps scatter too much to tell, so it is not compared; measure more of them.")
        else:
            found.num_compared += 1
            found.notes.append(says)
        for ratio in (now, before):
            if not ratio.one_call:
                found.notes.append(
                    f"{workload} {variant} and {against} come from more than one call in {ratio.source}."
                )


def main() -> int:
    """Compare and say."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("new", type=Path, help="JSON file of the present state")
    parser.add_argument(
        "--recorded",
        type=Path,
        nargs="+",
        help=f"files to compare with (default: {', '.join(RECORDED)} under benchmarks/results)",
    )
    parser.add_argument(
        "--rival",
        default=REFERENCE,
        choices=list(BASELINES),
        help="whose speed ours is divided by (default %(default)s)",
    )
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
    found = compare(read(options.new), recorded, options.rival, options.minimum)
    for note in found.notes:
        print(f"note: {note}")
    for regression in found.regressions:
        print(f"regression: {regression}")
    print(f"ratios compared: {found.num_compared}, regressions: {len(found.regressions)}")
    return EXIT_FAILED_CHECK if found.regressions else 0


if __name__ == "__main__":
    run_script(main)
