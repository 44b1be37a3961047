#!/usr/bin/env python
"""Measure our recipes and the baselines on every workload of the speed table, and compare the speeds with targets.

    python benchmarks/speed_table.py --list
    python benchmarks/speed_table.py --output speed_table.json --rows 1b,8b
    python benchmarks/speed_table.py --table benchmarks/speed_table_h100.json --output speed_table_h100.json
    python benchmarks/speed_table.py --table benchmarks/families_4b.json --output benchmarks/results/families_4b.json

The rows are in benchmarks/speed_table.json, or in the file --table. A row has these entries:

    row                           its name, which ends in _xN if num_gpus is N
    model, batch_size, seq_length, micro_batches, num_gpus, dataset     the workload (scripts/benchmark.py)
    config                        entries of the model's config.json, if `model` is only its name (optional)
    variants                      name -> options of the training scripts, or 'baseline NAME OPTIONS'
    target_tokens_per_s_per_gpu   the target of our fastest variant (optional)
    target_times_padded           with a dataset: our target as a multiple of hf_bf16's real tokens/s (optional)

benchmarks/families_4b.json has a row per family of models, with a published shape of about 4 billion parameters or the
nearest. `python -m tests.support.hub_families` prints its results in the table of families.

Rows that need more GPUs than are visible are reported and left out. The output is written after every measurement.
Repeating the command measures the variants that it lacks.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import bench
from benchmarks.bench import Variant, Workload, parse_variants
from benchmarks.gpus import visible_gpus
from llm_fp8.tools.script import run_script
from llm_fp8.utils.errors import OneSentenceParser, UserError, reading
from llm_fp8.utils.json_files import read_json

TABLE = Path(__file__).with_suffix(".json")
REFERENCE = "hf_bf16"

Row = dict[str, Any]


def read_table(path: Path, names: str | None = None) -> list[Row]:
    """Read a table's rows, or only those in the comma-separated `names`. Raise `UserError` for an unknown name."""
    with reading("--table", path, "the table"):
        rows = {row["row"]: row for row in json.loads(path.read_text())["rows"]}
    selected = names.split(",") if names else list(rows)
    for name in selected:
        if name not in rows:
            raise UserError(f"--rows {name}: {path} has {', '.join(rows)}.")
    return [rows[name] for name in selected]


def workload_of(row: Row) -> Workload:
    names = ("model", "batch_size", "seq_length", "micro_batches", "num_gpus", "dataset", "config")
    return Workload(**{name: row[name] for name in names if name in row})


def variants_of(row: Row) -> list[Variant]:
    """Parse the variants of a table row. Raise `UserError` if an option is unknown or options contradict each other."""
    variants = []
    for name, options in row["variants"].items():
        (variant,) = parse_variants(f"x: {options}", row.get("num_gpus", 1))
        variants.append(Variant(name, variant.argv, variant.baseline))
    return variants


def judge(row: Row, measured: list[Row]) -> list[str]:
    """Return a sentence for each target in `row`: the best value in `measured`, and whether it reaches the target."""
    sentences = []
    ours = [entry for entry in measured if entry["baseline"] is None and "tokens_per_s" in entry]
    target = row.get("target_tokens_per_s_per_gpu")
    if target and ours:
        best = max(entry["tokens_per_s"] for entry in ours) / row.get("num_gpus", 1)
        sentences.append(f"{row['row']}: {best:,.0f} of {target:,.0f} tokens/s per GPU: {verdict(best >= target)}")
    padded = next(
        (entry for entry in measured if entry["baseline"] == REFERENCE and "real_tokens_per_s" in entry), None
    )
    target = row.get("target_times_padded")
    if target and ours and padded:
        times = max(entry["real_tokens_per_s"] for entry in ours) / padded["real_tokens_per_s"]
        sentences.append(f"{row['row']}: {times:.2f} of {target:g} times padded: {verdict(times >= target)}")
    return sentences


def save_rows(output: Path, done: list[Row], start: int, name: str, rows: list[Row]) -> None:
    """Replace `done` from `start` on by `rows`, those of the table's row `name`. Write all of it to `output`."""
    done[start:] = [{"row": name, **entry} for entry in rows]
    bench.write_rows(output, done)


def verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def main() -> int:
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--table", type=Path, default=TABLE, help="JSON file of the rows (default %(default)s)")
    parser.add_argument("--rows", help="names of rows, separated by commas (default: all)")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    bench.add_measuring_options(parser)
    options = parser.parse_args()
    plan = bench.measuring_plan(options)
    num_gpus = len(visible_gpus())
    table = [(row, workload_of(row), variants_of(row)) for row in read_table(options.table, options.rows)]
    if options.list:
        for row, work, variants in table:
            names = ", ".join(variant.name for variant in variants)
            print(f"{row['row']:16} {work.name:32} {work.num_gpus} GPUs  {names}")
        return 0
    if options.output is None:
        raise UserError("--output is needed, unless --list is given.")
    done: list[Row] = read_json(options.output)["rows"] if options.output.exists() else []
    for row, work, variants in table:
        finished = {entry["variant"] for entry in done if entry["row"] == row["row"]}
        missing = [variant for variant in variants if variant.name not in finished]
        if not missing:
            print(f"{row['row']}: taken from {options.output}")
        elif work.num_gpus > num_gpus:
            print(f"{row['row']}: left out, because it needs {work.num_gpus} GPUs and {num_gpus} are visible")
        else:
            save = functools.partial(save_rows, options.output, done, len(done), row["row"])
            bench.measure_all(work, missing, plan, save)
        if measured := [entry for entry in done if entry["row"] == row["row"]]:
            bench.print_table(measured)
            print("\n".join(judge(row, measured)))
    return 0


if __name__ == "__main__":
    run_script(main)
