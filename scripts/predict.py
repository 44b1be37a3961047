#!/usr/bin/env python
"""What a step will take in each recipe, in time and in memory, before it is run. No GPU needed.

    python scripts/predict.py --model_name Llama-3.1-8B --batch_size 8 --max_seq_length 1024 \\
        --gradient_accumulation_steps 4
    python scripts/predict.py --model_name Llama-3.1-8B --batch_size 8 --num_gpus 4 --sharding_mode fsdp_full

For the TE decoder (--use_te). How far to trust it: docs/tools.md. Without --gpu it is this machine's GPU, or
else the one that the constants were measured on.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.predict.cli import main
from llm_fp8.utils.errors import run_script

if __name__ == "__main__":
    run_script(main)
