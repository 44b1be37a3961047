"""The table of checks, and the loop that runs them. One that crashes or hangs is a failed check."""

from __future__ import annotations

import importlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from llm_fp8.tools.verify.result import Result, Setup, first_line
from llm_fp8.utils.errors import UserError
from llm_fp8.utils.packages import VERIFY

Answer = TypeVar("Answer")
_THREAD = "verify"


@dataclass(frozen=True)
class Check:
    """One check: the function `check_NAME` of a module, which is imported when the check runs."""

    name: str
    title: str
    """For the table."""
    module: str
    needs_gpus: int = 0
    quick: bool = True
    """Whether --quick runs it too."""
    only_without_gpu: bool = False
    limit_s: float | None = 120.0
    """Time limit; None where the check waits for processes that have limits of their own."""

    def run(self, setup: Setup) -> Result:
        """Raises whatever its module or function raises."""
        module = importlib.import_module(f"llm_fp8.tools.verify.{self.module}")
        result: Result = getattr(module, f"check_{self.name}")(setup)
        return result

    def reason_to_skip(self, num_gpus: int) -> str | None:
        """Why it cannot or need not run with so many GPUs; None where it runs."""
        if self.only_without_gpu:
            return "the checks on the GPU take its place" if num_gpus else None
        if num_gpus >= self.needs_gpus:
            return None
        return "needs an NVIDIA GPU" if self.needs_gpus == 1 else f"needs 2 GPUs, this machine has {num_gpus}"


CHECKS: tuple[Check, ...] = (
    Check("versions", "Versions against the pins", "versions"),
    Check("imports", "Packages load", "versions"),
    Check("gpu", "GPU and driver", "gpu"),
    Check("variables", "Environment variables", "environment_rules"),
    Check("configs", "DeepSpeed and Accelerate files", "configs"),
    Check("output_folder", "Output folder", "inputs"),
    Check("tracking", "Weights & Biases", "inputs"),
    Check("data", "Tokenizer and dataset", "inputs"),
    Check("recipes", "fp8 recipes of this GPU", "gpu", needs_gpus=1),
    Check("steps", "A training step per recipe", "steps", needs_gpus=1, limit_s=None),
    Check("attention", "Attention at your shape", "attention", needs_gpus=1, limit_s=None),
    Check("cudnn", "One cuDNN in a process", "attention", needs_gpus=1, limit_s=None),
    Check("cpu_steps", "Training steps on the CPU", "steps", only_without_gpu=True),
    Check("engines", "Training runs under torchrun", "distributed", needs_gpus=1, quick=False, limit_s=None),
    Check("torchao_steps", "A torchao training step per recipe", "steps", quick=False, limit_s=360.0),
    Check("rates", "GEMM and copy rates", "gpu", needs_gpus=1, quick=False),
    Check("nccl", "All-reduce and all-gather", "distributed", needs_gpus=2, quick=False, limit_s=None),
)
"""In the order in which they run. What is timed stands last, when the processes that started before the first check
(both kinds of steps, attention, engines) have ended.
"""


class Row(NamedTuple):
    check: Check
    result: Result
    wall_s: float


class TimeLimit(Exception):
    """A function was given up after the seconds in the message. `stack`: where it was, as a traceback's lines."""

    def __init__(self, limit_s: float, stack: list[str]) -> None:
        super().__init__(f"did not end within {limit_s:.0f} s")
        self.stack = tuple(stack)


def within(limit_s: float | None, function: Callable[[], Answer]) -> Answer:
    """What `function` returns or raises; `TimeLimit` after `limit_s`, with the function left in a daemon thread."""
    if limit_s is None:
        return function()
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            answer.set_result(function())
        except Exception as error:
            answer.set_exception(error)

    thread = threading.Thread(target=work, daemon=True, name=_THREAD)
    thread.start()
    thread.join(limit_s)
    if not answer.done():
        frame = sys._current_frames().get(thread.ident or 0)
        raise TimeLimit(limit_s, "".join(traceback.format_stack(frame)).splitlines() if frame else [])
    return answer.result()


def is_hanging() -> bool:
    """Whether a function that was given up, or that a signal interrupted, still runs."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def run_check(check: Check, setup: Setup) -> Row:
    """The check's answer; failed where it raises or exceeds its time limit."""
    reason = check.reason_to_skip(setup.num_gpus)
    if reason is not None:
        return Row(check, Result("skipped", reason), 0.0)
    began = time.perf_counter()
    try:
        result = within(check.limit_s, lambda: check.run(setup))
    except Exception as error:
        result = _crashed(check, error)
    return Row(check, result, time.perf_counter() - began)


def _crashed(check: Check, error: Exception) -> Result:
    again = f"{VERIFY} --only {check.name} --json verify.json   # with the traceback in its details"
    if isinstance(error, TimeLimit):
        driver = "nvidia-smi   # whether the driver answers, and who uses the GPU"
        return Result("failed", f"the check {error}", error.stack, (again, driver))
    if isinstance(error, UserError):
        return Result("failed", str(error), fixes=(again,))
    if type(error).__name__ == "OutOfMemoryError":
        users = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"
        return Result("failed", "too little GPU memory is free for this check", fixes=(users, again))
    lines = tuple("".join(traceback.format_exception(error)).splitlines())
    return Result("failed", f"the check itself crashed: {type(error).__name__}: {first_line(error)}", lines, (again,))
