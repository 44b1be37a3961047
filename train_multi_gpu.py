#!/usr/bin/env python
"""Fine-tune a Llama, Qwen or Mistral model on several GPUs, of one host or of many, in FP8, MXFP8 or BF16.

    torchrun --nproc_per_node=8 train_multi_gpu.py --model_name meta-llama/Llama-3.1-8B \\
        --dataset_name nvidia/OpenMathInstruct-2 --batch_size 8 --max_seq_length 1024 \\
        --use_te --mixed_precision fp8 --sharding_mode fsdp_full --use_wandb

The training is that of train_fp8.py; the options it adds say how model and data are spread (docs/multi_gpu.md).
`--batch_size` is per GPU.
"""

from __future__ import annotations

import os
import sys

from llm_fp8.utils.script import CUDA_DEFAULTS, IMPORTED_S, PhaseClock, importing, run_script

os.environ.update({**CUDA_DEFAULTS, **os.environ})  # before torch is imported


def main() -> int:
    """Parse the command line, train, and return the exit code."""
    from llm_fp8.config.parser import parse_launch  # here, where `run_script` says what is not installed

    config = parse_launch(sys.argv[1:], os.environ, description=(__doc__ or "").split("\n\n")[0], parallel=True)
    # After the parser: --help and mistakes answer without loading the rest.
    with importing():
        from llm_fp8.run.run import run_training
        from llm_fp8.run.timeline import RunResults

    return run_training(config, RunResults(PhaseClock(IMPORTED_S)))


if __name__ == "__main__":
    run_script(main)
