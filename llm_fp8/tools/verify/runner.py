"""Runs the checks. One that crashes or does not end is a failed check with its error, and the others go on."""

from __future__ import annotations

import importlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from llm_fp8.tools.verify.result import Result
from llm_fp8.tools.verify.setup import Setup
from llm_fp8.utils.errors import UserError

WHO_HAS_THE_MEMORY = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"

Answer = TypeVar("Answer")


_THREAD = "verify"


class NoEnd(Exception):
    """Something was given up. The message says after how long; `stack`: where it was, as a traceback's lines."""

    def __init__(self, limit_s: float, stack: list[str]) -> None:
        super().__init__(f"did not end within {limit_s:.0f} s")
        self.stack = tuple(stack)


def within(limit_s: float | None, function: Callable[[], Answer]) -> Answer:
    """What `function` returns or raises; `NoEnd` after `limit_s`. It then hangs on in a thread of its own, which
    ends with the program.
    """
    if limit_s is None:
        return function()
    answers: list[Answer] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True, name=_THREAD)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        frame = sys._current_frames().get(thread.ident or 0)
        raise NoEnd(limit_s, "".join(traceback.format_stack(frame)).splitlines() if frame else [])
    if errors:
        raise errors[0]
    return answers[0]


def is_hanging() -> bool:
    """Whether something that was given up, or that a signal interrupted, is still at work."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


@dataclass(frozen=True)
class Row:
    """A check with its answer."""

    check: Check
    result: Result
    wall_s: float


def not_run(check: Check, num_gpus: int) -> str | None:
    """Why a check cannot or need not run with so many GPUs; None where it runs."""
    if check.only_without_gpu:
        return "the checks on the GPU take its place" if num_gpus else None
    if num_gpus >= check.needs_gpus:
        return None
    return (
        "needs an NVIDIA GPU"
        if check.needs_gpus == 1
        else f"needs {check.needs_gpus} GPUs, this machine has {num_gpus}"
    )


def crashed(check: Check, error: BaseException) -> Result:
    """The answer of a check that raised `error`."""
    again = (
        f"python scripts/verify_fp8.py --only {check.name} --json verify.json   # the whole error is in the "
        "file's details"
    )
    if isinstance(error, NoEnd):
        return Result(
            "failed",
            f"the check {error}",
            error.stack,
            (again, "nvidia-smi   # whether the driver answers, and who uses the GPU"),
        )
    if isinstance(error, UserError):
        return Result("failed", str(error), mends=(again,))
    if type(error).__name__ == "OutOfMemoryError":
        return Result(
            "failed", "the GPU's memory is taken, so this could not be checked", mends=(WHO_HAS_THE_MEMORY, again)
        )
    first_line = (str(error).strip().splitlines() or [""])[0]
    lines = tuple("".join(traceback.format_exception(error)).splitlines())
    return Result("failed", f"the check itself crashed: {type(error).__name__}: {first_line}", lines, (again,))


def run_checks(
    checks: Iterable[Check], setup: Setup, num_gpus: int, before: Callable[[Check], None] = lambda check: None
) -> Iterator[Row]:
    """Every check's answer, in order. Those that need more GPUs than there are, or none, are skipped."""
    for check in checks:
        reason = not_run(check, num_gpus)
        if reason is not None:
            yield Row(check, Result("skipped", reason), 0.0)
            continue
        before(check)
        began = time.perf_counter()
        try:
            result = within(check.limit_s, lambda check=check: check.load()(setup))  # type: ignore[misc]
        except Exception as error:
            result = crashed(check, error)
        yield Row(check, result, time.perf_counter() - began)


# --- registry --------------------------------------------------------------------------------------------
# The checks, in the order in which they run.


@dataclass(frozen=True)
class Check:
    """One check: the function `check` of the module of its name."""

    name: str
    title: str
    """What it looks at, for the table."""
    needs_gpus: int = 0
    quick: bool = True
    """Whether --quick runs it too."""
    only_without_gpu: bool = False
    limit_s: float | None = 120.0
    """After which it is given up; None where it waits for processes that have limits of their own."""

    def load(self) -> Callable[[Setup], Result]:
        """Its function; raises what importing it raises."""
        function: Callable[[Setup], Result] = importlib.import_module(f"llm_fp8.tools.verify.{self.name}").check
        return function


CHECKS: tuple[Check, ...] = (
    Check("versions", "Versions against the pins"),
    Check("imports", "Packages load"),
    Check("gpu", "GPU and driver"),
    Check("variables", "Environment variables"),
    Check("configs", "DeepSpeed and Accelerate files"),
    Check("output_folder", "Output folder"),
    Check("tracking", "Weights & Biases"),
    Check("data", "Tokenizer and dataset"),
    Check("recipes", "fp8 recipes of this GPU", needs_gpus=1),
    Check("steps", "A training step per recipe", needs_gpus=1, limit_s=None),
    Check("attention", "Attention at your shape", needs_gpus=1, limit_s=None),
    Check("cudnn", "One cuDNN in a process", needs_gpus=1, limit_s=None),
    Check("cpu_steps", "Training steps on the CPU", only_without_gpu=True),
    Check("engines", "Training runs under torchrun", needs_gpus=1, quick=False, limit_s=None),
    Check("torchao_steps", "A torchao training step per recipe", quick=False, limit_s=360.0),
    Check("rates", "GEMM and copy rates", needs_gpus=1, quick=False),
    Check("nccl", "Exchanges between the GPUs", needs_gpus=2, quick=False, limit_s=None),
)
"""What is timed stands last, when every other process has ended: those of both kinds of steps, attention and engines
run beside all before.
"""
