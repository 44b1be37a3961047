"""Measurements in processes of their own, so that nothing of a variant outlives it: compiled code, Transformer Engine's
globals, memory. Also the options that the programs that measure share.

    answer = measure_apart("Llama-3.2-1B:8x1024x4", "delayed", num_gpus=1, num_steps=8, warmup=3, timeout_s=300)

An answer is what `measure.measure` returns (of a launch, its row), with step_times_s, the `header` and "failed": None;
where it was not measured, "failed" is the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_fp8.observability.provenance import recorded_command
from llm_fp8.utils.cuda_environment import CUDA_DEFAULTS
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.json_files import read_json, require_writable
from llm_fp8.utils.packages import REPOSITORY
from llm_fp8.utils.subprocesses import torchrun

ALONE = "llm_fp8.tools.bench.measure"
LAUNCH = "llm_fp8.tools.bench.launch"
"""The programs that measure: in one process, and in those of a launch."""
STOPPED = "stopped from outside"
ENDED_IN_SILENCE = "a process ended without saying why: killed, or a fault in native code"
LAUNCH_S = 120
"""How long a launch may take to start and to end, beside its measurement."""
POLL_S = 0.5
"""How often a measurement looks whether it is to be stopped."""
END_S = 30
"""How long a program may take to end itself."""


def measure_apart(
    workload: str,
    variant: str,
    num_gpus: int,
    num_steps: int,
    warmup: int,
    timeout_s: float,
    variables: Mapping[str, str | None] | None = None,
    stopped: threading.Event | None = None,
) -> dict[str, Any]:
    """Measure `variant` on `workload` (both by name) and return the answer; raises nothing for what goes wrong there.

    Args:
        num_gpus: of this host. One is measured in a process without a launcher, several under torchrun.
        variables: environment variables of the processes, in place of this process's; None removes one.
        stopped: ends the measurement when it is set.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.json"
        if num_gpus == 1:
            words = [sys.executable, "-m", ALONE, workload, variant, str(num_steps), str(warmup), str(path)]
            failed = _run(words, variables, timeout_s, stopped)
            if not path.exists():
                return {"failed": failed or f"{ENDED_IN_SILENCE} (exit code 0)"}
            answer = read_json(path)
            if "step_times_s_by_rank" in answer:
                (answer["step_times_s"],) = answer.pop("step_times_s_by_rank")
            return answer
        measured = ["--workloads", workload, "--arms", variant, "--steps", str(num_steps), "--warmup", str(warmup)]
        words = [LAUNCH, *measured, "--arm_timeout_s", str(timeout_s), "--output", str(path)]
        # The launch keeps the limit itself, with a row that says so; this one is for a launch that hangs outside it.
        failed = _run(torchrun(num_gpus, "-m", *words), variables, timeout_s + LAUNCH_S, stopped)
        record = read_json(path) if path.exists() else {"rows": []}
        rows = record.pop("rows")
        if not rows:
            return {"failed": failed or ENDED_IN_SILENCE}
        return {"failed": None, "header": {name: record[name] for name in ("provenance", "peaks")}, **rows[0]}


def take_header(answer: dict[str, Any], argv: list[str]) -> dict[str, Any]:
    """Remove and return the header of an answer, `argv` (the caller's `sys.argv`) its command; empty without one."""
    header: dict[str, Any] = answer.pop("header", {})
    if header:
        header["provenance"]["command"] = recorded_command(argv)
    return header


def _environment(variables: Mapping[str, str | None] | None) -> dict[str, str]:
    # A launcher's variables would change the baselines: ACCELERATE_FP8_BACKEND alone converts a bf16 model.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    changed = {**inherited, **(variables or {})}
    environment = {**CUDA_DEFAULTS, **{name: value for name, value in changed.items() if value is not None}}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")]))
    return environment


