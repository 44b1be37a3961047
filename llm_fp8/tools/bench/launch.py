"""Training throughput on the GPUs of one host: this project's sharding modes and the usual set-ups, in one launch.

The program behind scripts/benchmark_multi_gpu.py. A variant that fails ends its processes, because a GPU out of memory
leaves the others in a collective; its row says so, and torchrun's --max-restarts starts all anew with the next variant.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llm_fp8.utils.cuda_environment import CUDA_DEFAULTS

os.environ.update({**CUDA_DEFAULTS, **os.environ})  # before torch is imported

import torch
import torch.distributed as dist

from llm_fp8.distributed.process_group import own_device, start_process_group
from llm_fp8.tools.bench.measure import describe_failure, describe_gemms, header, measure, speed
from llm_fp8.tools.bench.variants import DEEPSPEED_MODES, Variant, parse_variants
from llm_fp8.tools.bench.worker import (
    ENDED_IN_SILENCE,
    add_measuring_options,
    add_workload_options,
    check_measuring_options,
)
from llm_fp8.tools.bench.workload import Workload, parse_workloads
from llm_fp8.utils.console import quiet_libraries
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.json_files import read_json, write_json_atomic
from llm_fp8.utils.ranks import LaunchRanks, first_to_say

EXIT_VARIANT_FAILED = 3
REPORT_S = 5.0
"""How long the process that reports a failure may take to write its row."""
DEFAULT_VARIANTS = (
    "ddp:hf_bf16,fsdp_full:hf_bf16,ddp:delayed,fsdp_full:bf16,fsdp_full:delayed,fsdp_full:current,fsdp_grad:delayed"
)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    add_workload_options(parser, DEFAULT_VARIANTS, "scripts/benchmark_multi_gpu.py")
    file = "DeepSpeed's file for variants under it (default configs/ds_z1.json to ds_z3.json)"
    parser.add_argument("--deepspeed_config", type=Path, help=file)
    add_measuring_options(parser, steps=6, warmup=3, arm_timeout_s=120)
    options = parser.parse_args(argv)
    check_measuring_options(options)
    return options


def variants_of(options: argparse.Namespace) -> list[Variant]:
    """The variants, those under DeepSpeed with the file of the options. Raises `UserError`."""
    variants = parse_variants(options.arms)
    if options.deepspeed_config is None:
        return variants
    file = str(options.deepspeed_config)
    if not any(variant.mode in DEEPSPEED_MODES for variant in variants):
        raise UserError(
            f"--deepspeed_config {file}: no variant is under DeepSpeed; add one such as deepspeed_1:bf16, or drop it."
        )
    read_json(options.deepspeed_config)
    return [
        dataclasses.replace(variant, deepspeed_config=file) if variant.mode in DEEPSPEED_MODES else variant
        for variant in variants
    ]


def subject_of(work: Workload, variant: Variant, num_gpus: int) -> dict[str, Any]:
    subject = {"workload": work.name, **work.to_dict(), "arm": variant.name, "mode": variant.mode}
    subject.update(context_parallel_size=variant.context_size, num_gpus=num_gpus)
    file = variant.deepspeed_file
    return {**subject, "deepspeed_config": read_json(file)} if file else subject


def summarise(
    work: Workload, variant: Variant, step_times_s: list[list[float]], num_adapter_parameters: int = 0
) -> dict[str, Any]:
    """The speed of a variant from each process's timed steps (seconds): that of the slowest median."""
    num_gpus = len(step_times_s)
    medians = [statistics.median(times) for times in step_times_s]
    times = step_times_s[max(range(num_gpus), key=medians.__getitem__)]
    figures = speed(work, times, num_gpus, variant.context_size, num_adapter_parameters)
    return {
        **figures,
        "tokens_per_s_per_gpu": figures["tokens_per_s"] / num_gpus,
        "step_times_s": times,
        "median_step_time_s_by_rank": medians,
    }


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """Restore the environment afterwards: Accelerate and DeepSpeed leave variables that the next variant would read."""
    kept = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


class ResultsFile:
    """The results file of a launch: one row per measurement, in the order of its plan, rewritten after each.

    Processes that the launcher starts anew continue after its last row. All wait for the writer before they read.
    `launch` is the same for all processes and restarts of a launch; `writes`: this process writes rows of measurements.
    Any process may write that one failed.
    """

    def __init__(self, path: Path, launch: str, *, writes: bool) -> None:
        self._path, self.launch, self._writes = path, launch, writes
        self._number = 0

    def start(self, header: dict[str, Any]) -> None:
        """Replace any other file by one without rows; `header`: its other entries."""
        write_json_atomic(self._path, {**header, "launch": self.launch, "measuring": None, "rows": []})

    def read(self) -> dict[str, Any]:
        """Its entries; empty without a file. `measuring`, after a new start, had no row written when all ended."""
        return read_json(self._path, {"rows": list}) if self._path.exists() else {}

    def begin(self, subject: dict[str, Any]) -> None:
        """Note what is being measured; `subject` becomes part of its row."""
        self._number = len(self.read()["rows"])
        if self._writes:
            write_json_atomic(self._path, {**self.read(), "measuring": subject})

    def add(self, row: dict[str, Any]) -> None:
        if self._writes:
            self._append(row)

    def add_failure(self, subject: dict[str, Any], reason: str) -> None:
        """Append the row of what could not be measured, unless it has one. One process of all calls this."""
        if len(self.read()["rows"]) == self._number:
            self._append({**subject, "failed": reason})

    def _append(self, row: dict[str, Any]) -> None:
        record = self.read()
        write_json_atomic(self._path, {**record, "measuring": None, "rows": [*record["rows"], row]})


