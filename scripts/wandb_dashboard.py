#!/usr/bin/env python
"""Lays out the comparison of training runs in W&B (llm_fp8/tools/wandb_dashboard.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.utils.script import run_script


def main() -> int:
    """Import the program in `run_script`, which says in one sentence what is not installed, and run it."""
    from llm_fp8.tools.wandb_dashboard import main

    return main()


if __name__ == "__main__":
    run_script(main)
