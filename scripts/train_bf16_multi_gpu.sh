#!/usr/bin/env bash
# The bf16 baseline of scripts/train_fp8_multi_gpu.sh: the same training on all GPUs of this host.
#
#   scripts/train_bf16_multi_gpu.sh [options of train_multi_gpu.py, which win over configs/train_pair.yaml]
#
# PYTHON, NPROC_PER_NODE and, for several hosts, NNODES and the others: see scripts/launch_multi_node.sh. Writes runs/train_bf16_multi_gpu.

set -euo pipefail

# shellcheck source=scripts/_train_pair.sh
source "$(dirname "${BASH_SOURCE[0]}")/_train_pair.sh"
train_on_all_gpus bf16 train_pair train_bf16_multi_gpu "$@"
