#!/usr/bin/env python
"""Write an exported model in fp8 for inference, in the compressed-tensors format that vLLM and transformers load.

    python scripts/export_fp8.py runs/x/final --output runs/x/final-fp8
    python scripts/export_fp8.py runs/x/final --output runs/x/final-fp8 --data held_out.jsonl

Linear layers but the lm_head get e4m3 weights with a scale for each row; activations are scaled per token when the
model runs. With --data it also measures the loss before and after. It needs memory for one file of the model, with
--data for the model. See docs/data_and_checkpoints.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.utils.script import run_script


def main() -> int:
    """Import the program in `run_script`, which says in one sentence what is not installed, and run it."""
    from llm_fp8.tools.export_fp8 import main

    return main()


if __name__ == "__main__":
    run_script(main)
