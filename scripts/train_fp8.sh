#!/usr/bin/env bash
# Trains what configs/train_pair.yaml says on one GPU in fp8; scripts/train_bf16.sh is its baseline.
#
#   scripts/train_fp8.sh [options of train_fp8.py, which win over the file]
#
# Writes runs/train_fp8. When both are done: python scripts/compare_performance.py

set -euo pipefail

# shellcheck source=scripts/_train_pair.sh
source "$(dirname "${BASH_SOURCE[0]}")/_train_pair.sh"
train_on_one_gpu fp8 train_pair train_fp8 "$@"
