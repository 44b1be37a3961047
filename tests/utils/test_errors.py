"""What the scripts print and exit with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("handler", ["strict", "surrogateescape"])  # the latter is Python's in the C locale
def test_characters_that_the_console_lacks_end_no_program(handler: str) -> None:
    """Of the data (the printed sample), or of a file's name that is not UTF-8."""
    program = "from llm_fp8.utils.errors import run_script; run_script(lambda: print('gro\\xdf \\udce9') or 0)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONIOENCODING": f"ascii:{handler}"}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"gro\\xdf \\udce9\n"


def test_output_into_a_pipe_that_is_closed_ends_without_a_traceback() -> None:
    """As `| head` closes it."""
    program = "from llm_fp8.utils.errors import run_script; run_script(lambda: print('a line') or 0)"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