def end_process() -> None:
    """End at once, whatever the other threads and the GPU are doing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_VARIANT_FAILED)


@contextlib.contextmanager
def time_limit(limit_s: float, when_over: Callable[[], None]) -> Iterator[None]:
    """Where the enclosed block takes longer than `limit_s`, print the stacks and call `when_over`, in a thread."""

    def over() -> None:
        faulthandler.dump_traceback()
        when_over()

    watchdog = threading.Timer(limit_s, over)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


@contextlib.contextmanager
def ending_on_failure(results: ResultsFile, subject: dict[str, Any], timeout_s: float) -> Iterator[None]:
    """End this process, with a row that says why, where the block fails or takes longer than `timeout_s`.

    Nothing is cleaned up: that could wait for processes that wait for this one. The launcher ends those.
    """

    def end(reason: str) -> None:
        if first_to_say(f"{subject['workload']} {subject['arm']} failed"):
            results.add_failure(subject, reason)
            print(f"{subject['workload']} {subject['arm']} failed: {reason}", flush=True)
        else:
            time.sleep(REPORT_S)  # an end now would have the launcher end the one that is about to write the row
        end_process()

    try:
        with time_limit(timeout_s, lambda: end(f"took longer than {timeout_s:g} s")):
            yield
    except Exception as error:
        end(describe_failure(error))


def main() -> int:
    """Measure what has no row yet, and write a row for each."""
    options = parse(sys.argv[1:])
    ranks = LaunchRanks.from_environment(os.environ)
    if not ranks.launched or ranks.local_world_size != ranks.world_size:
        raise UserError(
            "the benchmark runs in the processes of one host: torchrun --nproc_per_node=NUMBER_OF_GPUS "
            "scripts/benchmark_multi_gpu.py ..."
        )
    works = parse_workloads(options.workloads, options.steps)
    variants = variants_of(options)
    plan = [(work, variant) for work in works for variant in variants]
    for work, variant in plan:
        variant.check(work, ranks)
    quiet_libraries()
    started = time.perf_counter()
    is_main, launch = ranks.rank == 0, f"{os.getppid()}:{os.environ['MASTER_PORT']}"  # torchrun's process and port
    with time_limit(options.arm_timeout_s, end_process):
        start_process_group(ranks)
        device = own_device()
        results = ResultsFile(options.output, launch, writes=is_main)
        if is_main and not (ranks.restart_count and results.read().get("launch") == launch):
            results.start(header(sys.argv, device))
        _meet()
        subject = results.read()["measuring"]
        _meet()
        if subject is not None and is_main:  # its processes ended before they could write its row
            results.begin(subject)
            results.add_failure(subject, ENDED_IN_SILENCE)
        _meet()
    for work, variant in plan[len(results.read()["rows"]) :]:
        subject = subject_of(work, variant, ranks.world_size)
        results.begin(subject)
        _meet()
        with ending_on_failure(results, subject, options.arm_timeout_s), own_environment():
            found = measure(work, variant, options.warmup, device)
            times = found.pop("step_times_s_by_rank")
            row = {**subject, **summarise(work, variant, times, found.get("num_adapter_parameters", 0)), **found}
            results.add(row)
            _meet()
        if is_main:
            print_row(row)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if is_main:
        took_s = time.perf_counter() - started
        print(f"{options.output}: {len(plan)} variants, {took_s:.0f} s since the last start", flush=True)
    dist.destroy_process_group()
    return 0


def _meet() -> None:
    """Wait for all processes; the tensor is on the CPU, so that no GPU is needed."""
    dist.all_reduce(torch.zeros(1))


def print_row(row: dict[str, Any]) -> None:
    line = (
        f"{row['workload']:28} {row['arm']:24} {row['tokens_per_s_per_gpu']:9,.0f} tokens/s/GPU  "
        f"{row['model_tflops']:6.1f} TFLOP/s"
    )
    if "peak_memory_gib" in row:
        line += (
            f"  {row['peak_memory_gib']:6.1f} GiB  communication {row['communication_share']:.0%}, alone "
            f"{row['exposed_communication_share']:.0%}  GEMM kernels (share of their time): "
            f"{describe_gemms(row['gemm_kernels'])}"
        )
    print(f"{line}  ({row['wall_time_s']:.0f} s)", flush=True)


if __name__ == "__main__":
    run_script(main)
