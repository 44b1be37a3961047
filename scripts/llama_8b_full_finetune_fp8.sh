#!/usr/bin/env bash
# Llama-3.1-8B, every weight trained, in fp8; scripts/llama_8b_full_finetune_bf16.sh is its baseline.
#
#   scripts/llama_8b_full_finetune_fp8.sh [options of train_fp8.py, which win over configs/llama_8b_full_finetune.yaml]
#
# Writes runs/llama_8b_full_finetune_fp8. Both and their comparison in one command: scripts/compare_llama_8b.sh

set -euo pipefail

# shellcheck source=scripts/_train_pair.sh
source "$(dirname "${BASH_SOURCE[0]}")/_train_pair.sh"
train_on_one_gpu fp8 llama_8b_full_finetune llama_8b_full_finetune_fp8 "$@"
