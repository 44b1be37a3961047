"""Whole training runs of the embedded model in fp8, as torchrun starts them on all GPUs, one for each sharding mode:
what their records say.

They are started before the first check, because a run is two starts of Python one after the other and little else.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_fp8.tools.verify.processes import Ended, Started, shown
from llm_fp8.tools.verify.result import Problems, Result
from llm_fp8.tools.verify.setup import Setup
from llm_fp8.utils.subprocesses import torchrun

TIMEOUT_S = 240.0
NUM_STEPS = 6
"""On several GPUs the fifth step is recorded with torch's profiler."""
OPTIONS = (
    *("--use_te", "--mixed_precision", "fp8", "--fp8_strict", "--max_steps", str(NUM_STEPS), "--max_seq_length", "256"),
    *(
        "--batch_size",
        "4",
        "--num_of_samples",
        "500",
        "--validation_fraction",
        "0",
        "--eval_batches",
        "1",
        "--no_export",
        "--log_every",
        "1",
    ),
)
RECIPE_CLASS = "DelayedScaling"
"""Of the default recipe."""


@dataclass(frozen=True)
class ShardedRun:
    """A run that has ended."""

    mode: str
    command: list[str]
    ended: Ended
    summary: dict[str, Any] | None = None
    losses: list[float] = field(default_factory=list)


def judge_one(run: ShardedRun, problems: Problems) -> str:
    """Judge a run; its line for the details."""
    command = shown(run.command)
    certificate = (run.summary or {}).get("certificate") or {}
    if certificate.get("verdict") == "failed":
        problems.fail(f"{run.mode}: the run's certificate failed: {'; '.join(certificate['reasons'])}", command)
        return f"{run.mode}: exit code {run.ended.code}"
    if run.summary is None or run.ended.code != 0:
        problems.fail(f"{run.mode}: the run failed: {run.ended.why()}", command)
        return f"{run.mode}: losses {run.losses}; its last words:\n    " + "\n    ".join(run.ended.evidence)
    if not run.losses or not all(math.isfinite(loss) for loss in run.losses):
        problems.fail(f"{run.mode}: losses {run.losses}", command)
    elif not run.losses[-1] < run.losses[0]:
        problems.fail(f"{run.mode}: the loss does not fall ({run.losses})", command)
    if run.summary.get("sharding_mode") != run.mode:
        problems.fail(f"{run.mode}: the run was {run.summary.get('sharding_mode')}", command)
    inside = run.summary.get("recipe_inside_modules")
    if inside != RECIPE_CLASS:
        problems.fail(f"{run.mode}: inside the modules the recipe is {inside}, not {RECIPE_CLASS}", command)
    kernels = (run.summary.get("recorded_step") or {}).get("gemm_kernels")
    if kernels is not None and not kernels.get("fp8"):
        problems.fail(f"{run.mode}: no fp8 GEMM kernel ran in the recorded step ({kernels})", command)
    if certificate.get("verdict") == "undetermined":
        problems.warn(f"{run.mode}: the run could not be certified: {'; '.join(certificate['reasons'])}", command)
    if run.summary.get("attention_backend") == "unfused":
        problems.warn(f"{run.mode}: attention ran unfused", "python scripts/verify_fp8.py --only attention,cudnn")
    losses = f"loss {run.losses[0]:.2f} to {run.losses[-1]:.2f}" if run.losses else "no loss"
    verdict = f", {certificate['verdict']}" if certificate else ""
    ran = f", GEMM kernels {kernels}" if kernels else ""
    return f"{run.mode}: {losses}, recipe inside {inside}{verdict}, {run.ended.wall_s:.0f} s{ran}"


def judge(runs: list[ShardedRun], left_out: dict[str, str], num_gpus: int) -> Result:
    """All runs; `left_out`: mode -> why it was not tried."""
    problems = Problems()
    details = [judge_one(run, problems) for run in runs] + [
        f"{mode} not tried: {reason}" for mode, reason in left_out.items()
    ]
    facts = {run.mode: {**run.ended.facts, "losses": run.losses} for run in runs}
    modes = ", ".join(run.mode for run in runs)
    if not runs:
        return Result("info", "no sharding mode could be tried", tuple(details), facts=facts)
    return problems.result("" if problems.failures else f"{modes} train in fp8 on {num_gpus} GPU(s)", details, facts)


def read_losses(metrics: Path) -> list[float]:
    """The loss of each recorded step; a line that was being written when the run was killed is none."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [float(record["loss"]) for record in records if "loss" in record]


class ShardedRuns:
    """The runs of several modes under way: side by side on one GPU, on several one after another, since exchanges
    slow each other.
    """

    def __init__(self, modes: Sequence[str], scratch: Path, num_gpus: int, options: tuple[str, ...] = OPTIONS) -> None:
        self._scratch, self._num_gpus, self._options = scratch, num_gpus, options
        self._lock, self._killed = threading.Lock(), False
        self._started: list[Started] = []
        self._pool = ThreadPoolExecutor(max_workers=len(modes) if num_gpus == 1 else 1)
        self._runs = [self._pool.submit(self._run, mode) for mode in modes]

    def _run(self, mode: str) -> ShardedRun:
        folder = self._scratch / f"run-{mode}"
        words = ("train_multi_gpu.py", *self._options, "--sharding_mode", mode, "--output_dir")
        command = torchrun(self._num_gpus, *words, str(folder))
        with self._lock:
            if self._killed:
                raise CancelledError
            # One thread per process, as torchrun sets it where there are several: they share the cores with the other
            # checks.
            environ = {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
            process = Started(command, self._scratch / f"run-{mode}.log", environ)
            self._started.append(process)
        ended = process.wait(TIMEOUT_S)
        summary = folder / "summary.json"
        return ShardedRun(
            mode,
            torchrun(self._num_gpus, *words, f"runs/verify-{mode}"),  # the folder it used is removed with the check's
            ended,
            json.loads(summary.read_text()) if summary.exists() else None,
            read_losses(folder / "metrics.jsonl"),
        )

    def wait(self) -> list[ShardedRun]:
        """All of them, ended."""
        return [run.result() for run in self._runs]

    def kill(self) -> None:
        """End those under way and start no other."""
        with self._lock:
            self._killed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._started:
            process.kill()


def left_out(modes: Sequence[str]) -> dict[str, str]:
    """Mode -> why it cannot be tried."""
    from llm_fp8.utils.packages import package_version

    if package_version("deepspeed") is not None:
        return {}
    reason = "deepspeed is not installed (pip install -r requirements-deepspeed.txt)"
    return {mode: reason for mode in modes if mode.startswith("deepspeed")}


def start(setup: Setup) -> ShardedRuns | None:
    """The modes of --engines that can be tried, under way; None where there are none."""
    modes = [mode for mode in setup.engines if mode not in left_out(setup.engines)]
    return ShardedRuns(modes, setup.scratch, setup.num_gpus) if modes else None


def check(setup: Setup) -> Result:
    """Wait for the runs that were started before the first check."""
    runs = setup.engine_runs.wait() if setup.engine_runs is not None else []
    return judge(runs, left_out(setup.engines), setup.num_gpus)
