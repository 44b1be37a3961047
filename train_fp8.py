#!/usr/bin/env python
"""Fine-tune a Llama, Qwen, Gemma or Mistral model on one GPU (or the CPU) in FP8, MXFP8 or BF16.

    python train_fp8.py                                                      the embedded model on the embedded dataset
    python train_fp8.py --model_name meta-llama/Llama-3.2-1B --dataset_name nvidia/OpenMathInstruct-2 \\
        --batch_size 12 --max_seq_length 1024 --use_te --mixed_precision fp8 --use_wandb

`--help_all` explains every option. The output folder gets run.json with the configuration and what actually ran.
"""

from __future__ import annotations

import os
import sys

from llm_fp8.tools.script import CUDA_DEFAULTS, IMPORTED_S, importing, run_script
from llm_fp8.utils.output import say

os.environ.update({**CUDA_DEFAULTS, **os.environ})  # before torch is imported


def train(description: str, parallel: bool = False) -> int:
    """Parse the command line, train, and return the exit code. `parallel` adds the options of train_multi_gpu.py."""
    from llm_fp8.config.parser import parse_launch  # imported here, so that `run_script` can report a missing package

    config = parse_launch(sys.argv[1:], os.environ, description.split("\n\n")[0], parallel)
    # Imported after parsing, so that --help and wrong options do not wait for torch.
    with importing():
        from llm_fp8.observability.metrics import PhaseClock
        from llm_fp8.run.run import run_training
        from llm_fp8.run.timeline import RunResults
    if config.run.dry_run:
        from llm_fp8.tools.dry_run import dry_run

        return dry_run(config)
    return run_training(config, RunResults(PhaseClock(IMPORTED_S)))


def main() -> int:
    """Train on one GPU, and return the exit code."""
    if not sys.argv[1:]:
        say("Without options, this is a trial: 1.7 million random weights learn from 6,000 arithmetic problems.")
        say("It takes three to nine minutes on a CPU. Choose others with --model_name and --dataset_name (see --help).")
    return train(str(__doc__))


if __name__ == "__main__":
    run_script(main)
