#!/usr/bin/env bash
# The bf16 baseline of scripts/train_fp8.sh: the same training on one GPU (configs/train_pair.yaml), the same modules, no fp8.
#
#   scripts/train_bf16.sh [options of train_fp8.py, which win over the file]
#
# Writes runs/train_bf16. When both are done: python scripts/compare_performance.py

set -euo pipefail

# shellcheck source=scripts/_train_pair.sh
source "$(dirname "${BASH_SOURCE[0]}")/_train_pair.sh"
train_on_one_gpu bf16 train_pair train_bf16 "$@"
