"""What the scripts print and exit with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("handler", ["strict", "surrogateescape"])  # the latter is Python's in the C locale
def test_characters_that_the_console_lacks_end_no_program(handler: str) -> None:
    """Text of the data (the printed sample), or of a file's name that is not UTF-8."""
    program = "from llm_fp8.tools.script import run_script; run_script(lambda: print('gro\\xdf \\udce9') or 0)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONIOENCODING": f"ascii:{handler}"}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"gro\\xdf \\udce9\n"


def test_output_into_a_pipe_that_is_closed_ends_without_a_traceback() -> None:
    """As `| head` closes it."""
    program = "from llm_fp8.tools.script import run_script; run_script(lambda: print('a line') or 0)"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_output_is_no_error(tmp_path: Path) -> None:
    """With `>&-` a file that the program opens would be its output."""
    program = (
        "import sys; from llm_fp8.tools.script import run_script; "
        "run_script(lambda: print('a line', file=open(sys.argv[1], 'w')) or print('another') or 0)"
    )
    done = subprocess.run(["sh", "-c", '"$0" -c "$1" "$2" >&- 2>&-', sys.executable, program, str(tmp_path / "log")])
    assert done.returncode == 0 and (tmp_path / "log").read_text() == "a line\n"


@pytest.mark.parametrize(
    "program", ["train_fp8.py", "scripts/verify_fp8.py", "scripts/diagnose_fp8.py", "-m llm_fp8 train"]
)
def test_a_python_without_the_packages_says_so_in_a_line(program: str) -> None:
    bare = "import runpy, sys; sys.path = [p for p in sys.path if not p.endswith('-packages')]; sys.path[:0] = ['.']; "
    words = program.split()
    run = "run_module('llm_fp8'" if words[0] == "-m" else f"run_path({words[0]!r}"
    code = f"{bare}sys.argv = {['it', *words[2:]]}; runpy.{run}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "requirements.txt" in done.stderr
