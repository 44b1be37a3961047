"""Tests of a program that prints to a file which has reached its maximum size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_log_at_its_size_limit_does_not_end_the_run(tmp_path: Path) -> None:
    program = (
        "import resource; from llm_fp8.utils import output; output.on_closed_pipe = lambda: None; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8)); [output.say('a line') for _ in range(3)]"
    )
    with open(tmp_path / "log", "w") as log:
        process = subprocess.run([sys.executable, "-c", program], stdout=log, stderr=subprocess.PIPE, text=True)
    assert (process.returncode, process.stderr) == (0, "") and (tmp_path / "log").stat().st_size == 8
