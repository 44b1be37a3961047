"""The output and exit codes of scripts: text that the console cannot show, closed outputs, and missing packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("handler", ["strict", "surrogateescape"])  # Python uses the second one in the C locale
def test_unencodable_characters_are_escaped(handler: str) -> None:
    """The characters could come from a printed sample of the data, or from a file name that is not UTF-8."""
    program = "from llm_fp8.tools.script import run_script; run_script(lambda: print('gro\\xdf \\udce9') or 0)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONIOENCODING": f"ascii:{handler}"}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"gro\\xdf \\udce9\n"


def test_closed_pipe_ends_the_program_without_a_traceback() -> None:
    """The reader has closed the pipe, as `| head` does."""
    program = "from llm_fp8.tools.script import run_script; run_script(lambda: print('a line') or 0)"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_output_is_not_an_error(tmp_path: Path) -> None:
    """`>&-` closes standard output. The next file that the program opens must not become the standard output."""
    program = (
        "import sys; from llm_fp8.tools.script import run_script; "
        "run_script(lambda: print('a line', file=open(sys.argv[1], 'w')) or print('another') or 0)"
    )
    done = subprocess.run(["sh", "-c", '"$0" -c "$1" "$2" >&- 2>&-', sys.executable, program, str(tmp_path / "log")])
    assert done.returncode == 0 and (tmp_path / "log").read_text() == "a line\n"


@pytest.mark.parametrize(
    "program", ["train_fp8.py", "scripts/verify_fp8.py", "scripts/diagnose_fp8.py", "-m llm_fp8 train"]
)
def test_missing_packages_are_an_error_of_one_line(program: str) -> None:
    start = "import runpy, sys; sys.path = [p for p in sys.path if not p.endswith('-packages')]; sys.path[:0] = ['.']; "
    argv = program.split()
    run = "run_module('llm_fp8'" if argv[0] == "-m" else f"run_path({argv[0]!r}"
    code = f"{start}sys.argv = {['it', *argv[2:]]}; runpy.{run}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "requirements.txt" in done.stderr
