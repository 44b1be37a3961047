#!/usr/bin/env python
"""What the data pipeline delivers by itself: tokenising a large split, starting from its cache, and the training
loaders of all ranks at once.

    python benchmarks/data_pipeline.py --output benchmarks/results/data_pipeline.json
    python benchmarks/data_pipeline.py --num_rows 20000 --seconds 3 --layouts packed:16x1024x4 --output some.json

Writes a split of made-up rows (benchmarks/made_up_math.py), then takes the same way as a training run. For each length:
reading the parquet files, tokenising with --num_proc processes, both again from the cache. For each layout (packed or
padded, ROWSxLENGTHxMICRO_BATCHES): a whole start from the cache, packing alone, and then as many processes at once as a
host has GPUs, each with the loader of one rank and no model, until --seconds are over. Where there are GPUs the loaders
are measured once more with page-locked memory and every batch copied to a GPU.

Tokens are those of documents; positions count padding too. CPU times tell what other programs on the machine hide:
`tokenise_cpu_s` is that of all tokenising processes, `cores_at_target` the share of a core that a rank's process takes
at the wanted speed. `load_average` is that at the start. `batches_sha256` is the hash of rank 0's first batches, by
which two versions of the code can be told to give the same ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import datasets
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.made_up_math import SPLIT, write_split
from llm_fp8.config.options import EMBEDDED, Config, ModelConfig
from llm_fp8.config.parser import parse_config
from llm_fp8.data import Batch, PreparedData, prepare_data
from llm_fp8.data.load import load_split, open_source
from llm_fp8.data.pack import pack
from llm_fp8.data.tokenise import TokeniseOptions, arrow_table, tokenise
from llm_fp8.models.source import load_tokenizer, resolve_source
from llm_fp8.observability.metrics import GIB
from llm_fp8.observability.provenance import collect_provenance
from llm_fp8.utils.console import quiet_libraries
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import require_writable, write_json_atomic

TARGET_TOKENS_PER_S = 150_000
"""What a rank's loader should deliver at least: more than an H200 trains of the smallest model here."""
LAYOUTS = ("packed:16x1024x4", "packed:2x8192x4", "padded:16x1024x4")
WARMUP_STEPS = 2
HASHED_STEPS = 8
START_TIMEOUT_S = 600.0
PROCESSES: Any = multiprocessing.get_context("spawn")
"""How ranks start: a forked process could not use the GPU."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How rows become batches."""

    name: str
    packed: bool
    batch_size: int
    max_seq_length: int
    num_micro_batches: int

    @classmethod
    def parse(cls, text: str) -> Layout:
        """From `packed:ROWSxLENGTHxMICRO_BATCHES` or `padded:...`; raises `UserError` on anything else."""
        kind, _, shape = text.partition(":")
        numbers = shape.split("x")
        if (
            kind not in ("packed", "padded")
            or len(numbers) != 3
            or not all(n.isdecimal() and int(n) > 0 for n in numbers)
        ):
            raise UserError(
                f"--layouts {text}: write packed:ROWSxLENGTHxMICRO_BATCHES or padded:..., such as {LAYOUTS[0]}."
            )
        return cls(text, kind == "packed", *map(int, numbers))


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the rows and the caches lie, whose tokenizer is used, and how many processes tokenise."""

    folder: Path
    model_name: str
    num_proc: int

    @property
    def rows(self) -> Path:
        return self.folder / "rows"

    @property
    def tokenised(self) -> Path:
        return self.folder / "tokenised"

    def settle(self) -> PreTrainedTokenizerBase:
        """Let this process keep what it converts in the folder, and load the tokenizer."""
        quiet_libraries()
        datasets.disable_progress_bars()
        datasets.config.HF_DATASETS_CACHE = self.folder / "converted"
        model = ModelConfig(model_name=self.model_name)
        return load_tokenizer(model, resolve_source(model))[0]

    def config(self, layout: Layout) -> Config:
        """The options of a training run on these rows."""
        return parse_config(
            [
                f"--dataset_name={self.rows}",
                f"--split_name={SPLIT}",
                f"--preprocessing_workers={self.num_proc}",
                f"--batch_size={layout.batch_size}",
                f"--max_seq_length={layout.max_seq_length}",
                f"--gradient_accumulation_steps={layout.num_micro_batches}",
                "--packing" if layout.packed else "--no_packing",
            ]
        )


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that `work` takes, and what it returns."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def cpu_seconds() -> float:
    """CPU time of this process and of the processes that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measure_preparation(place: Place, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> dict[str, Any]:
    """Reading and tokenising the split, the first time and from the cache. Only the first length reads the parquet
    files for the first time.
    """
    options = TokeniseOptions("problem_solution", max_seq_length)

    def read() -> datasets.Dataset:
        return load_split(open_source(str(place.rows)), SPLIT)

    load_s, dataset = timed(read)
    cpu_started = cpu_seconds()
    tokenise_s, first = timed(lambda: tokenise(dataset, tokenizer, options, str(place.tokenised), place.num_proc))
    cpu_s = cpu_seconds() - cpu_started
    cached_load_s, again = timed(read)
    cached_tokenise_s, second = timed(lambda: tokenise(again, tokenizer, options, str(place.tokenised), place.num_proc))
    if [file["filename"] for file in first.cache_files] != [file["filename"] for file in second.cache_files]:
        raise RuntimeError("the second start did not find the tokens of the first")
    lengths = arrow_table(first).column("length").to_numpy()
    size_bytes = sum(Path(file["filename"]).stat().st_size for file in first.cache_files)
    return {
        "max_seq_length": max_seq_length,
        "num_rows": len(first),
        "num_rows_used": int((lengths > 0).sum()),
        "num_tokens": int(lengths.sum()),
        "length_percentiles": {str(p): float(np.percentile(lengths[lengths > 0], p)) for p in (5, 50, 95, 99)},
        "load_s": load_s,
        "tokenise_s": tokenise_s,
        "tokenise_cpu_s": cpu_s,
        "rows_per_s": len(first) / tokenise_s,
        "tokens_per_s": int(lengths.sum()) / tokenise_s,
        "cache_gib": size_bytes / GIB,
        "cached_load_s": cached_load_s,
        "cached_tokenise_s": cached_tokenise_s,
    }


def hash_of(batches: Sequence[Batch]) -> str:
    """SHA-256 of everything that batches hold."""
    digest = hashlib.sha256()
    for batch in batches:
        for field in dataclasses.fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, torch.Tensor):
                digest.update(f"{field.name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.contiguous().numpy().tobytes())
            else:
                digest.update(f"{field.name} {value!r}".encode())
    return digest.hexdigest()


def start_and_pack(place: Place, tokenizer: PreTrainedTokenizerBase, layout: Layout) -> dict[str, Any]:
    """A start of rank 0 alone from the cache, and how long packing takes of it."""
    config = place.config(layout)
    start_s, data = timed(lambda: prepare_data(config, tokenizer))
    first_step_s, steps = timed(lambda: take(data, 1))
    source = load_split(open_source(str(place.rows)), SPLIT)
    tokenised = tokenise(
        source,
        tokenizer,
        TokeniseOptions("problem_solution", layout.max_seq_length),
        str(place.tokenised),
        place.num_proc,
    )
    lengths = arrow_table(tokenised).column("length").to_numpy()
    pack_s, _ = timed(lambda: pack(lengths[lengths > 0], layout.max_seq_length)) if layout.packed else (None, None)
    steps += take(data, HASHED_STEPS - 1)
    return {
        "layout": layout.name,
        "start_s": start_s,
        "first_step_s": first_step_s,
        "pack_s": pack_s,
        "padding_efficiency": data.report.padding_efficiency,
        "num_rows_of_batches": data.report.num_rows_of_batches,
        "batches_sha256": hash_of([batch for step in steps for batch in step]),
    }


def take(data: PreparedData, num_steps: int) -> list[list[Batch]]:
    """The next steps of the training loader."""
    iterator = iter(data.train)
    steps = list(islice(iterator, num_steps))
    iterator.close()  # type: ignore[attr-defined]
    return steps


def memory_bytes() -> dict[str, int]:
    """Resident memory of this process by kind: its own, and that of mapped files, which processes share. Empty where
    the system does not say.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    kinds = {"RssAnon:": "own", "RssFile:": "mapped"}
    return {kinds[words[0]]: int(words[1]) * 1024 for words in map(str.split, lines) if words and words[0] in kinds}


def load_as_rank(
    place: Place, layout: Layout, rank: int, num_ranks: int, to_gpu: bool, seconds: float, together: Any, results: Any
) -> None:
    """What one process does: start, meet the others, and take batches until the time is over. Puts its figures, or
    its error, into `results`.
    """
    try:
        torch.set_num_threads(1)
        tokenizer = place.settle()
        device = torch.device("cuda", rank % torch.cuda.device_count()) if to_gpu else torch.device("cpu")
        if to_gpu:
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
        before = memory_bytes()
        start_s, data = timed(lambda: prepare_data(place.config(layout), tokenizer, rank, num_ranks, pin_memory=to_gpu))
        steps = iter(data.train)
        for _ in range(WARMUP_STEPS):
            for batch in next(steps):
                batch.to(device, non_blocking=True)
        together.wait(START_TIMEOUT_S)
        tokens = positions = num_steps = 0
        cpu_started, started = time.process_time(), time.perf_counter()
        while time.perf_counter() - started < seconds:
            for batch in next(steps):
                batch.to(device, non_blocking=True)
                tokens += batch.num_real_tokens
                positions += batch.num_tokens
            num_steps += 1
        if to_gpu:
            torch.cuda.synchronize(device)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        after = memory_bytes()
        steps.close()  # type: ignore[attr-defined]
        results.put(
            {
                "rank": rank,
                "start_s": start_s,
                "num_steps": num_steps,
                "wall_s": wall_s,
                "cpu_s": cpu_s,
                "tokens_per_s": tokens / wall_s,
                "positions_per_s": positions / wall_s,
                "cores_at_target": cpu_s / tokens * TARGET_TOKENS_PER_S,
                "memory_gib": {kind: (after[kind] - before[kind]) / GIB for kind in after},
            }
        )
    except BaseException as error:
        together.abort()  # the others need not wait
        results.put({"rank": rank, "error": f"{type(error).__name__}: {error}"})
        raise


def measure_loaders(place: Place, layout: Layout, num_ranks: int, to_gpu: bool, seconds: float) -> dict[str, Any]:
    """The loaders of all ranks at once, a process each. Raises `RuntimeError` where one of them fails."""
    together, results = PROCESSES.Barrier(num_ranks), PROCESSES.SimpleQueue()
    processes = [
        PROCESSES.Process(
            target=load_as_rank, args=(place, layout, rank, num_ranks, to_gpu, seconds, together, results)
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        time.sleep(0.1)
    ranks = sorted((results.get() for _ in range(num_ranks) if not results.empty()), key=lambda result: result["rank"])
    errors = [f"rank {result['rank']}: {result['error']}" for result in ranks if "error" in result]
    if errors or len(ranks) < num_ranks:
        raise RuntimeError("; ".join(errors) or f"{num_ranks - len(ranks)} of {num_ranks} loading processes died")
    slowest = min(result["tokens_per_s"] for result in ranks)
    return {
        "to_gpu": to_gpu,
        "num_ranks": num_ranks,
        "tokens_per_s": sum(result["tokens_per_s"] for result in ranks),
        "positions_per_s": sum(result["positions_per_s"] for result in ranks),
        "tokens_per_s_slowest_rank": slowest,
        "cores_at_target": max(result["cores_at_target"] for result in ranks),
        "meets_target": slowest >= TARGET_TOKENS_PER_S,
        "ranks": ranks,
    }


def describe_preparation(made: dict[str, Any]) -> str:
    """The line printed after a length."""
    return (
        f"{made['num_rows']:,} rows at {made['max_seq_length']}: read in {made['load_s']:.1f} s, tokenised in "
        f"{made['tokenise_s']:.1f} s ({made['rows_per_s']:,.0f} rows/s, {made['tokens_per_s']:,.0f} tokens/s, "
        f"{made['num_rows'] / made['tokenise_cpu_s']:,.0f} rows per second of a core); from the cache "
        f"{made['cached_load_s']:.1f} s and {made['cached_tokenise_s']:.1f} s"
    )


def describe_layout(row: dict[str, Any]) -> str:
    """The lines printed after a layout."""
    packing = "" if row["pack_s"] is None else f", packing {row['pack_s']:.2f} s of it"
    lines = [f"{row['layout']}: a start from the cache {row['start_s']:.2f} s{packing}"]
    for loaders in row["loaders"]:
        lines.append(
            f"  {loaders['num_ranks']} ranks{' to the GPU' if loaders['to_gpu'] else ''}: "
            f"{loaders['tokens_per_s']:,.0f} tokens/s, the slowest {loaders['tokens_per_s_slowest_rank']:,.0f} "
            f"({'at least' if loaders['meets_target'] else 'BELOW'} {TARGET_TOKENS_PER_S:,}); "
            f"{loaders['cores_at_target']:.3f} cores per rank at that speed"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The checked options; raises `UserError`."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--num_rows", type=int, default=1_000_000, help="rows of the split (default %(default)s)")
    parser.add_argument(
        "--num_proc", type=int, default=os.cpu_count() or 1, help="processes that tokenise (default: one per core)"
    )
    parser.add_argument("--ranks", type=int, default=8, help="loaders at once (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of loading, per layout (default %(default)s)")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), help="default: %(default)s")
    parser.add_argument(
        "--model_name", default=EMBEDDED, help="hub id or folder whose tokenizer is used (default: %(default)s)"
    )
    parser.add_argument(
        "--scratch", type=Path, help="folder for rows and caches (default: a temporary one, removed at the end)"
    )
    options = parser.parse_args(arguments)
    for name in ("num_rows", "num_proc", "ranks", "seconds"):
        if not getattr(options, name) > 0:
            raise UserError(f"--{name} {getattr(options, name)} measures nothing; give a number above 0.")
    options.layouts = [Layout.parse(text) for text in options.layouts]
    require_writable("--output", options.output)
    if options.scratch is not None and (not options.scratch.is_dir() or any(options.scratch.iterdir())):
        raise UserError(
            f"--scratch {options.scratch}: give an empty folder that exists, or everything would come from a cache."
        )
    return options


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything, in order; prints a line for each part."""
    place = Place(folder, options.model_name, options.num_proc)
    tokenizer = place.settle()
    write_s, _ = timed(lambda: write_split(place.rows, options.num_rows))
    print(f"{options.num_rows:,} rows written in {write_s:.1f} s", flush=True)
    record: dict[str, Any] = {
        "provenance": collect_provenance(sys.argv),
        "target_tokens_per_s_per_rank": TARGET_TOKENS_PER_S,
        "num_rows": options.num_rows,
        "num_proc": options.num_proc,
        "load_average": os.getloadavg()[0],
        "model_name": options.model_name,
        "vocabulary_size": len(tokenizer),
        "preparation": [],
        "layouts": [],
    }
    for length in dict.fromkeys(layout.max_seq_length for layout in options.layouts):
        record["preparation"].append(measure_preparation(place, tokenizer, length))
        print(describe_preparation(record["preparation"][-1]), flush=True)
    for layout in options.layouts:
        row = start_and_pack(place, tokenizer, layout)
        ways = [False, True] if torch.cuda.is_available() else [False]
        row["loaders"] = [measure_loaders(place, layout, options.ranks, to_gpu, options.seconds) for to_gpu in ways]
        record["layouts"].append(row)
        print(describe_layout(row), flush=True)
    return record


def main() -> int:
    """Measure and keep the figures; returns the exit code."""
    options = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as temporary:
        record = measure(options, options.scratch or Path(temporary))
    write_json_atomic(options.output, record)
    return 0


if __name__ == "__main__":
    run_script(main)
