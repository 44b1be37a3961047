#!/usr/bin/env python
"""Is this machine fit to train in fp8? Run checks and short trainings, and print the commands that fix problems.

    python scripts/verify_fp8.py                      all checks, three to four minutes
    python scripts/verify_fp8.py --quick              without GEMM rates, torchao recipes and a run on all GPUs
    python scripts/verify_fp8.py --model_name Qwen/Qwen2.5-14B --max_seq_length 4096 --batch_size 4 --output verify.json
    python scripts/verify_fp8.py --only packages,variables
    torchrun --nnodes 2 ... scripts/verify_fp8.py [options of the run]         all hosts of a launch together

The exit code is 0 if no check failed (there may be warnings), 1 if a check failed, 2 for a mistake in the options, and
3 without a GPU, since the checks that need one were skipped. See docs/tools.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.script import run_script


def main() -> int:
    """Import and run the program. An import here lets `run_script` report a missing package in one sentence."""
    from llm_fp8.tools.verify.cli import main

    return main(sys.argv[1:], __doc__ or "")


if __name__ == "__main__":
    run_script(main)
