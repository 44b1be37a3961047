#!/usr/bin/env python
"""The whole speed table in one command: every workload in our recipes beside the baselines, with its target.

    python benchmarks/speed_table.py --dry_run
    python benchmarks/speed_table.py --output benchmarks/results/speed_table_h200.json --time_limit_s 570
    python benchmarks/speed_table.py --rows text_1b --text gsm8k.jsonl --output text.json

Rows, variants and targets stand in benchmarks/speed_table.json (--table takes another). Each measurement is one of
scripts/benchmark.py (one GPU) or of scripts/benchmark_multi_gpu.py (rows with several), in processes of its own. The
file is written after every measurement, and the same command goes on from what its --output holds, so the table can be
measured in pieces. Variants of a row take turns, round by round, on the same GPUs; --gpus_parallel N spreads rows over
N GPUs, each on as many as it needs: on 4, two rows of 2 at a time. Rows that need more than N follow alone, one by one;
those that need more than there are, are left out and named.

Rows on real documents: the same documents packed by ours and padded to the row's length by the baseline, at equal
weights; figures are real tokens/s and the loss per token that is predicted. docs/tools.md says how to read the
file.

Exit code: 0; 1 where --time_limit_s left something to be measured (run the same command again); 2 for a mistake.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.speed_table_rows import TableRow, gemm_floor_s, read_table
from llm_fp8.observability.provenance import visible_gpus
from llm_fp8.tools.bench.variants import Variant
from llm_fp8.tools.bench.worker import (
    STOPPED,
    add_measuring_options,
    check_measuring_options,
    measure_apart,
    take_header,
)
from llm_fp8.tools.gemm_rates import known_rates
from llm_fp8.utils.errors import EXIT_FAILED_CHECK, OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import read_json, write_json_atomic
from scripts.benchmark import EXIT_TERMINATED, print_round, summarise

TABLE = Path(__file__).with_suffix(".json")

Answer = dict[str, Any]
Measure = Callable[[TableRow, Variant, str], Answer]
"""Measures a variant of a row on its GPUs (a value of CUDA_VISIBLE_DEVICES, such as 0,1)."""


# --- the file ---------------------------------------------------------------------------------------------------------


class Record:
    """What is measured so far, and the file that holds it; used by several threads.

    Args:
        path: of the file; None keeps nothing, and what is there is not read.
        rows: what is measured; rows of the file beside these stay in it as they are.
        settings: what all measurements of a file have in common.
        retry_failed: forget what failed.

    Raises `UserError` where the file is no such file, or holds measurements that were made otherwise.
    """

    def __init__(
        self, path: Path | None, rows: Sequence[TableRow], settings: dict[str, Any], retry_failed: bool = False
    ) -> None:
        self._path = path
        self._rows = {row.name: row for row in rows}
        self._settings = settings
        self._lock = threading.Lock()
        self._header: dict[str, Any] = {}
        self._runs: list[dict[str, Any]] = []
        self._others: dict[str, list[dict[str, Any]]] = {"comparisons": [], "rows": []}
        """Of rows that are not measured this time."""
        self._places: dict[str, int] = {}
        """Row -> its place in the file as it was found, which it keeps."""
        self._answers: dict[tuple[str, str], list[Answer]] = {}
        self.left_out: list[dict[str, str]] = []
        if path is not None and path.exists():
            self._read(path, retry_failed)
        self._first_run = len(self._runs)

    def _read(self, path: Path, retry_failed: bool) -> None:
        try:
            record = read_json(path)
            settings, found, self._runs = record["settings"], record["rows"], record["runs"]
            self._places = {name: place for place, name in enumerate(dict.fromkeys(entry["row"] for entry in found))}
            for name, others in self._others.items():
                others += [entry for entry in record[name] if entry["row"] not in self._rows]
            # Absent where no measurement has come so far as to say where it runs.
            self._header = {name: record[name] for name in ("provenance", "peaks") if name in record}
        except (UserError, KeyError, TypeError) as error:
            raise UserError(f"--output {path} exists and is no file of this program's; give another.") from error
        for name, value in self._settings.items():
            if settings.get(name) != value:
                raise UserError(
                    f"--output {path} was measured with --{name} {settings.get(name)}; give another file or the same "
                    "options."
                )
        for entry in found:
            row = self._rows.get(entry["row"])
            if row is None:
                continue
            if entry["arm"] not in {variant.name for variant in row.variants}:
                raise UserError(
                    f"--output {path}: row {row.name} has {entry['arm']}, which the table lacks; give another file."
                )
            if (entry["workload"], entry.get("num_gpus", 1)) != (row.work.name, row.num_gpus):
                raise UserError(
                    f"--output {path}: row {row.name} was measured on {entry['workload']}, not {row.work.name}; give "
                    "another file."
                )
            if row.work.text is not None and any(
                answer["documents"] != row.work.document_facts() for answer in entry.get("rounds", [])
            ):
                raise UserError(
                    f"--output {path}: row {row.name} was measured on other documents of that name; give another file."
                )
            failed = [{"failed": reason} for reason in entry.get("failed_rounds", [])]
            if "failed" in entry:
                failed = [{"failed": entry["failed"]}]
            self._answers[row.name, entry["arm"]] = [*entry.get("rounds", []), *([] if retry_failed else failed)]

    def answers(self, row: TableRow, variant: Variant) -> list[Answer]:
        """Those of a variant so far."""
        return self._answers.get((row.name, variant.name), [])

    def is_due(self, row: TableRow, variant: Variant, number: int) -> bool:
        """Whether round `number` (from 0) of a variant is still to be measured: what failed would fail again."""
        found = self.answers(row, variant)
        return len(found) <= number and not (found and found[-1]["failed"] is not None)

    def estimate_s(self, row: TableRow, variant: Variant) -> float:
        """How long a measurement takes: as long as the last one did, or what is guessed."""
        measured = [answer for answer in self.answers(row, variant) if answer["failed"] is None]
        return float(measured[-1]["taken_s"]) if measured else row.estimate_s(variant)

    def add(self, row: TableRow, variant: Variant, answer: Answer) -> None:
        """Keep an answer and write the file. Raises `UserError` where it comes from another kind of GPU than the
        file's.
        """
        with self._lock:
            if header := take_header(answer, sys.argv):
                self._take_header(header)
            if answer["failed"] is None:
                answer["run"] = len(self._runs) - 1
            self._answers.setdefault((row.name, variant.name), []).append(answer)
            self._write()

    def _take_header(self, header: dict[str, Any]) -> None:
        here, there = gpu_of(header), gpu_of(self._header) if self._header else gpu_of(header)
        if here != there:
            raise UserError(f"--output {self._path} was measured on {there}, and this is {here}; give another file.")
        if len(self._runs) == self._first_run:
            self._runs.append(header["provenance"])
            self._header = header

    def _write(self) -> None:
        if self._path is not None:
            write_json_atomic(
                self._path,
                {
                    **self._header,
                    "runs": self._runs,
                    "settings": self._settings,
                    "left_out": [
                        one
                        for one in self.left_out
                        if one["row"] not in {entry["row"] for entry in self._others["rows"]}
                    ],
                    "comparisons": self._in_place([*self._others["comparisons"], *self._comparisons()]),
                    "rows": self._in_place(
                        [*self._others["rows"], *(found for row in self._rows.values() for found in self.rows_of(row))]
                    ),
                },
            )

    def _in_place(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows that were in the file where they were, so that a later call changes nothing but what it measures; new
        ones behind them.
        """
        return sorted(entries, key=lambda entry: self._places.get(entry["row"], len(self._places)))

    def _comparisons(self) -> list[dict[str, Any]]:
        return [found for row in self._rows.values() if (found := self.comparison(row))]

    def comparison(self, row: TableRow) -> dict[str, Any] | None:
        """`compare`, and on several GPUs scaling: variant of ours -> speed per GPU over that on one GPU, where the file
        has both.
        """
        rows = self.rows_of(row)
        found = compare(row, rows)
        if found is not None and row.num_gpus > 1:
            alone = self._speeds_on_one_gpu(row.work.name)
            spread = {one["arm"]: one["tokens_per_s_per_gpu"] for one in rows if "failed" not in one}
            found["scaling"] = {
                variant.name: spread[variant.name] / alone[variant.on_one_gpu]
                for variant in row.ours
                if variant.name in spread and variant.on_one_gpu in alone
            }
        return found

    def _speeds_on_one_gpu(self, workload: str) -> dict[str, float]:
        """Variant -> tokens/s, of what the file holds of this workload."""
        chosen = (row for row in self._rows.values() if (row.work.name, row.num_gpus) == (workload, 1))
        rows = [*self._others["rows"], *(one for row in chosen for one in self.rows_of(row))]
        return {
            one["arm"]: one["tokens_per_s"]
            for one in rows
            if (one["workload"], one["num_gpus"]) == (workload, 1) and "failed" not in one
        }

    def rows_of(self, row: TableRow) -> list[dict[str, Any]]:
        """The rows of the file that are of one row of the table: one per variant that has an answer."""
        gpu = gpu_of(self._header) if self._header else None
        return [
            describe(row, variant, answers, gpu) for variant in row.variants if (answers := self.answers(row, variant))
        ]


