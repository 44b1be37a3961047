"""What runs under torchrun on all GPUs: whole training runs in fp8, one per sharding mode, and collectives.

    torchrun --nproc_per_node=8 -m llm_fp8.tools.verify.distributed RESULT.json [MEBIBYTES]

checks and times all-reduce and all-gather (NCCL on GPUs, gloo on CPUs). Bus bandwidth as NVIDIA's nccl-tests define it,
which compares with the links' own figure for any number n of processes: bytes of the whole buffer over time, times
2 (n - 1) / n for all-reduce and (n - 1) / n for all-gather.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_fp8.tools.verify.processes import Ended, Started, shown, start_probe
from llm_fp8.tools.verify.result import Problems, Result, Setup
from llm_fp8.utils.json_files import read_json, write_json_atomic
from llm_fp8.utils.packages import DEEPSPEED_REQUIREMENTS, VERIFY, package_version
from llm_fp8.utils.subprocesses import torchrun

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RUN_TIMEOUT_S = 240.0
NCCL_TIMEOUT_S = 120.0
NUM_REPEATS = 10
NUM_STEPS = 6
"""On several GPUs the fifth step is recorded with torch's profiler."""
OPTIONS = (
    *("--use_te", "--mixed_precision", "fp8", "--fp8_strict", "--max_steps", str(NUM_STEPS), "--max_seq_length", "256"),
    *("--batch_size", "4", "--num_of_samples", "500", "--validation_fraction", "0", "--eval_batches", "1"),
    *("--no_export", "--log_every", "1"),
)
RECIPE_CLASS = "DelayedScaling"
"""Of the default recipe."""


# --- training runs of the embedded model -----------------------------------------------------------------------


@dataclass(frozen=True)
class ShardedRun:
    """A run that has ended, and its records."""

    mode: str
    command: list[str]
    ended: Ended
    summary: dict[str, Any] | None
    losses: list[float]


def judge_run(run: ShardedRun, problems: Problems) -> str:
    """Judge a run; its line for the details."""
    mode, command, losses, summary = run.mode, shown(run.command), run.losses, run.summary or {}
    certificate = summary.get("certificate") or {}
    if certificate.get("verdict") == "failed":
        problems.fail(f"{mode}: the run's certificate failed: {'; '.join(certificate['reasons'])}", command)
        return f"{mode}: exit code {run.ended.code}"
    if run.summary is None or run.ended.code != 0:
        problems.fail(f"{mode}: the run failed: {run.ended.why()}", command)
        return f"{mode}: losses {losses}; its last output:\n    " + "\n    ".join(run.ended.evidence)
    inside = summary.get("recipe_inside_modules")
    kernels = (summary.get("recorded_step") or {}).get("gemm_kernels")
    if not losses or not all(map(math.isfinite, losses)):
        problems.fail(f"{mode}: losses {losses}", command)
    elif not losses[-1] < losses[0]:
        problems.fail(f"{mode}: the loss does not fall ({losses})", command)
    if summary.get("sharding_mode") != mode:
        problems.fail(f"{mode}: the run was {summary.get('sharding_mode')}", command)
    if inside != RECIPE_CLASS:
        problems.fail(f"{mode}: inside the modules the recipe is {inside}, not {RECIPE_CLASS}", command)
    if kernels is not None and not kernels.get("fp8"):
        problems.fail(f"{mode}: no fp8 GEMM kernel ran in the recorded step ({kernels})", command)
    if certificate.get("verdict") == "undetermined":
        problems.warn(f"{mode}: the run could not be certified: {'; '.join(certificate['reasons'])}", command)
    if summary.get("attention_backend") == "unfused":
        problems.warn(f"{mode}: attention ran unfused", f"{VERIFY} --only attention,cudnn")
    loss = f"loss {losses[0]:.2f} to {losses[-1]:.2f}" if losses else "no loss"
    verdict = f", {certificate['verdict']}" if certificate else ""
    ran = f", GEMM kernels {kernels}" if kernels else ""
    return f"{mode}: {loss}, recipe inside {inside}{verdict}, {run.ended.wall_s:.0f} s{ran}"


