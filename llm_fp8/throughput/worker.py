"""One measurement in processes of its own, so that nothing of an arm outlives it: compiled code, Transformer Engine's globals, memory.

    answer = measure_apart("Llama-3.2-1B:8x1024x4", "delayed", num_gpus=1, num_steps=8, warmup=3, timeout_s=300)
    answer = measure_apart("Llama-3.1-8B:8x1024x4", "fsdp_full:delayed", num_gpus=4, num_steps=8, warmup=3, timeout_s=300)

A measurement's processes import for seconds before they touch the GPU. With `next_variables` others do that meanwhile, and the next measurement
with these variables, on as many GPUs, has them (llm_fp8/throughput/waiting.py).

An answer is what `llm_fp8.throughput.measure.measure` returns, its step times under step_times_s (of a launch, the row of
scripts/benchmark_multi_gpu.py), with its `header` and "failed": None; where it was not measured, "failed" is the reason.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_fp8.json_files import read_json
from llm_fp8.provenance import REPOSITORY, recorded_command
from llm_fp8.throughput.results import ENDED_IN_SILENCE
from llm_fp8.throughput.waiting import dismiss_prepared, take_program

ALONE = REPOSITORY / "llm_fp8" / "throughput" / "alone.py"
SEVERAL = REPOSITORY / "scripts" / "benchmark_multi_gpu.py"
"""The scripts that measure: in one process, and in those of a launch."""

STOPPED = "stopped from outside"
LAUNCH_S = 120
"""How long a launch may take to start and to end, beside its measurement."""
LOOK_S = 0.5
"""How often it is looked whether a measurement is to be stopped."""
END_S = 30
"""How long a program may take to end itself."""


def measure_apart(
    workload: str,
    arm: str,
    num_gpus: int,
    num_steps: int,
    warmup: int,
    timeout_s: float,
    variables: Mapping[str, str | None] | None = None,
    stopped: threading.Event | None = None,
    next_variables: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """Measure `arm` on `workload` (both by name) and return the answer; raises nothing for what goes wrong over there.

    `num_gpus`: of this host; one is measured in a process without a launcher, several in a launch of scripts/benchmark_multi_gpu.py. `variables`: of
    the processes' environment, in place of this one's; None takes one out. `stopped`: ends the measurement when it is set. `next_variables`:
    those of the measurement that is to follow on as many GPUs; None where none is.
    """
    follows = next_variables is not None and not (stopped is not None and stopped.is_set())  # none is prepared when it is to end
    next_environment = _environment(next_variables) if follows else None
    program = take_program(_environment(variables), None if num_gpus == 1 else num_gpus, next_environment)
    with program.folder as folder:
        path = Path(folder) / "answer.json"
        if num_gpus == 1:
            program.begin([str(ALONE), workload, arm, str(num_steps), str(warmup), str(path)])
            return _answer_of_process(path, _outcome(program.process, timeout_s, stopped))
        words = [str(SEVERAL), "--workloads", workload, "--arms", arm, "--steps", str(num_steps), "--warmup", str(warmup)]
        program.begin([*words, "--arm_timeout_s", str(timeout_s), "--output", str(path)])
        # The launch keeps the limit itself, with a row that says so; this one is for a launch that hangs before or after.
        return _answer_of_launch(path, _outcome(program.process, timeout_s + LAUNCH_S, stopped))


def _answer_of_process(path: Path, failed: str | None) -> dict[str, Any]:
    if not path.exists():
        return {"failed": failed or f"{ENDED_IN_SILENCE} (exit code 0)"}
    answer = read_json(path)
    if "step_times_s_by_rank" in answer:
        (answer["step_times_s"],) = answer.pop("step_times_s_by_rank")
    return answer


def _answer_of_launch(path: Path, failed: str | None) -> dict[str, Any]:
    record = read_json(path) if path.exists() else {"rows": []}
    rows = record.pop("rows")
    if not rows:
        return {"failed": failed or ENDED_IN_SILENCE}
    origin = {name: record[name] for name in ("provenance", "peaks")}
    return {"failed": None, "header": origin, **rows[0]}


def take_header(answer: dict[str, Any], argv: list[str]) -> dict[str, Any]:
    """Take the header out of an answer; empty where the measurement ended before it could write one.

    Its command becomes `argv`, the command line (`sys.argv`) of the program that asked for the measurement: the one to repeat.
    """
    header: dict[str, Any] = answer.pop("header", {})
    if header:
        header["provenance"]["command"] = recorded_command(argv)
    return header


def _environment(variables: Mapping[str, str | None] | None) -> dict[str, str]:
    """This process's environment for a measurement, with `variables` in place of its own."""
    # What a launcher left for Accelerate would change the rivals: ACCELERATE_FP8_BACKEND alone converts a bf16 model.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    for name, value in (variables or {}).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # for every arm, as in the training scripts
    return environment


def _outcome(process: subprocess.Popen[bytes], timeout_s: float, stopped: threading.Event | None) -> str | None:
    """Wait for a program's end; returns why it did not come to a good one, None where it did. Where it is stopped, so are those that wait."""
    deadline = time.monotonic() + timeout_s
    try:
        while (left := deadline - time.monotonic()) > 0:
            if stopped is not None and stopped.is_set():
                dismiss_prepared()
                return STOPPED
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(left if stopped is None else min(left, LOOK_S))
                return f"{ENDED_IN_SILENCE} (exit code {code})" if code else None
        return f"took longer than {timeout_s:g} s"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program that still runs, with the processes that it started."""
    if process.poll() is not None:
        return
    process.terminate()  # torchrun passes it on to its processes, which are in sessions of their own
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
    process.wait()