def _run(
    command: list[str], variables: Mapping[str, str | None] | None, timeout_s: float, stopped: threading.Event | None
) -> str | None:
    """Run a program, its output on standard error; returns why it failed, None where it succeeded."""
    process = subprocess.Popen(
        command,
        env=_environment(variables),
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,  # so that os.killpg reaches what it starts
    )
    deadline = time.monotonic() + timeout_s
    try:
        while (left := deadline - time.monotonic()) > 0:
            if stopped is not None and stopped.is_set():
                return STOPPED
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(min(left, POLL_S))
                return f"{ENDED_IN_SILENCE} (exit code {code})" if code else None
        return f"took longer than {timeout_s:g} s"
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun passes it on to its processes, which are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
            process.wait()


# --- options of the programs that measure ---


def split_names(text: str, flag: str) -> list[str]:
    """The names of a comma-separated list; raises `UserError`, which names `flag`, for one that is there twice."""
    names = text.split(",")
    if doubled := [name for number, name in enumerate(names) if name in names[:number]]:
        raise UserError(f"{flag} names {doubled[0]} twice.")
    return names


def add_workload_options(parser: argparse.ArgumentParser, variants: str, program: str) -> None:
    """--workloads and --arms (default `variants`), which the docstring of `program` explains."""
    parser.add_argument(
        "--workloads",
        default="Llama-3.2-1B:8x1024x4",
        help="comma-separated MODEL:ROWSxLENGTHxMICRO_BATCHES (default %(default)s)",
    )
    what = f"comma-separated, see the head of {program} (default %(default)s)"
    parser.add_argument("--arms", default=variants, help=what)


def add_measuring_options(
    parser: argparse.ArgumentParser,
    *,
    steps: int,
    warmup: int,
    arm_timeout_s: float,
    rounds: int | None = None,
    output_required: bool = True,
    resumable: bool = False,
) -> None:
    """Without `rounds` each variant is measured once. `resumable`: the file is written after every measurement."""
    for flag, kind, default, what in (
        ("--steps", int, steps, "optimizer steps of a measurement, the left-out ones included"),
        ("--warmup", int, warmup, "first steps of a measurement, left out"),
        ("--rounds", int, rounds, "how often the variants take turns"),
        ("--arm_timeout_s", float, arm_timeout_s, "a measurement that takes longer has failed"),
    ):
        if default is not None:
            parser.add_argument(flag, type=kind, default=default, help=f"{what} (default %(default)s)")
    parser.add_argument("--output", type=Path, required=output_required, help="JSON file for the results")
    if resumable:
        parser.add_argument(
            "--resume",
            action="store_true",
            help="keep what --output holds and measure the rounds and variants that it lacks, or that failed; same "
            "code, packages and kind of GPU only",
        )


def check_measuring_options(options: argparse.Namespace, recorded_step: int = 0) -> None:
    """Raise `UserError` on values that measure nothing, or where nothing can be written.

    `recorded_step`: the step whose kernels are recorded, which must be a warm-up step.
    """
    warmup, limit_s = options.warmup, options.arm_timeout_s
    for mistaken, why in (
        (
            not 0 <= warmup < options.steps,
            f"--warmup {warmup} must leave some of the {options.steps} --steps to be timed.",
        ),
        (
            recorded_step and warmup <= recorded_step,
            f"--warmup {warmup} must be more than {recorded_step}, the step whose kernels are recorded.",
        ),
        (
            "rounds" in options and options.rounds < 1,
            f"--rounds {getattr(options, 'rounds', 0)} measures nothing; give 1 or more.",
        ),
        (not limit_s > 0, f"--arm_timeout_s {limit_s:g} leaves no time to measure in; give seconds, more than 0."),
        (
            options.output is None and getattr(options, "resume", False),
            "--resume goes on from the file of --output, and none is named.",
        ),
    ):
        if mistaken:
            raise UserError(why)
    if options.output is not None:
        require_writable("--output", options.output)