def judge_engines(runs: list[ShardedRun], left_out: dict[str, str], num_gpus: int) -> Result:
    """All runs; `left_out`: mode -> why it was not tried."""
    problems = Problems()
    details = [judge_run(run, problems) for run in runs]
    details += [f"{mode} not tried: {reason}" for mode, reason in left_out.items()]
    if not runs:
        return Result("info", "no sharding mode could be tried", tuple(details))
    facts = {run.mode: {**run.ended.facts, "losses": run.losses} for run in runs}
    success = f"{', '.join(run.mode for run in runs)} train in fp8 on {num_gpus} GPU(s)"
    return problems.result("" if problems.failures else success, details, facts)


def read_losses(metrics: Path) -> list[float]:
    """The loss of each recorded step; without the line that was being written when the run was killed."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [float(record["loss"]) for record in records if "loss" in record]


def modes_left_out(setup: Setup) -> dict[str, str]:
    """Mode of --engines -> why it cannot be tried."""
    if package_version("deepspeed") is not None:
        return {}
    reason = f"deepspeed is not installed (pip install -r {DEEPSPEED_REQUIREMENTS})"
    return {mode: reason for mode in setup.engines if mode.startswith("deepspeed")}


def _start_run(setup: Setup, mode: str) -> Started:
    # One thread per process, as torchrun sets it where there are several: they share the cores with the other checks.
    environ = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    folder = setup.scratch / f"run-{mode}"
    words = ("train_multi_gpu.py", *OPTIONS, "--sharding_mode", mode, "--output_dir", str(folder))
    process = Started(torchrun(setup.num_gpus, *words), folder.with_suffix(".log"), environ)
    setup.processes[folder.name] = process
    return process


def start(setup: Setup, checks: Collection[str]) -> None:
    """Start the runs of `engines`: on one GPU all, because most of a run is the start of Python; on several the first,
    because their communication would slow each other.
    """
    modes = [mode for mode in setup.engines if mode not in modes_left_out(setup)] if "engines" in checks else []
    for mode in modes if setup.num_gpus == 1 else modes[:1]:
        _start_run(setup, mode)


def finish_run(setup: Setup, mode: str) -> ShardedRun:
    """Wait for the run of a mode, started now if it was not before the first check."""
    process = setup.processes.get(f"run-{mode}") or _start_run(setup, mode)
    ended, folder = process.wait(RUN_TIMEOUT_S), setup.scratch / f"run-{mode}"
    summary = read_json(folder / "summary.json") if (folder / "summary.json").exists() else None
    command = [*process.command[:-1], f"runs/verify-{mode}"]  # the folder that it used is removed
    return ShardedRun(mode, command, ended, summary, read_losses(folder / "metrics.jsonl"))


def check_engines(setup: Setup) -> Result:
    left_out = modes_left_out(setup)
    runs = [finish_run(setup, mode) for mode in setup.engines if mode not in left_out]
    return judge_engines(runs, left_out, setup.num_gpus)


# --- collectives -----------------------------------------------------------------------------------------------


def judge_nccl(ended: Ended, seen: dict[str, Any] | None, command: list[str]) -> Result:
    """A wrong result or a failure fails; GPUs without peer access are a warning. Bandwidth is not judged: links
    differ.
    """
    problems, facts, debug = Problems(), {"seen": seen, **ended.facts}, f"NCCL_DEBUG=WARN {shown(command)}"
    if seen is None:
        no_multicast = f"NCCL_NVLS_ENABLE=0 {shown(command)}   # without NVLink multicast"
        problems.fail(f"all-reduce and all-gather failed: {ended.why()}", debug, no_multicast)
        return problems.result("", ended.evidence, facts)
    for name, call in (("all_reduce", "all-reduce"), ("all_gather", "all-gather")):
        if not seen[f"{name}_right"]:
            summary = f"{call} over {seen['world_size']} GPUs gives a wrong result"
            problems.fail(summary, debug, f"NCCL_P2P_DISABLE=1 {shown(command)}")
    if seen.get("without_peer_access"):
        blocked = ", ".join(map(str, seen["without_peer_access"]))
        problems.warn(
            f"GPU 0 cannot access the memory of GPU {blocked} directly, so they communicate through the host",
            "nvidia-smi topo -m",
        )
    summary = (
        f"{seen['world_size']} processes, {seen['backend']}: all-reduce {seen['all_reduce_gb_s']:,.0f} GB/s, "
        f"all-gather {seen['all_gather_gb_s']:,.0f} GB/s (bus bandwidth, {seen['buffer_mib']} MiB)"
    )
    return problems.result(summary, facts=facts)


def check_nccl(setup: Setup, num_processes: int | None = None, mebibytes: int = 256) -> Result:
    command = torchrun(num_processes or setup.num_gpus, "-m", "llm_fp8.tools.verify.distributed")
    process = setup.processes["nccl"] = start_probe("nccl", setup.scratch, command[1:], str(mebibytes))
    ended, seen = process.findings(NCCL_TIMEOUT_S)
    return judge_nccl(ended, seen if ended.code == 0 else None, [*command, "nccl.json"])


def pattern(rank: int, size: int, device: torch.device) -> Tensor:
    """fp32 [size], whole numbers that differ by place and rank and whose sums over ranks are exact."""
    import torch

    return (torch.arange(size, device=device) % 251 + rank).float()


def time_and_compare(result: Path, mebibytes: int) -> None:
    """In each process: run the collectives, compare with what they must give, time them; the first process writes."""
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = mebibytes * 2**20 // 4 // world_size * world_size
    part = size // world_size

    def median_s(collective: Callable[[], object]) -> float:
        wait: Callable[[], object] = torch.cuda.synchronize if on_gpu else lambda: None
        times = []
        for _ in range(NUM_REPEATS + 2):
            wait()
            dist.barrier()
            wait()
            began = time.perf_counter()
            collective()
            wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times[2:])

    reduced = pattern(rank, size, device)
    dist.all_reduce(reduced)
    reduce_right = torch.equal(reduced, pattern(0, size, device) * world_size + sum(range(world_size)))
    gathered, own = torch.empty(size, device=device), pattern(rank, part, device)
    dist.all_gather_into_tensor(gathered, own)
    gather_right = torch.equal(gathered, torch.cat([pattern(other, part, device) for other in range(world_size)]))
    right = torch.tensor([reduce_right, gather_right], dtype=torch.int32, device=device)
    dist.all_reduce(right, dist.ReduceOp.MIN)
    times_s = [
        median_s(lambda: dist.all_reduce(reduced)),
        median_s(lambda: dist.all_gather_into_tensor(gathered, own)),
    ]
    slowest_s = torch.tensor(times_s, dtype=torch.float32, device=device)
    dist.all_reduce(slowest_s, dist.ReduceOp.MAX)
    if rank == 0:
        gb_per_process = (world_size - 1) / world_size * size * 4 / 1e9
        record = {
            "world_size": world_size,
            "backend": dist.get_backend(),
            "all_reduce_right": bool(right[0]),
            "all_gather_right": bool(right[1]),
            "all_reduce_gb_s": 2 * gb_per_process / float(slowest_s[0]),
            "all_gather_gb_s": gb_per_process / float(slowest_s[1]),
            "buffer_mib": mebibytes,
        }
        if on_gpu:
            others = [other for other in range(world_size) if other != local_rank]
            blocked = [other for other in others if not torch.cuda.can_device_access_peer(local_rank, other)]
            nccl_version = ".".join(map(str, torch.cuda.nccl.version()))
            record |= {"without_peer_access": blocked, "nccl_version": nccl_version}
        write_json_atomic(result, record)
    dist.destroy_process_group()


if __name__ == "__main__":
    time_and_compare(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 256)