def gpu_of(header: dict[str, Any]) -> str | None:
    """The name of the GPU that a header is of; None for a CPU."""
    gpus = header["provenance"]["gpus"]
    return gpus[0]["name"] if gpus else None


def describe(row: TableRow, variant: Variant, answers: list[Answer], gpu: str | None) -> dict[str, Any]:
    """The figures of a variant, with its target and where the time of a step went.

    `step` holds, for a GPU: step_s (the median step), time_s_by_class (kernels of the recorded step of the last round),
    gemm_floor_s (the linear layers at the rates recorded for such a GPU, None without), and on one GPU gap_s, the
    part of the median step in which no kernel ran.
    """
    found: dict[str, Any] = {"row": row.name, "side": row.side(variant), **row.targets}
    found.update(summarise(row.work, variant, answers, row.num_gpus))
    found["num_gpus"] = row.num_gpus
    if "failed" in found:
        return found
    found["tokens_per_s_per_gpu"] = found["tokens_per_s"] / row.num_gpus
    last = found["rounds"][-1]
    if "recorded_step" in last:
        step_s = statistics.median(time_s for answer in found["rounds"] for time_s in answer["step_times_s"])
        known = None if gpu is None else known_rates(gpu)
        tokens = last.get("step_tokens", {}).get("num_tokens", row.work.tokens_per_step) // variant.context_size
        found["step"] = {
            "step_s": step_s,
            "time_s_by_class": last["recorded_step"]["time_s_by_class"],
            "gemm_floor_s": None if known is None else gemm_floor_s(last, tokens, known.ceilings),
        }
        if row.num_gpus == 1:
            found["step"]["gap_s"] = max(0.0, step_s - sum(last["recorded_step"]["time_s_by_class"].values()))
    return found


