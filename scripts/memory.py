#!/usr/bin/env python
"""Whether a model fits, and with which options: GPU memory by way of training and sharding, without a GPU or weights.

python scripts/memory.py --model_name Llama-3.1-8B --gpu H100 --num_gpus 2
python scripts/memory.py --model_name ./my-model --gpu 80 --max_seq_length 4096 --batch_size 2
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.utils.script import run_script


def main() -> int:
    """Import the program in `run_script`, which says in one sentence what is not installed, and run it."""
    from llm_fp8.tools.memory import main

    return main()


if __name__ == "__main__":
    run_script(main)
