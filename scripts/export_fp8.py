#!/usr/bin/env python
"""Write an exported model in fp8 for inference, in the compressed-tensors format that vLLM and transformers load.

    python scripts/export_fp8.py runs/x/final --output runs/x/final-fp8
    python scripts/export_fp8.py runs/x/final --output runs/x/final-fp8 --data held_out.jsonl

Linear layers except the lm_head get e4m3 weights with a scale for each row; activations are scaled per token when the
model runs. With --data the loss is measured before and after. The export needs memory for one file of the model;
--data needs memory for the whole model. See docs/data_and_checkpoints.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.script import run_script


def main() -> int:
    """Run the program. It is imported here, so that `run_script` reports a missing package in one sentence."""
    from llm_fp8.tools.export_fp8 import main

    return main()


if __name__ == "__main__":
    run_script(main)
