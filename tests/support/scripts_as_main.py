"""A program run as `python PROGRAM WORDS` runs it, but in this process, which has imported what it needs: for those
that train nothing.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]


def run_as_main(program: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Its exit code and what it printed; an error that a program of its own would print as a traceback is raised
    here.
    """
    out, said = io.StringIO(), io.StringIO()
    command = [program, *map(str, words)]
    with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            runpy.run_path(str(ROOT / program), run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return subprocess.CompletedProcess(command, code, out.getvalue(), said.getvalue())
