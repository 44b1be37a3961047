#!/usr/bin/env python
"""Fine-tune a Llama, Qwen, Gemma or Mistral model on several GPUs, of one host or several, in FP8, MXFP8 or BF16.

    torchrun --nproc_per_node=8 train_multi_gpu.py --model_name meta-llama/Llama-3.1-8B \\
        --dataset_name nvidia/OpenMathInstruct-2 --batch_size 8 --max_seq_length 1024 \\
        --use_te --mixed_precision fp8 --sharding_mode fsdp_full --use_wandb

It trains like train_fp8.py. Further options distribute the model and the data over GPUs (docs/multi_gpu.md).
`--batch_size` is per GPU.
"""

from __future__ import annotations

from llm_fp8.tools.script import run_script
from train_fp8 import train


def main() -> int:
    """Train on several GPUs, and return the exit code."""
    return train(str(__doc__), parallel=True)


if __name__ == "__main__":
    run_script(main)
