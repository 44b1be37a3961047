"""The folder that runs write to: a file is written there and read back."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

from llm_fp8.tools.verify.result import Result
from llm_fp8.tools.verify.setup import Setup

LITTLE_GIB = 50.0
"""One checkpoint of an 8B model with its optimizer's state is more than this."""


def judge(folder: Path, error: str | None, free_gib: float) -> Result:
    """Not writable fails; little room is a warning."""
    facts = {"folder": str(folder), "error": error, "free_gib": free_gib}
    elsewhere = "python train_fp8.py --output_dir /path/with/room ..."
    if error is not None:
        quoted = shlex.quote(str(folder))
        mends = (f"mkdir -p {quoted} && chmod u+rwx {quoted}", elsewhere)
        return Result("failed", f"{folder} cannot be written: {error}", mends=mends, facts=facts)
    summary = f"{folder} can be written, {free_gib:,.0f} GiB free"
    if free_gib < LITTLE_GIB:
        return Result("warning", f"{summary}, less than one checkpoint of an 8B model", mends=(elsewhere,), facts=facts)
    return Result("passed", summary, facts=facts)


def try_to_write(folder: Path) -> str | None:
    """Write, read back and remove a file in `folder` or the first folder above it that exists; what went wrong, None
    where all went well.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file"
    probe = existing / f".verify-fp8-{os.getpid()}"
    try:
        probe.write_bytes(b"fp8")
        content = probe.read_bytes()
        probe.unlink()
    except OSError as error:
        return f"{error.strerror} ({existing})"
    return None if content == b"fp8" else f"{existing} gives back other bytes than were written"


def check(setup: Setup) -> Result:
    """--output_dir."""
    folder = setup.output_dir
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return judge(folder, try_to_write(folder), shutil.disk_usage(existing).free / 2**30)
