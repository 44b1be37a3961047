"""Training throughput on the GPUs of one host: this project's sharding modes and the usual set-ups, in one launch.

The program behind scripts/benchmark_multi_gpu.py, which says what its options mean. It writes a row for every variant
of every workload that has none yet. A variant that fails ends its processes; its row says so, and torchrun's
--max-restarts starts them anew with the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
)  # for every arm, as in the training scripts

import torch
import torch.distributed as dist
from torch import Tensor

from llm_fp8.distributed.deepspeed_config import read_file
from llm_fp8.distributed.process_group import start_process_group
from llm_fp8.tools.bench.measure import describe_failure, describe_gemms, header, measure, speed
from llm_fp8.tools.bench.variant_names import Variant, parse_variants
from llm_fp8.tools.bench.variants import DEEPSPEED_MODES
from llm_fp8.tools.bench.worker import ENDED_IN_SILENCE, ResultsFile, add_measuring_options, check_measuring_options
from llm_fp8.tools.bench.workload import Workload, parse_workloads
from llm_fp8.utils.console import quiet_libraries
from llm_fp8.utils.errors import OneSentenceParser, UserError, run_script
from llm_fp8.utils.ranks import LaunchRanks, first_to_say

EXIT_ARM_FAILED = 3
SAYING_S = 5.0
"""How long the process that says why an arm failed may take to write it."""
DEFAULT_ARMS = (
    "ddp:hf_bf16,fsdp_full:hf_bf16,ddp:delayed,fsdp_full:bf16,fsdp_full:delayed,fsdp_full:current,fsdp_grad:delayed"
)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = OneSentenceParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--workloads",
        default="Llama-3.2-1B:8x1024x4",
        help="comma-separated MODEL:ROWSxLENGTHxMICRO_BATCHES (default %(default)s)",
    )
    parser.add_argument(
        "--arms",
        default=DEFAULT_ARMS,
        help="comma-separated, see the head of scripts/benchmark_multi_gpu.py (default %(default)s)",
    )
    parser.add_argument(
        "--deepspeed_config",
        type=Path,
        help="DeepSpeed's file for arms under it (default configs/ds_z1.json to ds_z3.json)",
    )
    add_measuring_options(parser, steps=6, warmup=3, arm_timeout_s=120)
    options = parser.parse_args(argv)
    check_measuring_options(options)
    return options


def variants_of(options: argparse.Namespace) -> list[Variant]:
    """The arms, those under DeepSpeed with the file that is named. Raises `UserError`."""
    arms = parse_variants(options.arms)
    if options.deepspeed_config is None:
        return arms
    if not any(arm.mode in DEEPSPEED_MODES for arm in arms):
        raise UserError(
            f"--deepspeed_config {options.deepspeed_config}: no arm is under DeepSpeed; add one such as "
            "deepspeed_1:bf16, or drop it."
        )
    read_file(options.deepspeed_config)
    return [arm.with_deepspeed_config(options.deepspeed_config) for arm in arms]


def subject_of(work: Workload, arm: Variant, num_gpus: int) -> dict[str, Any]:
    """What a row is about."""
    return {
        "workload": work.name,
        **work.to_dict(),
        "arm": arm.name,
        "mode": arm.mode,
        "context_parallel_size": arm.context_size,
        "num_gpus": num_gpus,
        **({"deepspeed_config": read_file(arm.deepspeed_file)} if arm.deepspeed_file else {}),
    }


# --- one arm
# --------------------------------------------------------------------------------------------------------------


def row_of(work: Workload, arm: Variant, warmup: int, device: torch.device) -> dict[str, Any]:
    """The figures of an arm's row. Collective."""
    found = measure(work, arm, warmup, device)
    times = found.pop("step_times_s_by_rank")
    return {**summarise(work, arm, times, found.get("num_adapter_parameters", 0)), **found}


