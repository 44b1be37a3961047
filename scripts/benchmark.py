#!/usr/bin/env python
"""Training throughput of variants that take turns, each a line of options of the training scripts.

    python scripts/benchmark.py --model Llama-3.2-1B --rows 16 --length 1024 --micro_batches 4 \\
        --variants "fp8: --use_te --mixed_precision fp8; bf16: --use_te --mixed_precision bf16; hf: baseline hf_bf16"

What is measured and how is said in benchmarks/bench.py; --num_gpus measures on several GPUs of this host.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.utils.script import run_script


def main() -> int:
    """Import the program in `run_script`, which says in one sentence what is not installed, and run it."""
    from benchmarks.bench import main

    return main()


if __name__ == "__main__":
    run_script(main)
