#!/usr/bin/env python
"""Training throughput on the GPUs of one host: this project's sharding modes and the usual set-ups, in one launch.

    torchrun --nproc_per_node=4 --max-restarts=8 scripts/benchmark_multi_gpu.py \\
        --workloads Llama-3.1-8B:8x1024x4,Llama-3.1-8B:1x8192x4 \\
        --arms fsdp_full:hf_bf16,fsdp_full:bf16,fsdp_full:delayed,fsdp_grad:delayed --output result.json

Random weights, random tokens, rows that are one document each, the optimizer step included; each GPU (under context
parallelism each group of GPUs) has tokens of its own. A workload is MODEL:ROWSxLENGTHxMICRO_BATCHES, per GPU. Variants:

- MODE:PRECISION, this project's Trainer: a value of --sharding_mode with bf16, delayed, current or block, and the TE
  decoder. Behind it may stand :swap (the Hugging Face decoder, its linear layers swapped in fp8), :recompute (gradient
  checkpointing), :fp8_params, :sync (gradients reduced in each micro-batch), and before it cpN: (N GPUs share the
  tokens of a row).
- ddp:RIVAL and fsdp_full:RIVAL: transformers' model under Accelerate's DDP, or its FSDP2 plugin; RIVAL is hf_bf16,
  hf_bf16_compiled, accelerate_te, te_autocast, torchao_tensorwise or torchao_rowwise
  (llm_fp8/tools/bench/baselines.py); deepspeed_1:RIVAL to deepspeed_3:RIVAL, its DeepSpeed plugin, with the first two.
  Files recorded before these names have hf_ddp_bf16 and hf_fsdp2_bf16 for ddp:hf_bf16 and fsdp_full:hf_bf16.

--deepspeed_config takes another file for the variants under DeepSpeed. Ours are checked as a run is, a baseline has
what the file says: so it is seen what an entry costs that a run refuses. The file's entries are in the rows.

Throughput is the tokens of all GPUs over the median step of the slowest one, after `--warmup` steps; memory is that of
the GPU that needs most. One more step is recorded, for the kernels that ran and the share of communication.

The results are rewritten after every variant. A variant that fails, runs out of memory or takes longer than
--arm_timeout_s ends its processes; its row says so, and --max-restarts of torchrun lets them start anew with the next
variant, that many times.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llm_fp8.tools.bench.launch import main
from llm_fp8.utils.errors import run_script

if __name__ == "__main__":
    run_script(main)