def summarise(
    work: Workload, arm: Variant, step_times_s: list[list[float]], num_adapter_parameters: int = 0
) -> dict[str, Any]:
    """The speed of an arm from the timed steps of each process (seconds)."""
    num_gpus = len(step_times_s)
    medians = [statistics.median(times) for times in step_times_s]
    times = step_times_s[max(range(num_gpus), key=medians.__getitem__)]
    figures = speed(work, times, num_gpus, arm.context_size, num_adapter_parameters)
    return {
        **figures,
        "tokens_per_s_per_gpu": figures["tokens_per_s"] / num_gpus,
        "step_times_s": times,
        "median_step_time_s_by_rank": medians,
    }


@contextlib.contextmanager
def own_environment() -> Iterator[None]:
    """Take back what Accelerate and DeepSpeed leave in the environment for themselves, which the next arm would
    read.
    """
    kept = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


# --- what ends an arm
# -----------------------------------------------------------------------------------------------------


def end_process() -> None:
    """End at once, whatever the other threads and the GPU are doing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_ARM_FAILED)


@contextlib.contextmanager
def time_limit(limit_s: float, when_over: Callable[[], None]) -> Iterator[None]:
    """Show where this process stands and call `when_over`, in a thread, where the enclosed block takes longer than
    `limit_s`.
    """

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
    """End this process, with a row that says why, where the enclosed measurement fails or takes longer than
    `timeout_s`.

    Nothing is cleaned up, because that could wait for processes that wait for this one; the launcher ends those.
    """

    def end(reason: str) -> None:
        if first_to_say(f"{subject['workload']} {subject['arm']} failed"):
            results.add_failure(subject, reason)
            print(f"{subject['workload']} {subject['arm']} failed: {reason}", flush=True)
        else:
            time.sleep(SAYING_S)  # an end now would have the launcher end the one that is about to write the row
        end_process()

    try:
        with time_limit(timeout_s, lambda: end(f"took longer than {timeout_s:g} s")):
            yield
    except UserError as error:
        end(str(error))
    except Exception as error:
        if not isinstance(error, torch.OutOfMemoryError):
            traceback.print_exc()
        end(describe_failure(error))


# --- all arms
# -------------------------------------------------------------------------------------------------------------


def main() -> int:
    """Measure every arm of every workload that has no row yet; write a row for each."""
    options = parse(sys.argv[1:])
    ranks = LaunchRanks.from_environment(os.environ)
    if not ranks.launched or ranks.local_world_size != ranks.world_size:
        raise UserError(
            "the benchmark runs in the processes of one host: torchrun --nproc_per_node=NUMBER_OF_GPUS "
            "scripts/benchmark_multi_gpu.py ..."
        )
    works = parse_workloads(options.workloads, options.steps)
    arms = variants_of(options)
    plan = [(work, arm) for work in works for arm in arms]
    for work, arm in plan:
        arm.check(work, ranks)
    quiet_libraries()
    started = time.perf_counter()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    is_main, launch = ranks.rank == 0, f"{os.getppid()}:{os.environ['MASTER_PORT']}"  # torchrun's process and port
    with time_limit(options.arm_timeout_s, end_process):
        start_process_group(ranks)
        results = ResultsFile(options.output, launch, writes=is_main)
        if is_main and not (ranks.restart_count and results.is_of_this_launch()):
            results.start(header(sys.argv, device))
        _meet()
        take_up(results, is_main)
    for work, arm in plan[len(results.rows()) :]:
        subject = subject_of(work, arm, ranks.world_size)
        results.begin(subject)
        _meet()
        with ending_on_failure(results, subject, options.arm_timeout_s), own_environment():
            row = {**subject, **row_of(work, arm, options.warmup, device)}
            results.add(row)
            _meet()
        if is_main:
            print_row(row)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if is_main:
        print(
            f"{options.output}: {len(plan)} arms, {time.perf_counter() - started:.0f} s since the last start",
            flush=True,
        )
    dist.destroy_process_group()
    return 0


def take_up(results: ResultsFile, is_main: bool) -> None:
    """Write the row of an arm whose processes ended before they could; collective."""
    subject = results.interrupted()
    _meet()
    if subject is not None and is_main:
        results.begin(subject)
        results.add_failure(subject, ENDED_IN_SILENCE)
    _meet()


def _meet() -> None:
    """Wait for all processes, between the hosts' memories: no GPU is needed."""
    met: Tensor = torch.zeros(1)
    dist.all_reduce(met)


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
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
