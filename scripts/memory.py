#!/usr/bin/env python
"""Show whether a model fits, and with which options. Estimate the GPU memory of each way to train it in each sharding
mode. This needs no GPU and no weights.

python scripts/memory.py --model_name Llama-3.1-8B --gpu H100 --num_gpus 2
python scripts/memory.py --model_name ./my-model --gpu "RTX 4090" --max_seq_length 4096 --batch_size auto --lora_rank 32
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.script import run_script


def main() -> int:
    """Import and run the program. An import here lets `run_script` report a missing package in one sentence."""
    from llm_fp8.tools.memory import main

    return main()


if __name__ == "__main__":
    run_script(main)
