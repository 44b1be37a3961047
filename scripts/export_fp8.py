#!/usr/bin/env python
"""Write an exported model in fp8 for inference, in the compressed-tensors format that vLLM and transformers load.

    python scripts/export_fp8.py runs/x/final --output runs/x/final-fp8
    python scripts/export_fp8.py runs/x/final --output runs/x/final-fp8 --data held_out.jsonl

Linear layers except the lm_head get e4m3 weights with one scale per row. Activations are scaled per token when the
model runs. The export needs memory for one file of the model. With --data the program also measures the eval loss
before and after, which needs memory for the whole model. See docs/data_and_checkpoints.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.script import run_script


def main() -> int:
    """Import and run the program. An import here lets `run_script` report a missing package in one sentence."""
    from llm_fp8.tools.export_fp8 import main

    return main()


if __name__ == "__main__":
    run_script(main)
