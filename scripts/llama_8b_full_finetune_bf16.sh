#!/usr/bin/env bash
# Llama-3.1-8B, every weight trained, in bf16: the baseline of scripts/llama_8b_full_finetune_fp8.sh.
#
#   scripts/llama_8b_full_finetune_bf16.sh [options of train_fp8.py, which win over configs/llama_8b_full_finetune.yaml]
#
# Writes runs/llama_8b_full_finetune_bf16. Both and their comparison in one command: scripts/compare_llama_8b.sh

set -euo pipefail

# shellcheck source=scripts/_train_pair.sh
source "$(dirname "${BASH_SOURCE[0]}")/_train_pair.sh"
train_on_one_gpu bf16 llama_8b_full_finetune llama_8b_full_finetune_bf16 "$@"
