#!/usr/bin/env python
"""Is fp8 worth it here? Trains bf16 and fp8 runs that differ in nothing else, or reads finished ones, and says so with
its figures.

    python scripts/compare_performance.py --train "--model_name meta-llama/Llama-3.2-1B --use_te \\
        --max_steps 300 --eval_every 50" --variants bf16,fp8,current --seeds 3
    python scripts/compare_performance.py --runs runs/bf16-1 runs/bf16-2 runs/fp8-1 runs/fp8-2
    python scripts/compare_performance.py --wandb team/llm-fp8/abc123 team/llm-fp8/def456
    python scripts/compare_performance.py          the runs of scripts/train_bf16.sh and scripts/train_fp8.sh

Given again, a --train command continues: finished runs are taken as they are, failed ones are tried again. Writes
comparison.json and comparison.html to the output folder. docs/tools.md explains every figure. Exit code 0, or 1 where
a run failed. Ctrl-C and SIGTERM let the runs save and stop first.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.utils.script import run_script


def main() -> int:
    """Import the program in `run_script`, which says in one sentence what is not installed, and run it."""
    from llm_fp8.tools.compare.cli import main

    return main()


if __name__ == "__main__":
    run_script(main)