def compare(row: TableRow, rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The best of ours beside target and baselines; None where none of ours was measured.

    Returns: best (the variant), tokens_per_s_per_gpu, the targets; share_of_target; of ours: variant -> times (baseline
    -> speed over the baseline's, of real tokens on real documents) and first_loss_differences (baseline -> relative, at
    equal weights), last_loss_differences on real documents; same_run: whether all of it was measured by one call.
    """
    measured = {found["arm"]: found for found in rows if "failed" not in found}
    ours = [measured[variant.name] for variant in row.ours if variant.name in measured]
    baselines = [measured[variant.name] for variant in row.baselines if variant.name in measured]
    if not ours:
        return None
    kind = "tokens_per_s" if row.work.text is None else "real_tokens_per_s"
    best = max(ours, key=lambda found: found[kind])
    result: dict[str, Any] = {
        "row": row.name,
        "workload": row.work.name,
        "num_gpus": row.num_gpus,
        "best": best["arm"],
        f"{kind}_per_gpu": best[kind] / row.num_gpus,
        **row.targets,
        "same_run": len({answer["run"] for found in measured.values() for answer in found["rounds"]}) == 1,
        "ours": {},
    }
    for found in ours:
        of_variant = {"times": {baseline["arm"]: found[kind] / baseline[kind] for baseline in baselines}}
        for which in ("first", "last") if row.work.text is not None else ("first",):
            key = f"{which}_loss"
            of_variant[f"{key}_differences"] = {
                baseline["arm"]: found[key] / baseline[key] - 1 for baseline in baselines
            }
        result["ours"][found["arm"]] = of_variant
    if row.target_tokens_per_s_per_gpu is not None:
        result["share_of_target"] = result[f"{kind}_per_gpu"] / row.target_tokens_per_s_per_gpu
    elif row.target_times_padded is not None and row.reference is not None and row.reference.name in measured:
        result["share_of_target"] = result["ours"][best["arm"]]["times"][row.reference.name] / row.target_times_padded
    return result


# --- measuring --------------------------------------------------------------------------------------------------------


def measurer(warmup: int, timeout_s: float, stopped: threading.Event) -> Measure:
    """Measures in processes of their own; `stopped` ends them."""

    def measure(row: TableRow, variant: Variant, gpus: str) -> Answer:
        started = time.perf_counter()
        what = (row.work.name, variant.name, row.num_gpus, row.work.num_steps)
        answer = measure_apart(*what, warmup, timeout_s, {"CUDA_VISIBLE_DEVICES": gpus}, stopped)
        return {**answer, "gpu": gpus, "taken_s": time.perf_counter() - started}

    return measure


@dataclasses.dataclass
class Limit:
    """When no further measurement is begun."""

    seconds: float
    """From now on; 0 for never."""
    stopped: threading.Event = dataclasses.field(default_factory=threading.Event)
    started: float = dataclasses.field(default_factory=time.monotonic)
    left: list[str] = dataclasses.field(default_factory=list)
    """What was not begun."""

    def allows(self, what: str, estimate_s: float) -> bool:
        """Whether a measurement of so many seconds may begin; noted in `left` where not."""
        over = self.seconds and time.monotonic() - self.started + estimate_s > self.seconds
        if over or self.stopped.is_set():
            self.left.append(what)
            return False
        return True


@dataclasses.dataclass(frozen=True)
class Turns:
    """Which variants take turns, and how often."""

    num_rounds: int
    only: tuple[str, ...] = ()
    """Names of variants, or words of them; all where there is none."""

    def has(self, variant: Variant) -> bool:
        """Whether it takes part."""
        return not self.only or any(word == variant.name or word in variant.name.split(":") for word in self.only)

    def due(self, row: TableRow, record: Record) -> Iterator[tuple[int, Variant]]:
        """The rounds (from 0) and variants of a row that are still to be measured, told one by one while they are."""
        for number in range(self.num_rounds):
            for variant in row.variants:
                if self.has(variant) and record.is_due(row, variant, number):
                    yield number, variant


def measure_row(
    row: TableRow, record: Record, turns: Turns, measure: Measure, limit: Limit, gpus: Sequence[str]
) -> None:
    """Measure what a row lacks, its variants in turns on the same GPUs."""
    for number, variant in turns.due(row, record):
        if not limit.allows(f"{row.name} {variant.name}", record.estimate_s(row, variant)):
            continue
        answer = measure(row, variant, ",".join(gpus))
        if answer["failed"] == STOPPED:
            limit.left.append(f"{row.name} {variant.name}")
            continue
        if row.num_gpus == 1:
            print_round(row.work, variant, number, answer)
        else:
            outcome = answer["failed"] or "measured"
            print(f"round {number + 1}  {row.work.name} {variant.name} on {row.num_gpus} GPUs: {outcome}", flush=True)
        record.add(row, variant, answer)


def left_s(row: TableRow, record: Record, turns: Turns) -> float:
    """How long what a row lacks may take."""
    return sum(record.estimate_s(row, variant) for _, variant in turns.due(row, record))


@dataclasses.dataclass(frozen=True)
class Shift:
    """Rows that are measured side by side, in the order in which they are begun, and the GPUs that they share out."""

    rows: list[TableRow]
    gpus: Sequence[str]


def plan_shifts(
    rows: Sequence[TableRow], record: Record, turns: Turns, gpus: Sequence[str], gpus_parallel: int
) -> list[Shift]:
    """One shift after the other: first the rows that fit on the first `gpus_parallel` of `gpus`, then each of the
    others alone.

    Rows side by side begin with the longest, so that none ends alone.
    """
    side_by_side = [row for row in rows if row.num_gpus <= gpus_parallel]
    if gpus_parallel > 1:
        side_by_side.sort(key=lambda row: -left_s(row, record, turns))
    alone = [Shift([row], gpus[: row.num_gpus]) for row in rows if row.num_gpus > gpus_parallel]
    return [Shift(side_by_side, gpus[:gpus_parallel]), *alone]


class Places:
    """Who is next in a shift, and on which GPUs: the first of the waiting rows that the free GPUs suffice for.

    A row takes all its GPUs at once and gives them back together, so none waits for a second GPU with a first one in
    hand.
    """

    def __init__(self, shift: Shift) -> None:
        self._gpus = shift.gpus
        self._free = list(shift.gpus)
        self.waiting = list(shift.rows)

    def begin(self) -> list[tuple[TableRow, list[str]]]:
        """The rows that begin now, with their GPUs."""
        begun = []
        for row in list(self.waiting):
            if row.num_gpus <= len(self._free):
                self.waiting.remove(row)
                begun.append((row, self._free[: row.num_gpus]))
                del self._free[: row.num_gpus]
        return begun

    def end(self, gpus: Sequence[str]) -> None:
        """The row on these GPUs has ended."""
        self._free = sorted([*self._free, *gpus], key=self._gpus.index)  # so that GPUs of a row tend to be neighbours


def estimate_shift_s(shift: Shift, record: Record, turns: Turns) -> float:
    """How long a shift may take, each of its rows as long as `left_s` says."""
    places, now = Places(shift), 0.0
    running: list[tuple[float, list[str]]] = []
    while places.waiting or running:
        for row, gpus in places.begin():
            heapq.heappush(running, (now + left_s(row, record, turns), gpus))
        now, gpus = heapq.heappop(running)
        places.end(gpus)
    return now


def measure_shift(shift: Shift, record: Record, turns: Turns, measure: Measure, limit: Limit) -> None:
    """Measure what the rows of a shift lack, each in a thread of its own; what goes wrong in one ends all."""
    places = Places(shift)
    running: dict[Future[None], list[str]] = {}
    with ThreadPoolExecutor(len(shift.gpus)) as pool:
        try:
            while places.waiting or running:
                for row, gpus in places.begin():
                    running[pool.submit(measure_row, row, record, turns, measure, limit, gpus)] = gpus
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    places.end(running.pop(future))
                    future.result()
        except BaseException:
            limit.stopped.set()  # what runs ends, and nothing else begins
            raise


def measure_table(
    rows: Sequence[TableRow],
    record: Record,
    turns: Turns,
    measure: Measure,
    limit: Limit,
    gpus: Sequence[str],
    gpus_parallel: int = 1,
) -> None:
    """Measure what is not measured yet on `gpus`, of which every row needs at most all, spread over `gpus_parallel`
    of them.
    """
    for shift in plan_shifts(rows, record, turns, gpus, gpus_parallel):
        measure_shift(shift, record, turns, measure, limit)


# --- the command ------------------------------------------------------------------------------------------------------


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line, checked. Raises `UserError`."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--table", type=Path, default=TABLE, help="rows, variants and targets (default benchmarks/speed_table.json)"
    )
    parser.add_argument("--rows", help="comma-separated names of rows (default: all)")
    parser.add_argument(
        "--arms",
        help="comma-separated: measure these variants alone, such as delayed,hf_bf16, whatever stands before or behind",
    )
    parser.add_argument(
        "--text",
        help="documents of the rows on real text: FILE.jsonl or what --dataset_name takes (default: the table's)",
    )
    parser.add_argument(
        "--gpus_parallel",
        type=int,
        default=1,
        help="GPUs that rows are spread over, each on as many as it needs; rows that need more follow alone (default "
        "1)",
    )
    parser.add_argument(
        "--time_limit_s",
        type=float,
        default=0.0,
        help="begin nothing that would take longer than this from the start (default 0: no limit)",
    )
    parser.add_argument("--retry_failed", action="store_true", help="measure again what failed in an earlier call")
    parser.add_argument("--dry_run", action="store_true", help="print what would be measured, and a guess of the time")
    add_measuring_options(parser, steps=6, warmup=2, rounds=1, arm_timeout_s=300, output_required=False)
    options = parser.parse_args(argv)
    check_measuring_options(options)
    if options.gpus_parallel < 1:
        raise UserError(f"--gpus_parallel {options.gpus_parallel} measures nothing; give 1 or more.")
    if not options.time_limit_s >= 0:
        raise UserError(f"--time_limit_s {options.time_limit_s:g}: give seconds, or 0 for no limit.")
    if options.output is None and not options.dry_run:
        raise UserError("--output is missing: name the file that the results go to and that a later call goes on from.")
    return options


def choose(rows: list[TableRow], names: str | None) -> list[TableRow]:
    """The rows of these names. Raises `UserError` for a name that there is not."""
    if names is None:
        return rows
    known = {row.name: row for row in rows}
    if unknown := [name for name in names.split(",") if name not in known]:
        raise UserError(f"--rows {unknown[0]} is none of {', '.join(known)}.")
    return [known[name] for name in dict.fromkeys(names.split(","))]


def choose_turns(rows: Sequence[TableRow], num_rounds: int, variants: str | None) -> Turns:
    """Those of --rounds and --arms. Raises `UserError` for a variant that no row has."""
    turns = Turns(num_rounds, () if variants is None else tuple(variants.split(",")))
    for word in turns.only:
        if not any(Turns(num_rounds, (word,)).has(variant) for row in rows for variant in row.variants):
            raise UserError(f"--arms {word} is in none of the rows {', '.join(row.name for row in rows)}.")
    return turns


def leave_out(rows: Sequence[TableRow], num_gpus: int) -> tuple[list[TableRow], list[dict[str, str]]]:
    """The rows that so many GPUs can measure, and the others with the reason."""
    left_out = [
        {
            "row": row.name,
            "reason": f"it needs {row.num_gpus} GPUs, and {num_gpus or 'none'} {'is' if num_gpus < 2 else 'are'} there",
        }
        for row in rows
        if row.num_gpus > num_gpus
    ]
    return [row for row in rows if row.num_gpus <= num_gpus], left_out


def print_plan(rows: Sequence[TableRow], record: Record, turns: Turns, gpus: Sequence[str], gpus_parallel: int) -> None:
    """What would be measured, and how long that may take."""
    for row in rows:
        on = f"{row.num_gpus} GPUs" if row.num_gpus > 1 else "1 GPU"
        num_tokens = row.work.step_tokens().num_real_tokens * row.num_gpus
        print(
            f"{row.name}: {row.work.name}{_documents(row)}, {on}, {num_tokens:,} tokens a step, target: "
            f"{target_of(row)}"
        )
        left = [variant for _, variant in turns.due(row, record)]
        for variant in dict.fromkeys(left):
            print(f"    {left.count(variant)} x {variant.name:32} about {record.estimate_s(row, variant):4.0f} s")
        print(f"    about {left_s(row, record, turns) / 60:.0f} minutes")
    side_by_side, *alone = plan_shifts(rows, record, turns, gpus, gpus_parallel)
    minutes = [
        sum(estimate_shift_s(shift, record, turns) for shift in shifts) / 60 for shifts in ([side_by_side], alone)
    ]
    num_gpus = len(side_by_side.gpus)
    print(
        f"rows of {'one GPU' if num_gpus == 1 else f'up to {num_gpus} GPUs'}, spread over {num_gpus}: about "
        f"{minutes[0]:.0f} minutes; rows of more GPUs, one by one: about {minutes[1]:.0f} minutes"
    )


def target_of(row: TableRow) -> str:
    """What is to be reached, in words."""
    if row.target_tokens_per_s_per_gpu is not None:
        return f"{row.target_tokens_per_s_per_gpu:,.0f} tokens/s per GPU"
    if row.target_times_padded is not None:
        return f"{row.target_times_padded:g} times the real tokens/s of the padded baseline"
    return "none"


def print_table(rows: Sequence[TableRow], record: Record) -> None:
    """All rows with their targets."""
    for row in rows:
        found = record.rows_of(row)
        comparison = record.comparison(row)
        print(
            f"\n{row.name}: {row.work.name}" + (f", {row.num_gpus} GPUs" if row.num_gpus > 1 else "") + _documents(row)
        )
        for entry in found:
            print(_line(row, entry))
        if comparison is not None:
            print("\n".join(_conclusions(row, comparison, {entry["arm"]: entry for entry in found})))


def _documents(row: TableRow) -> str:
    if row.work.text is None:
        return ""
    facts = row.work.document_facts()
    return f", {facts['num_documents']} documents of {facts['mean_length']:.0f} tokens on average"


def _conclusions(row: TableRow, comparison: dict[str, Any], entries: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What the best of ours reaches, what it gains, where its time goes, and whether losses agree."""
    best = comparison["best"]
    of_best = comparison["ours"][best]
    if "share_of_target" in comparison:
        yield f"    {best} reaches {comparison['share_of_target']:.0%} of the target ({target_of(row)})"
    for variant, share in comparison.get("scaling", {}).items():
        yield f"    {variant}: {share:.1%} of the speed on one GPU, per GPU"
    for baseline, times in of_best["times"].items():
        losses = ", ".join(
            f"{name.removesuffix('_differences').replace('_', ' ')} {of_best[name][baseline]:+.4%}"
            for name in ("first_loss_differences", "last_loss_differences")
            if name in of_best
        )
        yield f"    {best} over {baseline}: {times:.2f} times, {losses}"
    if not comparison["same_run"]:
        yield (
            "    measured by more than one call: what was changed in between, and another GPU of that kind, are in "
            "these ratios"
        )
    if (step := entries[best].get("step")) is not None:
        parts = {**step["time_s_by_class"], **({"no kernel": step["gap_s"]} if "gap_s" in step else {})}
        floor_s = step["gemm_floor_s"]
        floor = "" if floor_s is None else f" (at the measured rates {floor_s * 1e3:.0f})"
        words = (f"{name} {time_s * 1e3:.0f}{floor if name == 'gemm' else ''}" for name, time_s in parts.items())
        yield f"    {best}, ms of a step of {step['step_s'] * 1e3:.0f}: {', '.join(words)}"


def _line(row: TableRow, entry: dict[str, Any]) -> str:
    if "failed" in entry:
        return f"    {entry['arm']:32} not measured: {entry['failed']}"
    kind = "real_tokens_per_s" if row.work.text is not None else "tokens_per_s"
    low, middle, high = (entry[f"{kind}{end}"] / row.num_gpus for end in ("_p10", "", "_p90"))
    line = (
        f"    {entry['arm']:32} {middle:9,.0f} {'real ' if row.work.text else ''}tokens/s per GPU  {low:,.0f} to "
        f"{high:,.0f}"
    )
    if "peak_memory_gib" in entry:
        line += f"  {entry['peak_memory_gib']:.0f} GiB"
    power_w = (entry.get("rounds") or [entry])[0].get("gpu_state", {}).get("power_w")
    if power_w is not None:
        line += f"  {middle / power_w:.1f} tokens/J"
    if "step" in entry and entry["step"]["gemm_floor_s"] is not None:
        line += (
            f"  GEMMs at the measured rates: {entry['step']['gemm_floor_s'] / entry['step']['step_s']:.0%} of the step"
        )
    return line + f"  first loss {entry['first_loss']:.4f}"


def main() -> int:
    """Measure what the file lacks, and print the table."""
    options = parse(sys.argv[1:])
    rows = choose(read_table(options.table, options.steps, options.text), options.rows)
    turns = choose_turns(rows, options.rounds, options.arms)
    gpus = visible_gpus()
    rows, left_out = (rows, []) if options.dry_run and not gpus else leave_out(rows, len(gpus))
    for row in rows:
        if gpus or row.num_gpus == 1:  # baselines on several GPUs ask for them
            row.check()
        if row.work.text is not None:
            row.work.step_tokens()  # that the text is long enough
    record = Record(options.output, rows, {"steps": options.steps, "warmup": options.warmup}, options.retry_failed)
    record.left_out = left_out
    for one in left_out:
        print(f"left out: {one['row']}: {one['reason']}")
    if options.dry_run:
        wanted = max([options.gpus_parallel, *(row.num_gpus for row in rows)])
        print_plan(rows, record, turns, gpus or [str(number) for number in range(wanted)], options.gpus_parallel)
        return 0
    if not gpus:
        raise UserError(
            "the speed table needs an NVIDIA GPU, and none is found; --dry_run says what would be measured."
        )
    limit = Limit(options.time_limit_s)

    def end(*_: object) -> None:
        limit.stopped.set()  # so that the measurements' processes are ended first
        sys.exit(EXIT_TERMINATED)

    signal.signal(signal.SIGTERM, end)
    measure = measurer(options.warmup, options.arm_timeout_s, limit.stopped)
    measure_table(rows, record, turns, measure, limit, gpus, options.gpus_parallel)
    print_table(rows, record)
    print(f"\n{time.monotonic() - limit.started:.0f} s: {options.output}")
    if limit.left:
        print(f"{len(limit.left)} measurements are left, the next of them {limit.left[0]}: run the same command again")
    return EXIT_FAILED_CHECK if limit.left else 0


if __name__ == "__main__":
    run_script(main)
