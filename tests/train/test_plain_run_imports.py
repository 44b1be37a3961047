"""How much of the package a plain run loads: what it does not use is imported where it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 9_000
PROGRAM = """
import runpy, sys
sys.argv = ["train_fp8.py", *sys.argv[1:]]
try:
    runpy.run_path("train_fp8.py", run_name="__main__")
except SystemExit as ended:
    assert ended.code == 0, ended.code
files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
print(*sorted(files), sep="\\n")
"""


@pytest.mark.slow
def test_a_plain_run_loads_few_lines_of_ours(tmp_path, record_property):
    options = ["--max_seq_length=128", "--max_steps=1"]
    command = [sys.executable, "-c", PROGRAM, *options, f"--output_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = (f"{ROOT / 'llm_fp8'}/", str(ROOT / "te_llama.py"))
    loaded = [Path(line) for line in done.stdout.splitlines() if line.startswith(ours)]
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in (*loaded, ROOT / "train_fp8.py")}
    total = sum(lines.values())
    record_property("lines", total)
    unused = (
        "lora.py",
        "deepspeed.py",
        "torchao.py",
        "context_parallel.py",
        "micro_batch_graphs.py",
        "parity.py",
        "te_llama.py",
    )
    assert total <= MAX_LINES, sorted(lines.items(), key=lambda item: -item[1])
    assert not [name for name in lines if name.endswith(unused)]
