"""Runs the checks. One that crashes is a failed check with its error, and the others go on."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from llm_fp8.errors import UserError
from llm_fp8.verify.registry import Check
from llm_fp8.verify.result import Result
from llm_fp8.verify.setup import Setup

WHO_HAS_THE_MEMORY = "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv"


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
    return "needs an NVIDIA GPU" if check.needs_gpus == 1 else f"needs {check.needs_gpus} GPUs, this machine has {num_gpus}"


def crashed(check: Check, error: BaseException) -> Result:
    """The answer of a check that raised `error`."""
    again = f"python scripts/verify_fp8.py --only {check.name} --json verify.json   # the whole error is in the file's details"
    if isinstance(error, UserError):
        return Result("failed", str(error), mends=(again,))
    if type(error).__name__ == "OutOfMemoryError":
        return Result("failed", "the GPU's memory is taken, so this could not be checked", mends=(WHO_HAS_THE_MEMORY, again))
    first_line = (str(error).strip().splitlines() or [""])[0]
    lines = tuple("".join(traceback.format_exception(error)).splitlines())
    return Result("failed", f"the check itself crashed: {type(error).__name__}: {first_line}", lines, (again,))


def run_checks(
    checks: Iterable[Check], setup: Setup, num_gpus: int, before: Callable[[Check], None] = lambda check: None
) -> list[Row]:
    """Every check's answer, in order. Those that need more GPUs than there are, are skipped; one that another replaces here is left out."""
    rows = []
    for check in checks:
        reason = not_run(check, num_gpus)
        if reason is not None:
            if not check.only_without_gpu:
                rows.append(Row(check, Result("skipped", reason), 0.0))
            continue
        before(check)
        began = time.perf_counter()
        try:
            result = check.load()(setup)
        except Exception as error:
            result = crashed(check, error)
        rows.append(Row(check, result, time.perf_counter() - began))
    return rows
