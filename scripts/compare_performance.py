#!/usr/bin/env python
"""Is fp8 worth it here? Train runs that differ only in precision, or read finished runs, and compare them.

    python scripts/compare_performance.py --train "--model_name meta-llama/Llama-3.2-1B --use_te \\
        --max_steps 300 --eval_every 50" --variants bf16,fp8,current --seeds 3
    python scripts/compare_performance.py --runs runs/bf16-1 runs/bf16-2 runs/fp8-1 runs/fp8-2
    python scripts/compare_performance.py --wandb team/llm-fp8/abc123 team/llm-fp8/def456
    python scripts/compare_performance.py          (reads the runs of scripts/train_bf16.sh and scripts/train_fp8.sh)

Repeating a --train command keeps finished runs and tries failed runs again. The output folder gets comparison.json and
comparison.html. docs/tools.md explains every figure. The exit code is 0, or 1 if a run failed. After Ctrl-C or SIGTERM
the current run saves a checkpoint before it stops.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.script import run_script


def main() -> int:
    """Import and run the program. An import here lets `run_script` report a missing package in one sentence."""
    from llm_fp8.tools.compare.cli import main

    return main()


if __name__ == "__main__":
    run_script(main)
