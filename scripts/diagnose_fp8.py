#!/usr/bin/env python
"""What one training step computes in which precision, where its time and memory go, and which option would help.

    python scripts/diagnose_fp8.py --model_name meta-llama/Llama-3.1-8B --random_init --batch_size 8 --use_te \\
        --mixed_precision fp8 --json diagnosis.json

Takes the options of train_fp8.py, builds the same run, and measures a few steps on its data; nothing is saved. How to
read the tables: docs/tools.md. Exit code: 0; 1 where what was asked for is not what runs, or attention is unfused; 2
for a mistake in the options; 3 without a GPU, where only the fp8 coverage is said.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.utils.script import run_script


def main() -> int:
    """Import the program in `run_script`, which says in one sentence what is not installed, and run it."""
    from llm_fp8.tools.diagnose.cli import main

    return main()


if __name__ == "__main__":
    run_script(main)
