"""Whole training runs of the embedded model in fp8, as torchrun starts them on all GPUs, one for each sharding mode: what their records say."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_fp8.verify.processes import Ended, Started, shown, torchrun
from llm_fp8.verify.result import Problems, Result
from llm_fp8.verify.setup import Setup

TIMEOUT_S = 240.0
NUM_STEPS = 6
"""On several GPUs the fifth step is recorded with torch's profiler."""
OPTIONS = (
    *("--use_te", "--mixed_precision", "fp8", "--fp8_strict", "--max_steps", str(NUM_STEPS), "--max_seq_length", "256"),
    *("--batch_size", "4", "--num_of_samples", "500", "--validation_fraction", "0", "--no_export", "--log_every", "1"),
)
RECIPE_CLASS = "DelayedScaling"
"""Of the default recipe."""


@dataclass(frozen=True)
class EngineRun:
    """A run that has ended."""

    mode: str
    command: list[str]
    ended: Ended
    summary: dict[str, Any] | None = None
    losses: list[float] = field(default_factory=list)


def judge_one(run: EngineRun, problems: Problems) -> str:
    """Judge a run; its line for the details."""
    command = shown(run.command)
    certificate = (run.summary or {}).get("certificate") or {}
    if certificate.get("verdict") == "failed":
        problems.fail(f"{run.mode}: the run's certificate failed: {'; '.join(certificate['reasons'])}", command)
        return f"{run.mode}: exit code {run.ended.code}"
    if run.summary is None or run.ended.code != 0:
        problems.fail(f"{run.mode}: the run failed: {run.ended.why()}", command)
        return f"{run.mode}: " + " | ".join(run.ended.tail[-3:])
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


def judge(runs: list[EngineRun], left_out: dict[str, str], num_gpus: int) -> Result:
    """All runs; `left_out`: mode -> why it was not tried."""
    problems = Problems()
    details = [judge_one(run, problems) for run in runs] + [f"{mode} not tried: {reason}" for mode, reason in left_out.items()]
    facts = {run.mode: {"exit_code": run.ended.code, "losses": run.losses, "wall_s": run.ended.wall_s} for run in runs}
    modes = ", ".join(run.mode for run in runs)
    if not runs:
        return Result("info", "no sharding mode could be tried", tuple(details), facts=facts)
    return problems.result("" if problems.failures else f"{modes} train in fp8 on {num_gpus} GPU(s)", details, facts)


def start(setup: Setup, mode: str, num_processes: int, options: tuple[str, ...] = OPTIONS) -> tuple[list[str], Path, Started]:
    """Start the run of a mode; its command, its folder, its process."""
    folder = setup.scratch / f"run-{mode}"
    words = ("train_multi_gpu.py", *options, "--sharding_mode", mode, "--output_dir", str(folder))
    command = torchrun(num_processes, *words)
    environ = {"WANDB_MODE": "disabled"}
    return command, folder, Started(command, setup.scratch / f"run-{mode}.log", environ)


def finish(mode: str, command: list[str], folder: Path, process: Started) -> EngineRun:
    """Wait for it and read its records."""
    ended = process.wait(TIMEOUT_S)
    shown_command = [*command[:-1], f"runs/verify-{mode}"]  # the folder it used is removed with the check's
    summary, metrics = folder / "summary.json", folder / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    losses = [float(record["loss"]) for record in records if "loss" in record]
    return EngineRun(mode, shown_command, ended, json.loads(summary.read_text()) if summary.exists() else None, losses)


def check(setup: Setup) -> Result:
    """Each mode of --engines; on one GPU side by side, on several one after the other, since exchanges of several runs slow each other."""
    from llm_fp8.provenance import package_version

    left_out = {}
    if package_version("deepspeed") is None:
        reason = "deepspeed is not installed (pip install -r requirements-deepspeed.txt)"
        left_out = {mode: reason for mode in setup.engines if mode.startswith("deepspeed")}
    modes = [mode for mode in setup.engines if mode not in left_out]
    if setup.num_gpus == 1:
        started = [(mode, *start(setup, mode, 1)) for mode in modes]
        try:
            runs = [finish(*run) for run in started]
        finally:
            for *_, process in started:
                process.kill()
    else:
        runs = [finish(mode, *start(setup, mode, setup.num_gpus)) for mode in modes]
    return judge(runs, left_out, setup.num_gpus)
