#!/usr/bin/env bash
# Trains Llama-3.1-8B in bf16 and in fp8, every weight, with the settings of configs/llama_8b_full_finetune.yaml, and compares the runs.
#
#   scripts/compare_llama_8b.sh [options of compare_performance.py] [-- options of train_fp8.py, for every run]
#
#   scripts/compare_llama_8b.sh                                   one run of each: speed and memory, and no verdict
#   scripts/compare_llama_8b.sh --seeds 3                         with a verdict
#   scripts/compare_llama_8b.sh -- --optimizer adamw_8bit         on a GPU of 80 GB
#
# Writes runs/compare_llama_8b; given again it continues.

set -euo pipefail

# shellcheck source=scripts/_python.sh
source "$(dirname "${BASH_SOURCE[0]}")/_python.sh"

comparison=()
while (($# > 0)) && [[ $1 != -- ]]; do
    comparison+=("$1")
    shift
done
training=(--config "$repository/configs/llama_8b_full_finetune.yaml" "${@:2}")
python=$(find_python)
apostrophe="'\\''" # between single quotes; printf %q writes what only bash reads
exec "$python" "$repository/scripts/compare_performance.py" --train "$(printf "'%s' " "${training[@]//\'/$apostrophe}")" --variants bf16,fp8 --seeds 1 \
    --output "$repository/runs/compare_llama_8b" "${comparison[@]}"
