#!/usr/bin/env python
"""Measure the training throughput of variants, which run in turn. A variant is a set of training options.

    python scripts/benchmark.py --model Llama-3.2-1B --rows 16 --length 1024 --micro_batches 4 \\
        --variants "fp8: --use_te --mixed_precision fp8; bf16: --use_te --mixed_precision bf16; hf: baseline hf_bf16"

benchmarks/bench.py describes the measurement. --num_gpus measures on several GPUs of this host.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.script import run_script


def main() -> int:
    """Import and run the program. An import here lets `run_script` report a missing package in one sentence."""
    from benchmarks.bench import main

    return main()


if __name__ == "__main__":
    run_script(main)
