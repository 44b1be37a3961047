#!/usr/bin/env python
"""Let a model answer held-out problems and count how many of its answers are right.

    python scripts/evaluate.py --model_name runs/x/final
    python scripts/evaluate.py --model_name meta-llama/Llama-3.2-1B \\
        --dataset_name nvidia/OpenMathInstruct-2 --output base.json

--model_name is an exported folder, any other Hugging Face folder, or a hub id. A PEFT adapter is merged into its base
model. If a run exported the folder, data options default to those in its run.json, so that the problems are those that
the run held out. The program prints the share of right answers with Wilson's 95% interval and the eval loss, and writes
every answer as JSON. See docs/data_and_checkpoints.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.script import run_script


def main() -> int:
    """Import and run the program. An import here lets `run_script` report a missing package in one sentence."""
    from llm_fp8.tools.evaluate import main

    return main()


if __name__ == "__main__":
    run_script(main)
