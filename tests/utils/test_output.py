"""Tests of a program that prints to a file which has reached its maximum size, or to a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("place", "num_bytes"), [("log", 8), ("/dev/full", 0)])
def test_full_log_does_not_end_the_run(tmp_path: Path, place: str, num_bytes: int) -> None:
    program = (
        "import resource; from llm_fp8.utils import output; output.on_closed_pipe = lambda: None; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8)); [output.say('a line') for _ in range(3)]"
    )
    with open(tmp_path / place, "w") as log:
        process = subprocess.run([sys.executable, "-c", program], stdout=log, stderr=subprocess.PIPE, text=True)
    assert (process.returncode, process.stderr) == (0, "") and (tmp_path / place).stat().st_size == num_bytes
