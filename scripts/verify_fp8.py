#!/usr/bin/env python
"""Is this machine fit to train in fp8? Train as a run would, and print the commands that fix problems.

    python scripts/verify_fp8.py                      all checks, three to four minutes
    python scripts/verify_fp8.py --quick              without GEMM rates, torchao's recipes and the run on all GPUs
    python scripts/verify_fp8.py --model_name Qwen/Qwen2.5-14B --max_seq_length 4096 --batch_size 4 --output verify.json
    python scripts/verify_fp8.py --only packages,variables
    torchrun --nnodes 2 ... scripts/verify_fp8.py [options of the run]         all hosts of a launch together

Exit codes: 0 all right (warnings aside), 1 a check failed, 2 a mistake in the options, 3 no GPU, so only checks that
need none have run. See docs/tools.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.script import run_script


def main() -> int:
    """Run the program. It is imported here, so that `run_script` reports a missing package in one sentence."""
    from llm_fp8.tools.verify.cli import main

    return main(sys.argv[1:], __doc__ or "")


if __name__ == "__main__":
    run_script(main)
