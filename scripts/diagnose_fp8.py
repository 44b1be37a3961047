#!/usr/bin/env python
"""Show the precision of the parts of a training step, where its time and memory go, and which option would help.

    python scripts/diagnose_fp8.py --model_name meta-llama/Llama-3.1-8B --random_init --batch_size 8 --use_te \\
        --mixed_precision fp8 --json diagnosis.json

The options are those of train_fp8.py. The program builds the same run, measures a few steps on its data, and saves
nothing. docs/tools.md explains the tables. The exit code is 0, or 1 if the run differs from the request or attention is
unfused, 2 for a mistake in the options, 3 without a GPU (except with --quality).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.script import run_script


def main() -> int:
    """Import and run the program. An import here lets `run_script` report a missing package in one sentence."""
    from llm_fp8.tools.diagnose.cli import main

    return main()


if __name__ == "__main__":
    run_script(main)
